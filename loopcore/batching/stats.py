"""What the engine counts about itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Stats"]


@dataclass
class Stats:
    """Counters since the engine was made. Token-loops count word positions, BOS left out."""

    submitted: int = 0
    rejected: int = 0
    """Refused because the line was full."""
    admitted: int = 0
    refills: int = 0
    """Rows that joined a batch already under way."""
    ticks: int = 0
    """Ticks with at least one live row."""
    passes: int = 0
    """Passes of the block: one a tick and bucket."""
    useful_token_loops: int = 0
    padded_token_loops: int = 0
    """Work on padding, up to the bucket's length."""
    row_loops: int = 0
    readout_rows: int = 0
    check_rows: int = 0
    tick_s: float = 0.0
    """Seconds in ticks with at least one live row."""
    longest_tick_s: float = 0.0
    most_live_rows: int = 0
    exits: Counter[int] = field(default_factory=Counter)
    """Answered rows by the loops they used."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Finished rows by exit reason."""

    @property
    def useful_share(self) -> float:
        """Useful over executed token-loops; 1 before any work."""
        executed = self.useful_token_loops + self.padded_token_loops
        return self.useful_token_loops / executed if executed else 1.0

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, Counter)}
        exits = {str(loops): count for loops, count in sorted(self.exits.items())}
        return plain | {"useful_share": self.useful_share, "exits": exits, "reasons": dict(sorted(self.reasons.items()))}
