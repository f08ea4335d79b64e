"""A `probe` job: what a trained run computes and when, measured on held-out words.

A figure that the data do not support is no failure: the result says `undecided`, with the reason.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import torch

from loopcore.checkpoint import load_model
from loopcore.contract import Stages
from loopcore.device import resolve_device
from loopcore.errors import CheckpointCorrupt, Undecided
from loopcore.halting import HaltingProfile, measure_halting
from loopcore.instruments import (
    FrontierResult,
    Speed,
    TauResult,
    correct_by_loop,
    measure_accuracy,
    measure_frontier,
    measure_tau,
)
from loopcore.model import LoopedTransformer
from loopcore.plots import accuracy_figure, frontier_figure, save
from loopcore.specs import ProbeJob, TrainSpec
from loopcore.tasks import load_task
from services.registry import CheckpointRow, LeaseLost, Measurement, RegistryUnavailable, Run, RunState
from workers.feed import Feed
from workers.lease import HeldJob, Stop
from workers.recording import flat, trained_run

__all__ = ["newest_good", "run"]

MLFLOW_AFTER_S = 30.0  # seconds that MLflow has to catch up once all is measured
MLFLOW_STOPPED_S = 3.0  # and once the job was told to stop

_log = logging.getLogger(__name__)


def run(held: HeldJob) -> dict[str, Any]:
    """Measures the newest good checkpoint of the run of `spec.job`.

    Raises InputError where there is nothing to measure, CheckpointCorrupt where no checkpoint can be trusted.
    """
    spec = held.spec
    assert isinstance(spec, ProbeJob)
    records = held.registry.records
    row = held.write(
        lambda: records.open_run(held.fence, kind="probe", spec=spec.resolved(), provenance=dict(held.job.provenance))
    )
    with Feed(held) as feed:
        feed.follow(row, name=held.job.name or f"probe {held.job.id}", params=flat(spec.resolved()))
        try:
            figures, plots = _measure(held, spec, row)
        except (LeaseLost, RegistryUnavailable):
            raise
        except Exception as error:
            state = RunState.CANCELLED if isinstance(error, Stop) else RunState.FAILED
            held.write(lambda: records.finish_run(held.fence, row.id, state))
            feed.end(row, state)
            feed.finish(MLFLOW_STOPPED_S)
            raise
        held.write(lambda: records.finish_run(held.fence, row.id, RunState.FINISHED, figures))
        feed.attach(row, plots)
        feed.end(row, RunState.FINISHED, {name: value for name, value in figures.items() if not isinstance(value, dict | list)})
        complete = feed.finish(MLFLOW_AFTER_S)
        return {"run": row.id, **figures, "mlflow_run": feed.mlflow_run(row), "mlflow_complete": complete}


def newest_good(held: HeldJob, trained: Run, device: torch.device) -> tuple[CheckpointRow, LoopedTransformer, TrainSpec]:
    """The run's newest checkpoint that is whole and right, and its model. Raises CheckpointCorrupt where none is."""
    problem: CheckpointCorrupt | None = None
    for row in held.write(lambda: held.registry.records.checkpoints(trained.id)):
        try:
            model, spec = load_model(row.place, device=device, expected_digest=row.digest)
        except CheckpointCorrupt as error:
            _log.warning("%s", error)
            problem = problem or error
            continue
        return row, model, spec
    raise problem or CheckpointCorrupt(f"run {trained.id} has no checkpoint; train it again")


