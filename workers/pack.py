"""The attempts at several `train` jobs of one shape in one process: each under its own lease, all trained as one population."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from services.registry import Fence, Registry
from services.settings import Settings
from workers.capture import Divided
from workers.lease import attend, keep_quiet, load, open_registry

__all__ = ["run_pack"]

TOGETHER = "workers.together:Together"  # as text: it loads torch, which is to find its threads limited


def run_pack(
    entry: str,
    attempts: Sequence[tuple[int, int]],
    settings_json: str,
    *,
    node: str | None = None,
    release: threading.Event | None = None,
) -> None:
    """Runs `entry`, which takes a job and a seat, for attempts (job, attempt) that a dispatcher claimed, and writes their ends.

    They have the resources of one of the jobs. Once `release` is set, each writes a last checkpoint and is given back.
    """
    settings = Settings.model_validate_json(settings_json)
    fences = [Fence(job, attempt) for job, attempt in attempts]
    keep_quiet()
    with open_registry(settings) as registry, Divided() as output:
        threads = _threads(registry, fences[0])
        train = load(entry, threads)
        together = load(TOGETHER, threads)(len(fences), threads)

        def run(fence: Fence, seat: object) -> None:
            try:
                attend(fence, lambda held: train(held, seat), registry, settings, output.part(), node=node, release=release)
            finally:
                together.leave(seat)

        running = [
            threading.Thread(target=run, args=pair, name=f"job-{pair[0].job}-{pair[0].attempt}", daemon=True)
            for pair in zip(fences, together.seats, strict=True)
        ]
        for thread in running:
            thread.start()
        together.conduct()
        for thread in running:
            thread.join()


def _threads(registry: Registry, fence: Fence) -> int:
    """Threads that one of the jobs may compute with: its granted CPUs, at least one."""
    return max(1, int(registry.queue.job(fence.job).cpus))
