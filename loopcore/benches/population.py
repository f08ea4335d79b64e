"""`loop bench population`: a sweep as one batch against its trials one at a time and one process a trial, on equal work.

Per width d (words of S3, the batch of the recipes, n = T = 12):

- `ratio_sequential_dD`: one process of one thread; a step of every member, one run after another against all of them packed;
- `ratio_processes_dD`: as many processes of one thread as there are cores, each training its trials one after another, against
  as many that pack theirs; start-up not counted;
- `ratio_study_dD`: a whole study of short trials, start-up counted: a process for each trial, as many at a time as there are
  cores, against one process a core that packs its share;
- `loss_apart_dD`: how far the two sides' losses are apart after all those steps, the largest relative difference of any member:
  that the work is the same.

On the CPU all of it is counted in CPU seconds, for every process has one thread: what else the machine does is then not part of
it, and waiting for the disk while starting is not held against a process for each trial. On a GPU it is time on the clock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from loopcore.benches.figures import BenchAsk, Figure, Tell, cores, heads_of, machine, median, ratio
from loopcore.benches.trials import Trials, order
from loopcore.device import resolve_device, seconds_of
from loopcore.population import Population
from loopcore.specs.train import TrainSpec
from loopcore.training import Training

__all__ = ["NAME", "SIZES", "PopulationSizes", "run"]

NAME = "population"
UNTIMED = 2  # steps of each side before the clock is started


@dataclass(frozen=True)
class PopulationSizes:
    """What is timed."""

    widths: tuple[int, ...]
    length: int
    batch: int
    members: int
    """Of one population."""
    rounds: int
    trials: int
    """Of the study."""
    trial_steps: int
    studies: int
    """Pairs of studies."""


SIZES = {
    "smoke": PopulationSizes((16,), 4, 4, members=2, rounds=2, trials=2, trial_steps=2, studies=1),
    "full": PopulationSizes((32, 64, 128), 12, 16, members=16, rounds=7, trials=32, trial_steps=100, studies=3),
}


def run(ask: BenchAsk, tell: Tell = lambda _: None) -> tuple[dict[str, object], list[Figure]]:
    """The machine and the figures. Raises DeviceUnavailable."""
    device, slots, sizes = resolve_device(ask.device), ask.threads or cores(), SIZES[ask.scale]
    torch.set_num_threads(1)
    where = machine(device, slots)
    figures: list[Figure] = []
    for width in ask.widths or sizes.widths:
        rounds = ask.rounds or sizes.rounds
        figures += _sequential(width, rounds, sizes, device, tell)
        figures.append(_processes(width, rounds, slots, sizes, device, tell))
        figures.append(_study(width, min(rounds, sizes.studies), slots, sizes, device, tell))
    return where, figures


def spec_at(width: int, seed: int, sizes: PopulationSizes) -> TrainSpec:
    """A trial: its seed and learning rate are its own."""
    return TrainSpec.model_validate(
        {
            "model": {"width": width, "heads": heads_of(width, 16)},
            "scaling": {"base_width": width},
            "contract": {"lengths": [sizes.length]},
            "optimizer": {"lr": 5e-4 * 2 ** (seed % 4 / 2), "weight_decay": 0.01},
            "batch": sizes.batch,
            "steps": 1_000_000,
            "seed": seed,
        }
    )


def _specs(width: int, members: int, sizes: PopulationSizes, first: int = 0) -> list[TrainSpec]:
    return [spec_at(width, first + number, sizes) for number in range(members)]


def _sequential(width: int, rounds: int, sizes: PopulationSizes, device: torch.device, tell: Tell) -> list[Figure]:
    """One thread: every member's step, one run after another against all of them at once."""
    specs = _specs(width, sizes.members, sizes)
    population, alone = Population(specs, device=str(device)), [Training(spec, device=str(device)) for spec in specs]

    def one_by_one() -> None:
        for training in alone:
            training.step()

    sides: dict[str, Callable[[], object]] = {"packed": population.step, "sequential": one_by_one}
    seconds = _rounds(sides, rounds, device, lambda number: tell(f"d {width}, one thread: round {number} of {rounds}"))
    steps = UNTIMED + rounds + 1
    together = population.step()
    apart = [abs(together[m]["loss"] / training.step()["loss"] - 1.0) for m, training in enumerate(alone)]
    of = f"{sizes.members} members, batch {sizes.batch}, n = T = {sizes.length}, one thread"
    return [
        ratio(f"ratio_sequential_d{width}", seconds["sequential"], seconds["packed"], f"the same runs one after another; {of}"),
        Figure(f"loss_apart_d{width}", max(apart), min(apart), max(apart), "share", f"each run alone, at step {steps}; {of}"),
        *(
            median(f"member_steps_{side}_d{width}", [len(specs) / s for s in found], "member-steps/s", of)
            for side, found in seconds.items()
        ),
    ]


