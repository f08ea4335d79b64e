"""A tune job's rounds over the registry in memory: Ray Tune's part is played, and stops wherever a process would be killed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loopcore.specs import TrialPoint, TuneJob, parse_job
from loopcore.studies.transfer import transfer_table
from services.registry import MemoryRegistry, RunState, Submission
from services.settings import Settings
from workers.capture import Captured
from workers.feed import Feed
from workers.keeper import Keeper
from workers.lease import HeldJob
from workers.trials import config_of
from workers.tune import _Trials

# T = 1 is bracketed by the grid. T = 4 takes two more rates below it under standard scaling, and one above it under loop_mup.
OPTIMA = {("standard", 1): -4.2, ("standard", 4): -5.8, ("loop_mup", 4): -2.8}
STUDY = {
    "kind": "tune",
    "log2_lrs": [-3, -4, -5],
    "seeds": [0, 1],
    "train": {"task": {"kind": "text"}, "contract": {"lengths": [16]}, "optimizer": {"decay": "linear"}},
}


def figures(point: TrialPoint) -> dict[str, Any]:
    """At 2^-3 with 4 loops standard scaling diverges in one seed."""
    if (point.rule, point.loops, point.log2_lr, point.seed) == ("standard", 4, -3.0, 1):
        return {"outcome": "diverged", "loss": None}
    at = OPTIMA[point.rule, point.loops] + 0.02 * point.seed
    return {"outcome": "finished", "loss": 2.0 + 0.1 * (point.log2_lr - at) ** 2}


class Attempts:
    """One job, and as many attempts at it as are made; every attempt knows what the registry has and nothing else."""

    def __init__(self, home: Path) -> None:
        self.spec = parse_job(STUDY)
        assert isinstance(self.spec, TuneJob)
        self.registry = MemoryRegistry()
        settings = Settings(home=home)
        self.registry.queue.submit(Submission(kind="tune", spec=self.spec.resolved(), digest="d"))
        job = self.registry.queue.claim("here", cpus=8, gpus=0, memory_gb=8)
        assert job is not None
        keeper = Keeper(self.registry, job.fence, settings, Captured(), end=lambda why: None)  # type: ignore[arg-type]
        self.held = HeldJob(job, settings, self.registry, keeper)  # type: ignore[arg-type]
        self.ran: list[str] = []

    def attempt(self, *, ends_after: int = 1000, stream: int = 0) -> _Trials:
        """Runs trials in a random order; after `ends_after` of them one more has begun when the process is gone."""
        assert isinstance(self.spec, TuneJob)
        study = self.registry.records.open_run(self.held.fence, kind="tune", spec=self.spec.resolved())
        trials, order, count = _Trials(self.held, self.spec, study, Feed(self.held)), random.Random(stream), 0
        while trials.left:
            for point in order.sample(trials.left, len(trials.left)):
                trial = SimpleNamespace(config={"trial": config_of(self.spec, point)})
                trials.on_trial_start(0, [], trial)
                if count == ends_after:
                    return trials
                trials.on_trial_result(0, [], trial, {"points": [(1, "loss", 3.0)], "figures": figures(point)})
                self.ran.append(json.loads(trial.config["trial"])["key"])
                count += 1
            trials.plan()
        return trials

    def table(self, trials: _Trials) -> list[dict[str, Any]]:
        assert isinstance(self.spec, TuneJob)
        return [row.to_json() for row in transfer_table(self.spec, trials.found())]


def test_every_minimum_is_bracketed_in_rounds(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    trials = attempts.attempt()
    rows = {(row["rule"], row["loops"]): row for row in attempts.table(trials)}
    assert all(row["bracketed"] for row in rows.values())
    assert [rate for rate, _ in rows["standard", 4]["losses"]] == [-7.0, -6.0, -5.0, -4.0, -3.0]
    assert [rate for rate, _ in rows["loop_mup", 4]["losses"]] == [-5.0, -4.0, -3.0, -2.0]
    assert rows["standard", 4]["diverged"] == 1
    assert rows["standard", 4]["drift_octaves"] == pytest.approx(-1.6)
    # Three curves of three rates, three more rates, two seeds each.
    assert trials.planned == len(attempts.ran) == 2 * (9 + 3)


@pytest.mark.parametrize("kills", [(3, 5, 4), (18, 1, 1), (0, 19, 3)])
def test_killed_three_times_it_runs_no_trial_twice_and_ends_in_the_same_table(tmp_path: Path, kills: tuple[int, ...]) -> None:
    undisturbed = Attempts(tmp_path / "a")
    wanted = undisturbed.table(undisturbed.attempt())
    attempts = Attempts(tmp_path / "b")
    for number, count in enumerate(kills):
        attempts.attempt(ends_after=count, stream=number + 1)
    last = attempts.attempt(stream=9)
    assert attempts.table(last) == wanted
    assert len(attempts.ran) == len(set(attempts.ran)) == len(undisturbed.ran)
    assert set(attempts.ran) == set(undisturbed.ran)
    runs = attempts.registry.records.runs(attempts.held.job.id, kind="trial", limit=100)
    assert sorted(run.key for run in runs) == sorted(undisturbed.ran)  # each under the run that was opened for it first
    assert {run.state for run in runs} == {RunState.FINISHED, RunState.DIVERGED}


def test_an_attempt_after_the_end_has_nothing_left(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    first = attempts.attempt()
    again = attempts.attempt()
    assert again.left == []
    assert (again.planned, attempts.table(again)) == (first.planned, attempts.table(first))
