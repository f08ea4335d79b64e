"""Which jobs may share one process, by what their specs say."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from loopcore.specs import TrainJob, parse_job, shape_key
from services.registry import Job, Queue

__all__ = ["alike", "claim_alike", "pack_key"]

AMONG = 1000  # waiting jobs that are looked through
LOSSES = 1  # after more, or an error, a job is tried alone: it may be what ended the process


def pack_key(job: Job) -> tuple[str, ...] | None:
    """What jobs have in common that may share a process: shape, resources and `pack`. None for one that has its own."""
    if job.spec.get("pack", 1) == 1 or job.errors or job.losses > LOSSES:
        return None
    try:
        spec = parse_job(job.spec)
    except ValidationError:
        return None  # its own attempt says what is wrong with it
    if not isinstance(spec, TrainJob) or (shape := shape_key(spec)) is None:
        return None
    return shape, spec.resources.digest(), str(spec.pack)


def alike(first: Job, waiting: Iterable[Job]) -> list[int]:
    """Numbers of those that wait and may share the process of `first`, in their order, as many as it takes."""
    key = pack_key(first)
    if key is None:
        return []
    found: list[int] = []
    for job in waiting:
        if len(found) == first.spec["pack"] - 1:
            break
        if pack_key(job) == key:
            found.append(job.id)
    return found


def claim_alike(queue: Queue, first: Job, dispatcher: str, *, lease_s: float) -> list[Job]:
    """Claims those that may share the process of a job just claimed. They need no room: its own is theirs too."""
    if pack_key(first) is None:
        return []
    claimed: list[Job] = []
    numbers = alike(first, queue.waiting(AMONG))
    while numbers:
        cpus, gpus, memory_gb = first.cpus, first.gpus, first.memory_gb
        job = queue.claim(dispatcher, cpus=cpus, gpus=gpus, memory_gb=memory_gb, lease_s=lease_s, among=numbers)
        if job is None:
            break
        claimed.append(job)
        numbers.remove(job.id)
    return claimed
