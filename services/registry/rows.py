"""What the registry takes and gives: frozen records, one field a column, times in seconds since 1970 by the database's clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.registry.states import ENDED, AttemptOutcome, JobState, RunState

__all__ = [
    "Attempt",
    "Beat",
    "CheckpointRow",
    "CurvePoint",
    "DispatcherRow",
    "Fence",
    "Job",
    "LogChunk",
    "Measurement",
    "Run",
    "Served",
    "Started",
    "Study",
    "Submission",
    "Submitted",
    "Work",
    "WorkDone",
]

MOST_PRIORITY = 1_000_000


@dataclass(frozen=True, slots=True)
class Fence:
    """What a worker's write must show: it is kept only while this attempt holds the job."""

    job: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to be queued. Raises ValueError for a value that no job can have."""

    kind: str
    spec: dict[str, Any]  # the resolved spec, JSON-compatible
    digest: str  # SHA-256 of the resolved spec; decides whether two submissions under one key are the same
    name: str | None = None
    priority: int = 0  # higher goes first
    user: str | None = None
    key: str | None = None  # held by one unfinished job at a time
    needs: tuple[int, ...] = ()  # jobs that must succeed first; one that was retried means its newest retry
    delay_s: float = 0.0  # seconds before which it is not started
    cpus: float = 1.0
    gpus: float = 0.0
    memory_gb: float = 0.0  # GiB
    error_budget: int = 0  # tries after an error of its own
    loss_budget: int = 5  # tries after a lost worker or node
    time_limit_s: float | None = None  # most seconds one attempt may run
    provenance: dict[str, Any] = field(default_factory=dict)
    study_id: int | None = None

    def __post_init__(self) -> None:
        if not self.kind:
            raise ValueError("a job's kind is empty; expected the name of a job kind")
        if self.key is not None and not (0 < len(self.key) <= 200 and self.key.isprintable()):
            raise ValueError(f"key {self.key[:20]!r} of {len(self.key)} characters; expected 1 to 200 printable ones")
        if abs(self.priority) > MOST_PRIORITY:
            raise ValueError(f"priority {self.priority}; expected {-MOST_PRIORITY} to {MOST_PRIORITY}")
        for name in ("delay_s", "cpus", "gpus", "memory_gb", "error_budget", "loss_budget"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; expected a finite number of at least 0")
        if self.time_limit_s is not None and not (math.isfinite(self.time_limit_s) and self.time_limit_s > 0):
            raise ValueError(f"time_limit_s is {self.time_limit_s}; expected a finite number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row of `jobs`."""

    id: int
    kind: str
    name: str | None
    state: JobState
    spec: dict[str, Any]
    digest: str
    priority: int
    user: str | None
    key: str | None
    cpus: float
    gpus: float
    memory_gb: float
    attempt: int  # number of the newest attempt; 0 before the first
    errors: int  # attempts that ended by the job's own error
    losses: int  # attempts whose worker or node went away
    error_budget: int
    loss_budget: int
    unmet: int  # jobs it needs that have not succeeded
    reason: str | None  # why it waits, is blocked, or ended as it did
    progress: dict[str, Any] | None
    result: dict[str, Any] | None
    error: str | None  # the traceback of the error that ended it
    created_at: float
    run_after: float  # not started before
    started_at: float | None  # when the newest attempt was claimed
    finished_at: float | None
    lease_until: float | None  # set while running, and only then
    deadline_at: float | None  # when the running attempt's time limit is over
    time_limit_s: float | None
    cancel_requested_at: float | None
    origin: int  # first job of the chain of retries; its own number where there is no chain
    retry_of: int | None
    dispatcher: str | None  # who claimed the newest attempt
    node: str | None  # where the newest attempt runs or ran
    provenance: dict[str, Any]
    study_id: int | None

    @property
    def fence(self) -> Fence:
        """What the newest attempt's writes show."""
        return Fence(self.id, self.attempt)

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submission's job, and whether it is new or the one that held the key already."""

    job: Job
    created: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker learns from its heartbeat."""

    cancel_requested: bool
    lease_until: float
    deadline_passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a job."""

    job: int
    attempt: int  # from 1
    node: str | None
    pid: int | None
    dispatcher: str
    started_at: float  # when it was claimed
    finished_at: float | None
    outcome: AttemptOutcome | None
    error: str | None


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of what an attempt wrote to its standard streams and loggers; `seq` grows in the order of writing."""

    seq: int
    at: float
    attempt: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One piece of recorded work inside a job, a training most often; attempts and retries of the job share it."""

    id: int
    job: int  # the job of the chain that opened it last
    origin: int  # first job of that chain
    key: str  # tells the runs of one job apart; empty where there is one
    kind: str
    spec: dict[str, Any]
    provenance: dict[str, Any]
    state: RunState
    mlflow_run: str | None
    mlflow_step: int  # newest step that MLflow has; -1 before the first
    checkpoint_step: int | None  # newest checkpoint's step
    checkpoint: str | None  # its place
    figures: dict[str, Any] | None
    started_at: float
    finished_at: float | None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """Where a run's state at a step was published."""

    run: int
    step: int
    place: str
    digest: str
    at: float


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One value of one curve; None where it was not a finite number."""

    step: int
    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """What an instrument found at one position on its axes, with its interval; None where it was not a finite number."""

    instrument: str
    axes: dict[str, Any]
    value: float | None
    low: float | None = None
    high: float | None = None
    run: int | None = None  # set on what the registry gives


@dataclass(frozen=True, slots=True)
class DispatcherRow:
    """A dispatcher that has announced itself, and how long ago it last did (seconds)."""

    id: str
    host: str
    pid: int
    seen_at: float
    age_s: float
    cluster: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """A model version that the inference service is to have up."""

    model: str
    replicas: int
    job: int | None
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study that somebody started, and how far its jobs are."""

    id: int
    name: str
    scale: str
    asked: dict[str, Any]  # what the user chose beside the scale
    user: str | None
    provenance: dict[str, Any]
    created_at: float
    started_at: float  # when it was started last
    cancelled_at: float | None
    jobs: dict[str, int]  # state to number of jobs, each the newest of its chain of retries


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A piece of work that a study needs: a training, or a probe of one."""

    cell: str
    probe: str  # empty for the cell's training
    key: str  # what the work is, whoever asks for it
    after: str | None  # the key of the work that it builds on, which stands before it
    submission: Callable[[int | None], Submission]  # the job, given the number of the job that does `after`


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What starting a study did."""

    study: Study
    created: int  # jobs that are new
    retried: int  # jobs queued anew because the one before had failed or was cancelled
    shared: int  # works that a job of another study does or did
    kept: int  # works that were under way or done in this study


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDone:
    """What has come of one piece of a study's work."""

    cell: str
    probe: str
    key: str
    job: Job  # the newest of its chain of retries
    seconds: float  # of all ended attempts of the chain
    run: Run | None
    curve: list[CurvePoint]
    measurements: list[Measurement]
