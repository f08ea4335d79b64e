"""What commands print: JSON, tables, times, numbers. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["age", "emit_json", "fields", "number", "say", "span", "table"]


def emit_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def say(text: str) -> None:
    """A line about what goes on."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str = "none") -> None:
    """Columns as wide as their content, the last one cut to the terminal where there is one."""
    import shutil

    shown = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if not shown:
        say(empty)
        return
    widths = [max(len(column), *(len(row[at]) for row in shown)) for at, column in enumerate(columns)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    for row in [list(columns), *shown]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(line if len(line) <= room else line[: room - 1] + "…")


def fields(content: dict[str, Any]) -> None:
    """One `name  value` a line; what is empty is left out."""
    shown = {name: value for name, value in content.items() if value not in (None, "", [], {})}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        print(f"{name.ljust(width)}  {value}")


def span(seconds: float | None) -> str:
    """A duration in two units at most: `45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds is None:
        return ""
    whole = max(0, round(seconds))
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


def age(at: float | None) -> str:
    """How long ago a time in seconds since 1970 was."""
    import time

    return "" if at is None else f"{span(time.time() - at)} ago"


def number(value: Any) -> str:
    """Four digits of a number, anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"
