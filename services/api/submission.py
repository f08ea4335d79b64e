"""From a validated spec to a row in the queue."""

from __future__ import annotations

from loopcore.specs import JobSpec, ProbeJob, RegisterJob, TrainJob
from services.api.bodies import Provenance
from services.api.errors import Refused
from services.problems import Problem
from services.registry import Queue, Submission, Submitted

__all__ = ["submit"]


def submit(
    queue: Queue,
    spec: JobSpec,
    *,
    priority: int = 0,
    after: tuple[int, ...] = (),
    key: str | None = None,
    delay_s: float = 0.0,
    user: str | None = None,
    provenance: Provenance | None = None,
) -> Submitted:
    """Queues it. Raises Refused for a reference to a job of the wrong kind, JobNotFound, KeyConflict."""
    _check_references(queue, spec)
    return queue.submit(
        Submission(
            kind=spec.kind,
            spec=spec.resolved(),
            digest=spec.digest(),
            name=spec.name,
            priority=priority,
            user=user,
            key=key,
            needs=tuple(dict.fromkeys((*spec.needs(), *after))),
            delay_s=delay_s,
            cpus=spec.resources.cpus,
            gpus=spec.resources.gpus,
            memory_gb=spec.resources.memory_gb,
            error_budget=spec.budgets.errors,
            loss_budget=spec.budgets.losses,
            time_limit_s=spec.time_limit_s,
            provenance=provenance.resolved() if provenance is not None else {},
        )
    )


def _check_references(queue: Queue, spec: JobSpec) -> None:
    """A job that names one of the wrong kind could only fail, perhaps hours later."""
    wanted: dict[str, tuple[int, str]] = {}
    if isinstance(spec, ProbeJob | RegisterJob):
        wanted["job"] = (spec.job, "train")
    if isinstance(spec, TrainJob) and spec.start_from is not None:
        wanted["start_from"] = (spec.start_from, "train")
    if isinstance(spec, RegisterJob) and spec.probe is not None:
        wanted["probe"] = (spec.probe, "probe")
    for field, (number, kind) in wanted.items():
        found = queue.job(number)
        if found.kind != kind:
            hint = f"see `loop jobs --kind {kind}`"
            raise Refused(422, Problem(f"job {number} is of kind {found.kind}", f"a {kind} job", hint, f"spec.{field}"))
