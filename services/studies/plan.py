"""From the cells of a study to the work that the registry queues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, cast

from loopcore.specs import JobSpec, ProbeJob, TrainJob
from loopcore.studies import Cell, ProbeRequest, cell_keys
from services.registry import Submission, Work

__all__ = ["plan", "probe_key"]


def plan(
    cells: Iterable[Cell], *, priority: int = 0, user: str | None = None, provenance: dict[str, Any] | None = None
) -> list[Work]:
    """Each training with its probes behind it, in the order of the cells: what is asked for first is measured first.

    A probe goes before the trainings that are still to come, so that a report fills from the beginning of a study on.
    """
    cells = list(cells)
    keys = cell_keys(cells)
    common = {"priority": priority, "user": user, "provenance": provenance or {}}
    measuring = common | {"priority": priority + 1}
    works: list[Work] = []
    for cell in cells:
        key = keys[cell.name]
        parent = None if cell.start_from is None else keys[cell.start_from]
        works.append(Work(cell=cell.name, probe="", key=key, after=parent, submission=_training(cell, key, common)))
        for probe in cell.probes:
            its = probe_key(key, probe)
            submission = _probing(cell, probe, its, measuring)
            works.append(Work(cell=cell.name, probe=probe.name, key=its, after=key, submission=submission))
    return works


def probe_key(cell_key: str, probe: ProbeRequest) -> str:
    """Digest (hex) of what is measured on what: a probe's name does not matter."""
    spec = probe.spec(job=1).resolved()
    text = json.dumps({"cell": cell_key, "probe": {name: spec[name] for name in sorted(spec) if name != "job"}}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _training(cell: Cell, key: str, common: dict[str, Any]) -> Callable[[int | None], Submission]:
    def submission(parent: int | None) -> Submission:
        content = cell.train.model_dump() | {
            "start_from": parent,
            "name": cell.name,
            "resources": cell.resources,
            "pack": cell.pack,
        }
        return _submission(TrainJob.model_validate(content), key, common)

    return submission


def _probing(cell: Cell, probe: ProbeRequest, key: str, common: dict[str, Any]) -> Callable[[int | None], Submission]:
    def submission(parent: int | None) -> Submission:
        job = cast("int", parent)  # a probe always stands behind its training
        resources = cell.probe_resources or cell.resources
        content = probe.spec(job).model_dump() | {"name": f"{cell.name} {probe.name}", "resources": resources}
        return _submission(ProbeJob.model_validate(content), key, common)

    return submission


def _submission(spec: JobSpec, key: str, common: dict[str, Any]) -> Submission:
    return Submission(
        kind=spec.kind,
        spec=spec.resolved(),
        digest=spec.digest(),
        name=spec.name,
        key=f"study/{key}",
        needs=spec.needs(),
        cpus=spec.resources.cpus,
        gpus=spec.resources.gpus,
        memory_gb=spec.resources.memory_gb,
        error_budget=spec.budgets.errors,
        loss_budget=spec.budgets.losses,
        **common,
    )
