"""Convergence times tau(n, i): the loop from which position i stays right, and the speed they give (arXiv 2607.20594).

Over solved words, tau grows as i / v. Which statistic of tau is fitted matters: on small groups lucky guesses that stick
pull median and mean down, so they read v 15-25 % fast; the 90th percentile agrees with the frontier. Position 0 is left
out, because with BOS positions 0 and 1 are both right after loop 1. Watch T to 1.5 T loops: by 2 T overthinking makes
solved words look unsolved.

Shapes: R resamples, T loops, B words, S solved words, N positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopcore.errors import Undecided
from loopcore.instruments.fits import row
from loopcore.instruments.speed import MIN_POINTS, Speed, fit_lines, interval, resampled

__all__ = ["MIN_SOLVED", "STATISTICS", "TauResult", "convergence_times", "measure_tau", "solved_words"]

MIN_SOLVED = 8  # solved words below which tau is not read
STATISTICS = ("p90", "median", "mean")


def convergence_times(correct_TBN: Tensor) -> Tensor:
    """tau_BN, long: the first loop (from 1) from which the position stays right to the last watched one; T + 1 if it does not."""
    loops = correct_TBN.shape[0]
    right_to_end_BN = torch.zeros(correct_TBN.shape[1:], dtype=torch.long)
    still_BN = torch.ones(correct_TBN.shape[1:], dtype=torch.bool)
    for correct_BN in correct_TBN.flip(0):
        still_BN &= correct_BN
        right_to_end_BN += still_BN
    return loops + 1 - right_to_end_BN


def solved_words(tau_BN: Tensor, loops: int) -> Tensor:
    """solved_B, bool: every position converged within the `loops` watched. Raises Undecided below `MIN_SOLVED` of them."""
    solved_B = (tau_BN <= loops).all(-1)
    found = int(solved_B.sum())
    if found < MIN_SOLVED:
        raise Undecided(
            f"{found} of {solved_B.numel()} words are solved after {loops} loops and tau needs at least {MIN_SOLVED}; train "
            f"further, measure more words, or watch no more than 1.5 times the trained loops"
        )
    return solved_B


def _statistics(counts_RNT: Tensor) -> dict[str, Tensor]:
    """Per statistic, tau_RN from how many words converged at each loop; quantiles interpolate between order statistics."""
    loops_T = torch.arange(1, counts_RNT.shape[-1] + 1, dtype=torch.float64)
    counts_RNT = counts_RNT.double()
    upto_RNT = counts_RNT.cumsum(-1)
    words_RN = upto_RNT[..., -1]

    def order_statistic(rank_RN: Tensor) -> Tensor:
        return 1.0 + (upto_RNT <= rank_RN.unsqueeze(-1)).sum(-1).double()

    def quantile(q: float) -> Tensor:
        at_RN = (words_RN - 1.0) * q
        below_RN = at_RN.floor()
        low_RN, high_RN = order_statistic(below_RN), order_statistic((below_RN + 1.0).minimum(words_RN - 1.0))
        return low_RN + (high_RN - low_RN) * (at_RN - below_RN)

    return {"p90": quantile(0.9), "median": quantile(0.5), "mean": (counts_RNT * loops_T).sum(-1) / words_RN}


def _fit(tau_RN: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(v_R, r2_R, points_R, decided_R): 1 / slope of tau over positions 1..N-1."""
    position_N = torch.arange(tau_RN.shape[-1])
    slope_R, r2_R, points_R = fit_lines(position_N, tau_RN, (position_N > 0).expand_as(tau_RN))
    grows_R = slope_R > 0
    v_R = torch.where(grows_R, 1.0 / torch.where(grows_R, slope_R, torch.ones_like(slope_R)), torch.zeros_like(slope_R))
    return v_R, r2_R, points_R, grows_R & (points_R >= MIN_POINTS)


