"""A `tune` job: every point of a learning-rate study as a trial of Ray Tune, one table and one plot at the end.

The points come in rounds: the grid, then what `loopcore.studies.transfer_plan` asks for until each minimum is bracketed.

Each trial has a run of its own in the registry. Another attempt at the job reads there which trials are done and runs the
others anew, under the same runs: nothing of Tune's own state is read back, for that would unpickle it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

# Read by Ray Tune when it is imported.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "86400")  # its state is never read back
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # which prints a table whatever it is told

import ray
from ray import tune
from ray.tune import Callback, Stopper
from ray.tune.stopper import NoopStopper

from loopcore.device import resolve_device
from loopcore.plots import TransferPoint, save, transfer_figure
from loopcore.specs import TrialPoint, TuneJob
from loopcore.specs.tune import MOST_TRIALS
from loopcore.studies.transfer import TransferRow, Trial, rates_of, transfer_table
from loopcore.studies.transfer_plan import planned
from services.registry import CurvePoint, LeaseLost, RegistryUnavailable, Run, RunState
from workers.feed import Feed
from workers.lease import HeldJob, Released, Stop
from workers.recording import COMPLETE, Recording, flat
from workers.trials import TrialRun, config_of, key_of

__all__ = ["TrialsFailed", "run"]

MLFLOW_AFTER_S = 60.0  # seconds that MLflow has to catch up once the trials are over
MLFLOW_STOPPED_S = 3.0  # and once the job was told to stop
TRIAL_TRIES = 2  # times that a trial whose process went away or failed is begun anew

_log = logging.getLogger(__name__)


class TrialsFailed(Exception):
    """Trials ended by an error of their own; the message has the first one's."""


def run(held: HeldJob) -> dict[str, Any]:
    """Runs the trials that no attempt before has finished; gives the table of optimum, drift and regret, and the plot's place."""
    spec = held.spec
    assert isinstance(spec, TuneJob)
    records = held.registry.records
    study = held.write(
        lambda: records.open_run(held.fence, kind="tune", spec=spec.resolved(), provenance=dict(held.job.provenance))
    )
    with Feed(held) as feed:
        feed.follow(study, name=held.job.name or f"tune {held.job.id}", params=_params(spec))
        trials = _Trials(held, spec, study, feed)
        try:
            while trials.left:
                _fit(held, spec, trials)
                held.check()
                if trials.errors:
                    raise TrialsFailed(f"{len(trials.errors)} of {trials.planned} trials failed; the first: {trials.errors[0]}")
                trials.plan()
        except (LeaseLost, RegistryUnavailable, Released):
            raise
        except Exception as error:
            state = RunState.CANCELLED if isinstance(error, Stop) else RunState.FAILED
            trials.abandon(state)
            held.write(lambda: records.finish_run(held.fence, study.id, state))
            feed.end(study, state)
            feed.finish(MLFLOW_STOPPED_S)
            raise
        rows = transfer_table(spec, trials.found())
        folder = held.settings.artifacts / f"job-{held.job.id}"
        for row in rows:
            if row.open_because:
                _log.warning("%s at T=%d is not bracketed: %s", row.rule, row.loops, row.open_because)
        plot, table = _draw(folder, spec, trials.found(), rows)
        figures = {"trials": trials.planned, "diverged": sum(trial.diverged for trial in trials.found()), **_figures(rows)}
        held.write(lambda: records.finish_run(held.fence, study.id, RunState.FINISHED, figures))
        feed.attach(study, [plot, table])
        feed.end(study, RunState.FINISHED, figures)
        complete = feed.finish(MLFLOW_AFTER_S)
        return {
            "run": study.id,
            "table": [row.to_json() for row in rows],
            "plot": str(plot),
            "trials": trials.planned,
            "mlflow_run": feed.mlflow_run(study),
            "mlflow_complete": complete,
        }