def _rounds(
    sides: dict[str, Callable[[], object]], rounds: int, device: torch.device, tell: Callable[[int], None]
) -> dict[str, list[float]]:
    """Seconds of each side, in turns, the one that begins changing from round to round."""
    for side in sides.values():
        for _ in range(UNTIMED):
            side()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        tell(number + 1)
        for name in list(sides)[:: 1 if number % 2 else -1]:
            seconds[name].append(seconds_of(sides[name], device))
    return seconds


def _processes(width: int, rounds: int, slots: int, sizes: PopulationSizes, device: torch.device, tell: Tell) -> Figure:
    """Every core busy with a process of its own, each training as many members as the others."""
    of_slot = [_specs(width, sizes.members, sizes, first=slot * sizes.members) for slot in range(slots)]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as stack:
        sides = {
            packed: [stack.enter_context(Trials(specs, packed=packed, device=str(device))) for specs in of_slot]
            for packed in (True, False)
        }
        for processes in sides.values():
            _step_all(processes, UNTIMED)
        for number in range(rounds):
            tell(f"d {width}, {slots} processes: round {number + 1} of {rounds}")
            for packed in (False, True) if number % 2 else (True, False):
                seconds[packed].append(_step_all(sides[packed], 1))
    of = f"{slots} processes of one thread, {sizes.members} members each, batch {sizes.batch}, n = T = {sizes.length}"
    return ratio(f"ratio_processes_d{width}", seconds[False], seconds[True], f"trials one after another in each of {of}")


def _step_all(processes: Sequence[Trials], steps: int) -> float:
    """Seconds of all of them, working at the same time."""
    for process in processes:
        process.begin(steps)
    return sum(process.seconds() for process in processes)


def _study(width: int, studies: int, slots: int, sizes: PopulationSizes, device: torch.device, tell: Tell) -> Figure:
    """Whole studies, from no process to the last step."""
    specs = _specs(width, sizes.trials, sizes)
    shares = [share for slot in range(slots) if (share := specs[slot::slots])]
    apart, packed = [], []
    for number in range(studies):
        tell(f"d {width}: study {number + 1} of {studies}, a process for each of {sizes.trials} trials")
        apart.append(_study_seconds([[spec] for spec in specs], False, slots, sizes, device))
        tell(f"d {width}: study {number + 1} of {studies}, packed")
        packed.append(_study_seconds(shares, True, slots, sizes, device))
    of = f"{sizes.trials} trials of {sizes.trial_steps} steps, start-up counted, {slots} at a time"
    return ratio(f"ratio_study_d{width}", apart, packed, f"a process for each trial; {of}")


def _study_seconds(parts: list[list[TrainSpec]], packed: bool, slots: int, sizes: PopulationSizes, device: torch.device) -> float:
    """Seconds that processes, one a part and `slots` at a time, take from their start to their end."""

    def train(part: list[TrainSpec]) -> None:
        subprocess.run(
            [sys.executable, "-m", "loopcore.benches.trials"],
            input=f"{order(part, packed=packed, device=str(device))}{sizes.trial_steps}\n",
            stdout=subprocess.DEVNULL,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    before, clock = os.times(), time.perf_counter()
    with ThreadPoolExecutor(slots) as pool:
        list(pool.map(train, parts))
    after = os.times()
    if device.type == "cuda":
        return time.perf_counter() - clock
    return after.children_user + after.children_system - before.children_user - before.children_system
