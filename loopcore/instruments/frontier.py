"""The frontier: how long a prefix is right after each loop, and how fast it grows (arXiv 2607.20594).

Free training installs a linear frontier whose speed v, in positions per loop, is set by the contract. v is the
least-squares slope over the loops up to and including the first saturated one: past it the frontier cannot grow, and a
line through all T loops of a solved model gives n/T whatever the model does.

Shapes: R resamples, T loops, B words, N positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopcore.errors import Undecided
from loopcore.instruments.fits import row
from loopcore.instruments.speed import MIN_POINTS, Speed, fit_lines, interval, resampled
from loopcore.specs.probe import SPEED_LEVEL

__all__ = ["FrontierResult", "fit_speed", "frontier", "measure_frontier", "speed_level"]

_ROUNDING = 1e-9  # an accuracy of 9/10 reaches q = .9 whatever the last bit says


def frontier(accuracy_TN: Tensor, q: float) -> Tensor:
    """frontier_T, long: the longest contiguous prefix whose every position has accuracy >= q, made monotone over loops.

    Takes leading batch dimensions: [..., T, N] gives [..., T].
    """
    prefix_T = (accuracy_TN >= q - _ROUNDING).long().cumprod(-1).sum(-1)
    return prefix_T.cummax(-1).values


def fit_speed(frontier_T: Tensor, length: int) -> Speed:
    """Slope of the frontier over loops 1 up to the first one at its final value, that one included.

    For a solved word length that value is `length`; a frontier that stalls before is fitted up to where it stalls. Raises
    Undecided when it does not grow, or saturates in fewer than three loops.
    """
    v_R, r2_R, points_R, _ = _fit(frontier_T.unsqueeze(0))
    v, r2, points, reached = float(v_R[0]), float(r2_R[0]), int(points_R[0]), int(frontier_T.max())
    if reached == 0 or v <= 0.0:
        raise Undecided(f"the frontier does not grow: {reached} of {length} positions solved after {frontier_T.numel()} loops")
    if points < MIN_POINTS:
        raise Undecided(
            f"the frontier is at its end ({reached} of {length} positions) after {points} loop(s) and a slope needs at least "
            f"{MIN_POINTS}; measure longer words"
        )
    return Speed(v, r2, points)


def _fit(frontier_RT: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(v_R, r2_R, points_R, decided_R) of every frontier in one go."""
    loops_T = torch.arange(1, frontier_RT.shape[-1] + 1)
    # Before the final value, or the first loop at it: the value of the loop before (0 before loop 1) is still below.
    final_R1 = frontier_RT.amax(-1, keepdim=True)
    before_RT = torch.cat([torch.full_like(final_R1, -1), frontier_RT[..., :-1]], -1)
    v_R, r2_R, points_R = fit_lines(loops_T, frontier_RT, before_RT < final_R1)
    return v_R, r2_R, points_R, (points_R >= MIN_POINTS) & (v_R > 0)


@dataclass(frozen=True)
class FrontierResult:
    """What `measure_frontier` found."""

    length: int
    loops: int
    words: int
    accuracy_TN: tuple[tuple[float, ...], ...]
    frontiers: dict[float, tuple[int, ...]]
    """Per level q: the frontier after each loop, in positions."""
    speeds: dict[float, Speed]
    """Per level q that supports one."""
    undecided: dict[float, str]
    """Per level q that does not: why."""
    level: float
    """The level that v_hat is read at: the one nearest `SPEED_LEVEL`."""

    @property
    def speed(self) -> Speed:
        """v_hat at `level`. Raises Undecided with the reason where there is none."""
        if self.level in self.undecided:
            raise Undecided(self.undecided[self.level])
        return self.speeds[self.level]

    @property
    def saturated_at(self) -> int | None:
        """First loop at which every position reaches `level`; None where none does."""
        return next((t for t, reached in enumerate(self.frontiers[self.level], 1) if reached == self.length), None)

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes, value, low, high. Undecided figures have no row."""
        rows: list[dict[str, Any]] = []
        for q, reached_T in self.frontiers.items():
            for t, reached in enumerate(reached_T, 1):
                rows.append(row("frontier", {"q": q, "loop": t}, float(reached)))
        for q, speed in self.speeds.items():
            rows.append(row("speed", {"estimator": "frontier", "q": q}, speed.v, speed.low, speed.high))
            rows.append(row("speed_r2", {"estimator": "frontier", "q": q}, speed.r2))
        return rows

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {
            "length": self.length,
            "loops": self.loops,
            "words": self.words,
            "level": self.level,
            "accuracy": [list(row) for row in self.accuracy_TN],
            "frontiers": {f"{q:g}": list(reached) for q, reached in self.frontiers.items()},
            "speeds": {f"{q:g}": speed.to_json() for q, speed in self.speeds.items()},
            "undecided": {f"{q:g}": reason for q, reason in self.undecided.items()},
        }


def measure_frontier(
    correct_TBN: Tensor,
    *,
    levels: Sequence[float] = (0.8, 0.9, 0.95),
    bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> FrontierResult:
    """Frontier and v_hat at every level q from `correct_by_loop`, each v with an interval from resampled words.

    Never raises for a model that has not learned its task: such levels are listed in `undecided` with the reason.
    """
    loops, words, length = correct_TBN.shape
    accuracy_TN = torch.stack([correct_BN.double().mean(0) for correct_BN in correct_TBN])
    frontiers = {q: frontier(accuracy_TN, q) for q in levels}
    speeds: dict[float, Speed] = {}
    undecided: dict[float, str] = {}
    for q, frontier_T in frontiers.items():
        try:
            speeds[q] = fit_speed(frontier_T, length)
        except Undecided as reason:
            undecided[q] = str(reason)
    if bootstrap and speeds:
        fits: dict[float, list[tuple[Tensor, Tensor]]] = {q: [] for q in speeds}
        flat_BX = correct_TBN.permute(1, 0, 2).reshape(words, loops * length)
        for counts_RX in resampled(flat_BX, bootstrap, seed):
            accuracy_RTN = counts_RX.double().view(-1, loops, length) / words
            for q, found in fits.items():
                v_R, _, _, decided_R = _fit(frontier(accuracy_RTN, q))
                found.append((v_R, decided_R))
        for q, found in fits.items():
            try:
                speeds[q] = interval(speeds[q], torch.cat([v for v, _ in found]), torch.cat([d for _, d in found]), confidence)
            except Undecided as reason:
                undecided[q] = str(reason)
                del speeds[q]
    return FrontierResult(
        length=length,
        loops=loops,
        words=words,
        accuracy_TN=tuple(tuple(row) for row in accuracy_TN.tolist()),
        frontiers={q: tuple(reached.tolist()) for q, reached in frontiers.items()},
        speeds=speeds,
        undecided=undecided,
        level=speed_level(levels),
    )


def speed_level(levels: Sequence[float]) -> float:
    """The level that gives v_hat: the first of those nearest `SPEED_LEVEL`."""
    return min(levels, key=lambda q: round(abs(q - SPEED_LEVEL), 9))
