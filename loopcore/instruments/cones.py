"""Damage cones: a damaged state spreads at the model's speed, and the edge of the cone says how fast (arXiv 2607.20594).

The edge at distance d behind the damaged position p is the mean loop from which the prediction at p + d stays changed, over the
words in which it does (at least 8). The line through the edges of all p and d, loops against distance, has slope 1 / v. It
is compared with v by the *mean* of tau, whose bias towards lucky guesses it shares (measured, RECIPES); agreement within 15 %
is what to expect.

Shapes: R resamples, B words, N positions, X points (p, d) of the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopcore.errors import Undecided
from loopcore.instruments.accuracy import Words, correct_by_loop
from loopcore.instruments.damage import Damage, DamageKind, DamageMap, damage_maps
from loopcore.instruments.fits import row
from loopcore.instruments.speed import MIN_POINTS, Speed, fit_lines, interval, resampled
from loopcore.instruments.tau import MIN_SOLVED, convergence_times, solved_words
from loopcore.looped import Steppable

__all__ = ["ConeResult", "fit_cone", "measure_cones"]


@dataclass(frozen=True)
class ConeResult:
    """Damage maps and the speed of their edge. `undecided` has a reason for `cone` and for `ratio` where there is none."""

    maps: tuple[DamageMap, ...]
    edge: tuple[tuple[int, int, float], ...]
    """(p, distance, mean onset in loops) of the points of the line."""
    speeds: dict[str, Speed]
    """`cone`: v in positions per loop by the edge; `tau_mean`: v by the mean of tau over solved words, for comparison."""
    ratio: tuple[float, float | None, float | None] | None
    """cone / tau_mean with its bootstrap interval, both from the same resamples: 1 where damage spreads as answers do. None
    in place of the interval where no resampling was asked for."""
    undecided: dict[str, str]

    @property
    def speed(self) -> Speed:
        """v by the cone's edge. Raises Undecided with the reason where there is none."""
        if "cone" in self.undecided:
            raise Undecided(self.undecided["cone"])
        return self.speeds["cone"]

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes, value, low, high. Undecided figures have no row."""
        rows = [entry for found in self.maps for entry in found.rows()]
        rows += [row("damage_onset", {"patched": p, "distance": d}, value) for p, d, value in self.edge]
        if "cone" in self.speeds:
            speed = self.speeds["cone"]
            rows.append(row("speed", {"estimator": "cone"}, speed.v, speed.low, speed.high))
            rows.append(row("speed_r2", {"estimator": "cone"}, speed.r2))
        if self.ratio is not None:
            rows.append(row("cone_ratio", {"against": "tau_mean"}, *self.ratio))
        return rows

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {
            "maps": [
                {
                    "kind": found.kind,
                    "position": found.position,
                    "at": found.at,
                    "words": found.words,
                    "damaged": found.damaged,
                    "changed": [list(shares) for shares in found.changed_SN],
                    "moved": [list(shares) for shares in found.moved_SN],
                }
                for found in self.maps
            ],
            "edge": [list(point) for point in self.edge],
            "speeds": {name: speed.to_json() for name, speed in self.speeds.items()},
            "ratio": None if self.ratio is None else list(self.ratio),
            "undecided": dict(self.undecided),
        }


def measure_cones(
    model: Steppable,
    task: Words,
    *,
    words: int,
    length: int,
    loops: int,
    positions: Sequence[int] = (1, 2),
    kind: DamageKind = "donor",
    after: int | None = None,
    correct_TBN: Tensor | None = None,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    split: str = "held_out",
    batch: int = 256,
) -> ConeResult:
    """Damages each of `positions` at each word's own tau and fits the edge. Arguments and InputError as in `damage_maps`.

    Early positions serve best: near the middle too few positions are left behind them. Never raises for a model that has not
    learned its task or cannot take the loops: the reasons are in `undecided`.
    """
    if correct_TBN is None:
        correct_TBN = correct_by_loop(model, task, words=words, length=length, loops=loops, seed=seed, split=split, batch=batch)
    try:
        found = damage_maps(
            model,
            task,
            words=words,
            length=length,
            loops=loops,
            positions=positions,
            kind=kind,
            after=after,
            correct_TBN=correct_TBN,
            seed=seed,
            split=split,
            batch=batch,
        )
    except Undecided as reason:
        return ConeResult((), (), {}, None, {"cone": str(reason), "ratio": str(reason)})
    return fit_cone(found, correct_TBN, bootstrap=bootstrap, confidence=confidence, seed=seed)


def fit_cone(
    found: Sequence[Damage], correct_TBN: Tensor, *, bootstrap: int = 1000, confidence: float = 0.95, seed: int = 0
) -> ConeResult:
    """The edge's speed from the onsets of `damage_maps`, with an interval from resampled words."""
    maps = tuple(damage.map for damage in found)
    loops, _, length = correct_TBN.shape
    stays_BX, onset_BX, point_X = _points(found, length)
    distance_X = torch.tensor([d for _, d in point_X], dtype=torch.float64)
    tau_BN = convergence_times(correct_TBN)
    try:
        solved_B, no_tau = solved_words(tau_BN, loops), None
    except Undecided as reason:
        solved_B, no_tau = torch.zeros(len(tau_BN), dtype=torch.bool), str(reason)
    # Everything a resample needs is a sum over its words: how many stay changed, their onsets, how many are solved, their tau.
    summed_BY = torch.cat([stays_BX, onset_BX * stays_BX, solved_B.unsqueeze(-1), tau_BN * solved_B.unsqueeze(-1)], dim=1)

    enough_X = stays_BX.sum(0) >= MIN_SOLVED

    def fits(sums_RY: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        stays_RX, onset_RX, solved_R1, tau_RN = sums_RY.double().split([len(point_X), len(point_X), 1, length], dim=1)
        use_RX = enough_X & (stays_RX > 0)
        mean_RX = onset_RX / stays_RX.clamp_min(1.0)
        slope_R, r2_R, points_R = fit_lines(distance_X, mean_RX, use_RX)
        position_N = torch.arange(length)
        tau_slope_R, tau_r2_R, _ = fit_lines(position_N, tau_RN / solved_R1.clamp_min(1.0), (position_N > 0).expand_as(tau_RN))
        tau_slope_R = torch.where(solved_R1.squeeze(-1) > 0, tau_slope_R, 0.0)
        return slope_R, r2_R, points_R, mean_RX, tau_slope_R, tau_r2_R

    slope_1, r2_1, points_1, mean_1X, tau_slope_1, tau_r2_1 = fits(summed_BY.sum(0, keepdim=True))
    edge = tuple((p, d, float(mean_1X[0, x])) for x, (p, d) in enumerate(point_X) if enough_X[x])
    speeds: dict[str, Speed] = {}
    undecided: dict[str, str] = {}
    slope, tau_slope = float(slope_1[0]), float(tau_slope_1[0])
    if (why := _no_edge(maps, edge, slope)) is not None:
        undecided["cone"] = undecided["ratio"] = why
    else:
        speeds["cone"] = Speed(1.0 / slope, float(r2_1[0]), int(points_1[0]))
    if no_tau is None and tau_slope > 0 and length > MIN_POINTS:
        speeds["tau_mean"] = Speed(1.0 / tau_slope, float(tau_r2_1[0]), length - 1)
    else:
        undecided["ratio"] = no_tau or "the mean of tau does not grow with the position: there is no serial speed to compare with"
    if "cone" not in speeds:
        return ConeResult(maps, edge, speeds, None, undecided)

    ratio = None
    if "tau_mean" in speeds:
        ratio = (speeds["cone"].v / speeds["tau_mean"].v, None, None)
    if bootstrap:
        parts = []
        for sums_RY in resampled(summed_BY, bootstrap, seed):
            slope_R, _, points_R, _, tau_slope_R, _ = fits(sums_RY)
            parts.append((slope_R, (slope_R > 0) & (points_R >= MIN_POINTS), tau_slope_R))
        slope_R, decided_R, tau_slope_R = map(torch.cat, zip(*parts, strict=True))
        v_R, tau_v_R = 1.0 / slope_R.clamp_min(1e-12), 1.0 / tau_slope_R.clamp_min(1e-12)
        try:
            speeds["cone"] = interval(speeds["cone"], v_R, decided_R, confidence)
        except Undecided as reason:
            del speeds["cone"]
            return ConeResult(maps, edge, speeds, None, {"cone": str(reason), "ratio": str(reason)})
        if ratio is not None:
            both_R = decided_R & (tau_slope_R > 0)
            try:
                speeds["tau_mean"] = interval(speeds["tau_mean"], tau_v_R, tau_slope_R > 0, confidence)
                of = interval(Speed(ratio[0], 0.0, 0), v_R / tau_v_R, both_R, confidence)
                ratio = (of.v, of.low, of.high)
            except Undecided as reason:
                ratio, undecided["ratio"] = None, str(reason)
    return ConeResult(maps, edge, speeds, ratio, undecided)


def _points(found: Sequence[Damage], length: int) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """(stays_BX, onset_BX, (p, d) of X): every later position behind every damaged one."""
    columns, point_X = [], []
    for damage in found:
        p = damage.map.position
        columns.append(damage.onset_BN[:, p + 1 :])
        point_X += [(p, d) for d in range(1, length - p)]
    onset_BX = torch.cat(columns, dim=1)
    return onset_BX >= 0, onset_BX, point_X


def _no_edge(maps: Sequence[DamageMap], edge: Sequence[tuple[int, int, float]], slope: float) -> str | None:
    """Why there is no line to fit; None where there is."""
    if all(found.damaged < MIN_SOLVED for found in maps):
        counts = ", ".join(f"{found.damaged} at position {found.position}" for found in maps)
        return (
            f"of {maps[0].words} words too few could be damaged ({counts}; at least {MIN_SOLVED} are needed): the damaged "
            f"position has to converge and, with a donor, another word to have found another answer there; train further, or "
            f"measure more words"
        )
    if len({d for _, d, _ in edge}) < MIN_POINTS:
        return (
            f"damage stays at {len({d for _, d, _ in edge})} distance(s) in at least {MIN_SOLVED} words and an edge needs "
            f"{MIN_POINTS}: it heals, or the words are too short; measure longer words, damage earlier positions, or use donors"
        )
    if slope <= 0:
        return "the damage does not reach farther positions later: there is no cone"
    return None
