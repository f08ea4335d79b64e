"""What the API takes and gives, where that is not a spec or a row of the registry as it stands."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from loopcore.specs import JobSpec, RegisterSpec, ServeSpec, Spec
from loopcore.studies.base import MOST_SEEDS, Scale
from services.registry import (
    Attempt,
    CheckpointRow,
    CurvePoint,
    DispatcherRow,
    Job,
    JobState,
    LogChunk,
    Measurement,
    Run,
    Served,
    Study,
)
from services.studies import KnownFinding
from services.tracking import ModelInfo

__all__ = [
    "BODIES",
    "Attempts",
    "Checkpoints",
    "Cluster",
    "Curve",
    "Findings",
    "Health",
    "JobDetail",
    "JobPage",
    "Kind",
    "LogPage",
    "Measurements",
    "ModelList",
    "Number",
    "PromoteRequest",
    "Provenance",
    "RunPage",
    "ServeRequest",
    "ServedList",
    "StudyDetail",
    "StudyPage",
    "StudyRequest",
    "StudyStarted",
    "SubmitAnswer",
    "SubmitRequest",
    "Text",
    "Word",
    "WorkState",
]

Kind = Literal["train", "probe", "tune", "register", "serve"]


Number = Annotated[int, Field(ge=1, lt=2**63)]
Priority = Annotated[int, Field(ge=-1_000_000, le=1_000_000)]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern="^[^\\x00-\\x1f\\x7f]+$")]  # without control characters
Word = Annotated[str, Field(min_length=1, max_length=200, pattern="^[ -~]+$")]  # ASCII that can be printed


class Provenance(Spec):
    """Where a submission comes from."""

    commit: str | None = Field(default=None, max_length=200)
    """Commit of the code that submitted it."""
    dirty: str | None = Field(default=None, max_length=200)
    """Digest of what was changed since that commit; empty for a clean tree."""
    packages: dict[str, str] = Field(default={}, max_length=200)
    """Versions of the packages that can change a result."""
    python: str | None = Field(default=None, max_length=200)
    platform: str | None = Field(default=None, max_length=200)
    host: str | None = Field(default=None, max_length=300)
    cpus: int | None = Field(default=None, ge=1, le=1_000_000)


class _Queued(Spec):
    """How a job is queued."""

    priority: Priority = 0
    """Higher goes first."""
    key: Word | None = None
    """A name that at most one unfinished job has: submitting the same spec under it again gives that job."""
    user: Text | None = None
    """Who asks."""
    provenance: Provenance = Provenance()


class SubmitRequest(_Queued):
    """A job to be queued."""

    spec: JobSpec
    after: tuple[Number, ...] = Field(default=(), max_length=1000)
    """Jobs that must succeed first, besides those that the spec names."""
    delay_s: float = Field(default=0.0, ge=0.0, le=1e9)
    """Seconds before which it is not started."""


class PromoteRequest(RegisterSpec, _Queued):
    """Queues the `register` job that publishes a run."""


class ServeRequest(ServeSpec, _Queued):
    """Queues the `serve` job that brings a model version up."""


class StudyRequest(Spec):
    """Starts a study, or goes on with it."""

    study: Word
    """Its name, such as `budget-law`."""
    scale: Scale = "smoke"
    """`smoke`: minutes; `cpu`: what two cores show in an afternoon; `gpu`: the paper's sizes."""
    seeds: int | None = Field(default=None, ge=1, le=MOST_SEEDS)
    """Seeds of every cell. Empty: the scale's own number."""
    groups: tuple[Word, ...] | None = Field(default=None, min_length=1, max_length=64)
    """Groups instead of the study's own, where it takes them."""
    demands: tuple[PositiveFloat, ...] | None = Field(default=None, min_length=1, max_length=64)
    """Demands n/T instead of the study's own, where it takes them."""
    priority: Priority = 0
    """Higher goes first."""
    user: Text | None = None
    """Who asks."""
    provenance: Provenance = Provenance()


# The body's model by the name of the route that takes it, for messages that name its fields.
BODIES: dict[str, Any] = {"submit_job": SubmitRequest, "promote_model": PromoteRequest, "serve_model": ServeRequest} | {
    "start_study": StudyRequest
}


@dataclass(frozen=True, kw_only=True)
class JobDetail(Job):
    """One job with the jobs it needs."""

    needs: tuple[int, ...] = ()

    @classmethod
    def of(cls, job: Job, needs: tuple[int, ...]) -> JobDetail:
        return cls(**{field.name: getattr(job, field.name) for field in fields(Job)}, needs=needs)


@dataclass(frozen=True)
class SubmitAnswer:
    """The job, and whether it is new or held the key already."""

    job: Job
    created: bool


@dataclass(frozen=True)
class JobPage:
    """Jobs, newest first; `next` is the `before` of the next page, empty on the last one."""

    jobs: list[Job]
    next: int | None


@dataclass(frozen=True)
class LogPage:
    """Pieces of log; `next` is the `after` of the next page. `ended`: the job had ended before they were read."""

    chunks: list[LogChunk]
    next: int
    ended: bool


@dataclass(frozen=True)
class Attempts:
    """All tries at a job, oldest first."""

    attempts: list[Attempt]


@dataclass(frozen=True)
class RunPage:
    """Runs; `next` is the `before` of the next page, empty on the last one."""

    runs: list[Run]
    next: int | None


@dataclass(frozen=True)
class Curve:
    """Points by step and name; a value that was not a finite number is null."""

    points: list[CurvePoint]


@dataclass(frozen=True)
class Measurements:
    """What instruments found."""

    measurements: list[Measurement]


@dataclass(frozen=True)
class Checkpoints:
    """A run's checkpoints, newest first."""

    checkpoints: list[CheckpointRow]


@dataclass(frozen=True)
class ModelList:
    """Registered models."""

    models: list[ModelInfo]


@dataclass(frozen=True)
class ServedList:
    """What the inference service is to have up."""

    served: list[Served]


@dataclass(frozen=True)
class Cluster:
    """Dispatchers that announced themselves lately, with their clusters, and the number of jobs in each state."""

    dispatchers: list[DispatcherRow]
    counts: dict[str, int]
    now: float  # seconds since 1970, by the database's clock


@dataclass(frozen=True)
class StudyPage:
    """Studies that were started, newest first; `next` is the `before` of the next page, empty on the last one."""

    studies: list[Study]
    next: int | None


@dataclass(frozen=True)
class WorkState:
    """A piece of a study's work: a training (`probe` is empty) or a probe of one, and the job that does it."""

    cell: str
    probe: str
    job: int
    state: JobState
    reason: str | None
    seconds: float  # of all its ended attempts


@dataclass(frozen=True, kw_only=True)
class StudyDetail(Study):
    """One study with its work."""

    works: list[WorkState]


@dataclass(frozen=True)
class StudyStarted:
    """The study, and its jobs: new ones, retries, those of other studies that do the same work, and its own from before."""

    study: Study
    created: int
    retried: int
    shared: int
    kept: int


@dataclass(frozen=True)
class Findings:
    """Every published finding that a study is about."""

    findings: list[KnownFinding]


@dataclass(frozen=True)
class Health:
    """The state of this process."""

    status: Literal["ok"] = "ok"