def _measure(held: HeldJob, spec: ProbeJob, row: Run) -> tuple[dict[str, Any], list[Path]]:
    """All figures, and the files that go with them."""
    device = resolve_device(spec.device, granted_gpu=held.granted_gpu)
    trained = trained_run(held, spec.job)
    checkpoint, model, train = newest_good(held, trained, device)
    stages = Stages(train.contract)
    length = spec.length or train.contract.longest
    trained_loops = stages.loops_for(length)
    watched = max(1, math.ceil(spec.loops_factor * trained_loops))
    held.progress(0, 4, f"{spec.words} words of length {length}, {watched} loops", unit="instruments")
    held.check()
    correct_TBN = correct_by_loop(
        model,
        load_task(train.task),
        words=spec.words,
        length=length,
        loops=watched,
        seed=spec.seed,
        reveal_per_loop=stages.reveal_per_loop,
    )
    held.check()

    accuracy = measure_accuracy(correct_TBN)
    rows = accuracy.rows()
    at = min(trained_loops, watched) - 1
    figures: dict[str, Any] = {
        "trained_run": trained.id,
        "job": spec.job,
        "checkpoint": checkpoint.place,
        "step": checkpoint.step,
        "length": length,
        "trained_loops": trained_loops,
        "loops": watched,
        "words": spec.words,
        "accuracy": accuracy.token_T[at],
        "exact_accuracy": accuracy.exact_T[at],
        "best_loops": accuracy.best_loops,
    }
    undecided: dict[str, str] = {}
    held.progress(1, 4, unit="instruments")

    speed, frontier, tau, profile = None, None, None, None
    if "frontier" in spec.instruments:
        frontier = measure_frontier(
            correct_TBN, levels=spec.levels, bootstrap=spec.bootstrap, confidence=spec.confidence, seed=spec.seed
        )
        rows += frontier.rows()
        try:
            speed = frontier.speed
        except Undecided as reason:
            undecided["frontier"] = str(reason)
    held.check()
    held.progress(2, 4, unit="instruments")
    if "tau" in spec.instruments:
        tau = measure_tau(correct_TBN, bootstrap=spec.bootstrap, confidence=spec.confidence, seed=spec.seed)
        rows += tau.rows()
        undecided |= {f"tau.{statistic}": reason for statistic, reason in tau.undecided.items()}
    held.check()
    held.progress(3, 4, unit="instruments")
    if "halting" in spec.instruments:
        profile = _profile(correct_TBN, speed, undecided, causal=train.model.causal)
        if profile is not None:
            rows.append(
                {"instrument": "burn_in", "axes": {"length": length}, "value": profile.burn_in, "low": None, "high": None}
            )

    held.write(lambda: held.registry.records.measure(held.fence, row.id, [Measurement(**one) for one in rows]))
    figures |= _speed_figures(speed, frontier, tau) | {
        "burn_in": None if profile is None else profile.burn_in,
        "planned_loops": None if profile is None else profile.planned_loops(length),
        "within_tolerance": None if profile is None else profile.within_tolerance,
        "profile": None if profile is None else profile.to_json(),
        "undecided": undecided,
        "measurements": len(rows),
    }
    for what, reason in undecided.items():
        _log.info("undecided: %s: %s", what, reason)
    folder = held.settings.artifacts / f"job-{held.job.id}"
    files = _draw(folder, figures, accuracy.token_T, accuracy.last_T, frontier)
    held.progress(4, 4, unit="instruments")
    return figures | {"plots": [str(file) for file in files if file.suffix == ".png"]}, files


def _profile(correct_TBN: torch.Tensor, speed: Speed | None, undecided: dict[str, str], *, causal: bool) -> HaltingProfile | None:
    if speed is None:
        undecided["halting"] = "there is no speed to plan loops by: see frontier"
        return None
    try:
        return measure_halting(correct_TBN, speed, causal=causal)
    except Undecided as reason:
        undecided["halting"] = str(reason)
        return None


def _speed_figures(speed: Speed | None, frontier: FrontierResult | None, tau: TauResult | None) -> dict[str, Any]:
    """v by the frontier, the estimator to trust, and beside it by tau."""
    by_tau = {} if tau is None else {statistic: found.to_json() for statistic, found in tau.speeds.items()}
    return {
        "v": None if speed is None else speed.v,
        "v_low": None if speed is None else speed.low,
        "v_high": None if speed is None else speed.high,
        "r2": None if speed is None else speed.r2,
        "level": None if frontier is None else frontier.level,
        "solved": None if tau is None else tau.solved,
        "tau": by_tau,
    }


def _draw(
    folder: Path,
    figures: dict[str, Any],
    token_T: tuple[float, ...],
    last_T: tuple[float, ...],
    frontier: FrontierResult | None,
) -> list[Path]:
    """Writes the plots and the figures behind them; gives their places."""
    what = f"job {figures['job']}, length {figures['length']}"
    curves = accuracy_figure(
        {"token": token_T, "last position": last_T},
        trained_loops=figures["trained_loops"],
        planned_loops=figures["planned_loops"],
        title=f"accuracy against loops, {what}",
    )
    files = [save(curves, folder / "accuracy.png")]
    if frontier is not None:
        figure = frontier_figure(frontier, trained_loops=figures["trained_loops"], title=f"frontier, {what}")
        files.append(save(figure, folder / "frontier.png"))
    written = folder / "probe.json"
    written.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n")
    return [*files, written]
