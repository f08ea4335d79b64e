"""The experiment registry: a queue of jobs that loses nothing, and what they found out. SQLite or PostgreSQL, one behaviour."""

from services.registry.errors import (
    IllegalTransition,
    JobNotFound,
    KeyConflict,
    LeaseLost,
    RegistryError,
    RegistryUnavailable,
    RunNotFound,
    SchemaTooNew,
    SchemaTooOld,
    StudyNotFound,
)
from services.registry.memory import MemoryRegistry
from services.registry.migrate import migrate
from services.registry.queue import Queue
from services.registry.records import Records
from services.registry.registry import Registry
from services.registry.rows import (
    Attempt,
    Beat,
    CheckpointRow,
    CurvePoint,
    DispatcherRow,
    Fence,
    Job,
    LogChunk,
    Measurement,
    Run,
    Served,
    Started,
    Study,
    Submission,
    Submitted,
    Work,
    WorkDone,
)
from services.registry.states import AttemptOutcome, JobState, RunState
from services.registry.studies import Studies

__all__ = [
    "Attempt",
    "AttemptOutcome",
    "Beat",
    "CheckpointRow",
    "CurvePoint",
    "DispatcherRow",
    "Fence",
    "IllegalTransition",
    "Job",
    "JobNotFound",
    "JobState",
    "KeyConflict",
    "LeaseLost",
    "LogChunk",
    "Measurement",
    "MemoryRegistry",
    "Queue",
    "Records",
    "Registry",
    "RegistryError",
    "RegistryUnavailable",
    "Run",
    "RunNotFound",
    "RunState",
    "SchemaTooNew",
    "SchemaTooOld",
    "Served",
    "Started",
    "Studies",
    "Study",
    "StudyNotFound",
    "Submission",
    "Submitted",
    "Work",
    "WorkDone",
    "migrate",
]
