"""Whether a population is worth it on the device found: a few steps packed and one after another, in turns."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from loopcore.device import seconds_of
from loopcore.errors import InputError
from loopcore.population.population import Population
from loopcore.specs.train import TrainSpec
from loopcore.training import Training

__all__ = ["PackTimes", "faster_packed"]

ALONE_AT_MOST = 4  # runs that are timed one after another; more would only be more of the same
UNTIMED = 2  # steps of each before the clock is started


@dataclass(frozen=True)
class PackTimes:
    """What one optimizer step of one member takes, medians over pairs of rounds."""

    members: int
    packed_s: float
    sequential_s: float
    ratio: float
    """Sequential over packed, pair by pair: above 1 packing is faster."""
    low: float
    high: float
    """Smallest and largest ratio of a pair."""


def faster_packed(
    spec: TrainSpec,
    members: int,
    device: str | None = None,
    *,
    threads: int | None = None,
    at_once: int | None = None,
    compile: bool = False,
    pairs: int = 5,
) -> PackTimes:
    """Times training steps of `members` runs of `spec` as a population against the same steps one run after another.

    Both work at the contract's last stage, the longest of all, with the seeds from spec.seed on and without evaluations; the
    caller's runs are not touched. Raises InputError for fewer than 2 members or 1 pair, and as `Population` does.
    """
    if members < 2 or pairs < 1:
        raise InputError(f"expected at least 2 members and 1 pair of rounds to compare, got {members} and {pairs}")
    steps = UNTIMED + pairs
    specs = [
        spec.model_copy(update={"seed": (spec.seed + number) % 2**31, "steps": steps, "start_from": None})
        for number in range(members)
    ]
    population = Population(specs, device=device, threads=threads, at_once=at_once, compile=compile)
    alone = [Training(one, device=device) for one in specs[:ALONE_AT_MOST]]
    for run in (*population.members, *alone):
        run.stages.index = len(spec.contract.lengths) - 1

    def one_by_one() -> None:
        for run in alone:
            run.step()

    for _ in range(UNTIMED):
        population.step()
        one_by_one()
    packed, sequential = [], []
    for _ in range(pairs):
        packed.append(seconds_of(population.step, population.device) / members)
        sequential.append(seconds_of(one_by_one, population.device) / len(alone))
    ratios = sorted(slow / fast for slow, fast in zip(sequential, packed, strict=True))
    return PackTimes(
        members, statistics.median(packed), statistics.median(sequential), statistics.median(ratios), ratios[0], ratios[-1]
    )