@dataclass(frozen=True)
class TauResult:
    """What `measure_tau` found. `undecided` is a reason a statistic; with too few solved words it names all of them."""

    length: int
    loops: int
    words: int
    solved: int
    """Words right at every position to the last watched loop."""
    tau: dict[str, tuple[float, ...]]
    """Per statistic: loops until position i has converged, over the solved words."""
    speeds: dict[str, Speed]
    undecided: dict[str, str]

    @property
    def speed(self) -> Speed:
        """v_hat by the 90th percentile, the estimator to trust. Raises Undecided with the reason where there is none."""
        return self.speed_by("p90")

    def speed_by(self, statistic: str) -> Speed:
        """v_hat by one of `STATISTICS`. Raises Undecided with the reason where there is none."""
        if statistic in self.undecided:
            raise Undecided(self.undecided[statistic])
        return self.speeds[statistic]

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes, value, low, high. Undecided figures have no row."""
        rows = [row("solved_words", {"loops": self.loops}, self.solved / self.words)]
        for statistic, tau_N in self.tau.items():
            for i, value in enumerate(tau_N):
                rows.append(row("tau", {"statistic": statistic, "position": i}, value))
        for statistic, speed in self.speeds.items():
            rows.append(row("speed", {"estimator": f"tau_{statistic}"}, speed.v, speed.low, speed.high))
            rows.append(row("speed_r2", {"estimator": f"tau_{statistic}"}, speed.r2))
        return rows

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {
            "length": self.length,
            "loops": self.loops,
            "words": self.words,
            "solved": self.solved,
            "tau": {statistic: list(values) for statistic, values in self.tau.items()},
            "speeds": {statistic: speed.to_json() for statistic, speed in self.speeds.items()},
            "undecided": dict(self.undecided),
        }


def measure_tau(correct_TBN: Tensor, *, bootstrap: int = 1000, confidence: float = 0.95, seed: int = 0) -> TauResult:
    """tau(n, i) over solved words and v_hat from its slope, by the 90th percentile, the median and the mean.

    Never raises for a model that has not learned its task: the reasons are in `undecided`.
    """
    loops, words, length = correct_TBN.shape
    tau_BN = convergence_times(correct_TBN)
    try:
        solved_B = solved_words(tau_BN, loops)
    except Undecided as reason:
        solved = int((tau_BN <= loops).all(-1).sum())
        return TauResult(length, loops, words, solved, {}, {}, dict.fromkeys(STATISTICS, str(reason)))
    tau_SN = tau_BN[solved_B]
    at_SNT = torch.nn.functional.one_hot(tau_SN - 1, loops)
    tau_by = {name: tau_RN[0] for name, tau_RN in _statistics(at_SNT.sum(0, keepdim=True)).items()}

    speeds: dict[str, Speed] = {}
    undecided: dict[str, str] = {}
    for name in STATISTICS:
        v_R, r2_R, points_R, decided_R = _fit(tau_by[name].unsqueeze(0))
        if decided_R[0]:
            speeds[name] = Speed(float(v_R[0]), float(r2_R[0]), int(points_R[0]))
        elif int(points_R[0]) < MIN_POINTS:
            undecided[name] = (
                f"a slope needs at least {MIN_POINTS} positions after the first, words of length {length} have fewer"
            )
        else:
            undecided[name] = f"the {name} of tau does not grow with the position: there is no serial speed to read"
    if bootstrap and speeds:
        fits: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in speeds}
        for counts_RX in resampled(at_SNT.reshape(len(tau_SN), -1), bootstrap, seed):
            for name, tau_RN in _statistics(counts_RX.view(-1, length, loops)).items():
                if name in fits:
                    v_R, _, _, decided_R = _fit(tau_RN)
                    fits[name].append((v_R, decided_R))
        for name, found in fits.items():
            try:
                speeds[name] = interval(
                    speeds[name], torch.cat([v for v, _ in found]), torch.cat([d for _, d in found]), confidence
                )
            except Undecided as reason:
                undecided[name] = str(reason)
                del speeds[name]
    tau = {name: tuple(tau_by[name].tolist()) for name in STATISTICS}
    return TauResult(length, loops, words, int(solved_B.sum()), tau, speeds, undecided)