class _Trials(Callback):
    """The trials as the registry knows them, and what Tune tells of them. Written by the study's process under its lease."""

    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
        return Callback, ()  # Tune writes down all it is given; nobody reads it back

    def __init__(self, held: HeldJob, spec: TuneJob, study: Run, feed: Feed) -> None:
        self._held, self._spec, self._study, self._feed = held, spec, study, feed
        self._points: dict[str, TrialPoint] = {}
        self._open: dict[str, Recording] = {}
        self._done: dict[str, Run] = {}
        self.errors: list[str] = []
        rows = held.write(lambda: held.registry.records.runs(held.job.id, kind="trial", limit=MOST_TRIALS + 1))
        complete = {row.key: row for row in rows if row.state in COMPLETE}
        self.plan()
        while again := [complete[key] for key in self._points if key in complete and key not in self._done]:
            for row in again:
                # Ended in MLflow once more: the attempt before may have died just before it did so.
                self._follow(row)
                self._feed.end(row, row.state, row.figures)
                self._done[row.key] = row
            self.plan()
        if self._done:
            _log.info("%d of %d trials were done by an earlier attempt", len(self._done), len(self._points))

    def plan(self) -> None:
        """Adds the trials that follow from those that are done."""
        done = {trial.point: trial for trial in self.found()}
        self._points |= {key_of(point): point for point in planned(self._spec, done)}
        self._tell()

    @property
    def planned(self) -> int:
        """Trials that are known to be needed, done or not."""
        return len(self._points)

    @property
    def left(self) -> list[TrialPoint]:
        """Those that no attempt has finished."""
        return [point for key, point in self._points.items() if key not in self._done]

    def found(self) -> list[Trial]:
        """What the finished trials came to."""
        return [
            Trial(self._points[key], None if row.state is RunState.DIVERGED else (row.figures or {}).get("loss"))
            for key, row in self._done.items()
        ]

    def abandon(self, state: RunState) -> None:
        """Ends the runs of trials that were under way."""
        records = self._held.registry.records
        for recording in self._open.values():
            recording.flush()
            self._held.write(lambda row=recording.run: records.finish_run(self._held.fence, row.id, state))
            self._feed.end(recording.run, state)
        self._open.clear()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        key = _key(trial)
        point, records = self._points[key], self._held.registry.records
        content = self._spec.trial(point).resolved()
        row = self._held.write(
            lambda: records.open_run(
                self._held.fence, key=key, kind="trial", spec=content, provenance=dict(self._held.job.provenance)
            )
        )
        self._open[key] = Recording(self._held, row)
        self._follow(row)

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        key = _key(trial)
        recording = self._open[key]
        for step, name, value in result.pop("points", ()):
            recording.add_point(CurvePoint(step, name, value))
        figures = result.pop("figures", None)
        if figures is None:
            recording.flush()
            return
        state = RunState.DIVERGED if figures["outcome"] == "diverged" else RunState.FINISHED
        figures |= self._points[key].resolved()
        recording.finish(state, figures)
        self._feed.end(recording.run, state, figures)
        self._done[key] = self._held.write(lambda: self._held.registry.records.run(recording.run.id))
        del self._open[key]
        self._tell()

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called when all tries at a trial are spent."""
        recording = self._open.pop(_key(trial))
        text = str(trial.get_error() or "its process went away")
        self.errors.append(f"{_key(trial)}: {text.strip().splitlines()[-1]}")
        _log.error("trial %s failed: %s", _key(trial), text)
        recording.finish(RunState.FAILED, {"error": text[-2000:]})
        self._feed.end(recording.run, RunState.FAILED)

    def _follow(self, row: Run) -> None:
        params = flat(self._points[row.key].resolved()) | flat(row.spec, "train.")
        self._feed.follow(row, name=row.key, params=params, parent=self._study)

    def _tell(self) -> None:
        diverged = sum(row.state is RunState.DIVERGED for row in self._done.values())
        note = f"{diverged} diverged" if diverged else ""
        self._held.progress(len(self._done), len(self._points), note, unit="trials")


class _WhenTold(Stopper):
    """Stops all trials when the job is to stop."""

    def __init__(self, held: HeldJob) -> None:
        self._held = held

    def __reduce__(self) -> tuple[type[Stopper], tuple[()]]:
        return NoopStopper, ()  # as above

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._held.stopping


def _fit(held: HeldJob, spec: TuneJob, trials: _Trials) -> None:
    """Lets Tune run what is left, as many at once as the job's CPUs hold, on the machine that the job was given."""
    at_once = max(1, int(spec.resources.cpus / spec.trial_cpus + 1e-9))
    gpus = spec.resources.gpus / at_once
    here = f"node:{ray.util.get_node_ip_address()}"
    bundle = {"CPU": spec.trial_cpus, here: 0.001} | ({"GPU": gpus} if gpus else {})
    storage = held.settings.home / "tune" / f"job-{held.job.id}-{held.fence.attempt}"
    device = resolve_device(spec.train.device, granted_gpu=held.granted_gpu)
    tuner = tune.Tuner(
        tune.with_resources(TrialRun, tune.PlacementGroupFactory([bundle])),
        param_space={
            "trial": tune.grid_search([config_of(spec, point) for point in trials.left]),
            "threads": max(1, int(spec.trial_cpus)),
            "device": device.type,
        },
        tune_config=tune.TuneConfig(
            max_concurrent_trials=at_once, reuse_actors=True, trial_dirname_creator=lambda trial: trial.trial_id
        ),
        run_config=tune.RunConfig(
            name="trials",
            storage_path=str(storage),
            callbacks=[trials],
            stop=_WhenTold(held),
            failure_config=tune.FailureConfig(max_failures=TRIAL_TRIES),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def _key(trial: Any) -> str:
    return json.loads(trial.config["trial"])["key"]


def _params(spec: TuneJob) -> dict[str, Any]:
    axes = {name: json.dumps(getattr(spec, name)) for name in ("rules", "loops", "log2_lrs", "seeds")}
    return axes | flat(spec.train.resolved(), "train.")


def _figures(rows: list[TransferRow]) -> dict[str, Any]:
    """The table's numbers under names that MLflow takes."""
    return {
        f"{row.rule}.T{row.loops}.{name}": getattr(row, name)
        for row in rows
        for name in ("best_log2_lr", "optimum_log2_lr", "best_loss", "drift_octaves", "regret")
    }


def _draw(folder: Path, spec: TuneJob, found: list[Trial], rows: list[TransferRow]) -> tuple[Path, Path]:
    """Writes the plot and the table; gives their places."""
    by_point = {trial.point: trial for trial in found}
    points = [
        TransferPoint(rule, loops, rate, None if trial.diverged else trial.loss, trial.point.seed)
        for rule in spec.rules
        for loops in spec.loops
        for rate, ran in rates_of(spec, by_point, rule, loops).items()
        for trial in ran
    ]
    optima = {(row.rule, row.loops): row.optimum_log2_lr for row in rows if row.optimum_log2_lr is not None}
    figure = transfer_figure(points, optima, title="learning-rate transfer over loops")
    plot = save(figure, folder / "transfer.png")
    table = folder / "transfer.json"
    table.write_text(json.dumps([row.to_json() for row in rows], indent=1, allow_nan=False) + "\n")
    return plot, table
