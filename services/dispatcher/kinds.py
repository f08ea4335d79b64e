"""Where the code of each kind of job is, as text: this process starts it elsewhere and never loads it."""

from __future__ import annotations

from services.registry import Job

__all__ = ["CLOSER", "ENTRIES", "PACK_RUNNER", "RUNNER", "actor_cpus"]

# Runs an attempt under its lease: called with the entry, the job, the attempt and the settings, the node's name, and an event
# that is set when the attempt is to give its job back.
RUNNER = "workers.lease:run_attempt"

# Runs several attempts in one process: called with the entry, the (job, attempt) pairs, and as above from there on.
PACK_RUNNER = "workers.pack:run_pack"

# Ends elsewhere what jobs left open whose processes are gone: called with the settings.
CLOSER = "workers.closing:close"

ENTRIES: dict[str, str] = {
    "train": "workers.train:run",
    "probe": "workers.probe:run",
    "tune": "workers.tune:run",
    "register": "workers.register:run",
    "serve": "services.inference.deploy:run",
}

# Kinds that only direct: the job's CPUs and GPUs go to the processes they start themselves.
DIRECTORS: frozenset[str] = frozenset({"tune"})


def actor_cpus(job: Job) -> tuple[float, float]:
    """CPUs and GPUs that the job's own process asks Ray for."""
    return (0.0, 0.0) if job.kind in DIRECTORS else (job.cpus, job.gpus)
