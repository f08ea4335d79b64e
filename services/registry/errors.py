"""Every error that the registry raises on purpose.

RegistryError
├── JobNotFound          no job of this number (also a LookupError)
├── RunNotFound          no run of this number, or it belongs to another job (also a LookupError)
├── StudyNotFound        no study of this number (also a LookupError)
├── KeyConflict          the unique key is held by an unfinished job with another spec
├── LeaseLost            this attempt no longer holds its job; nothing of the write was kept
├── IllegalTransition    the job's state does not allow what was asked
└── RegistryUnavailable  the database cannot be reached or does not answer
    ├── SchemaTooNew     its tables were made by a newer version of this program
    └── SchemaTooOld     its tables must be upgraded first, or were never made
"""

from __future__ import annotations

__all__ = [
    "IllegalTransition",
    "JobNotFound",
    "KeyConflict",
    "LeaseLost",
    "RegistryError",
    "RegistryUnavailable",
    "RunNotFound",
    "SchemaTooNew",
    "SchemaTooOld",
    "StudyNotFound",
]


class RegistryError(Exception):
    """Base of all of them; the message says what was wrong, what was expected and what to do."""


class JobNotFound(RegistryError, LookupError):
    """No job of this number."""

    def __init__(self, job: int) -> None:
        super().__init__(f"there is no job {job}; expected the number of a job in the registry: see `loop jobs`")
        self.job = job

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.job,)


class RunNotFound(RegistryError, LookupError):
    """No run of this number, or it belongs to another job."""

    def __init__(self, run: int, job: int | None = None) -> None:
        where = "in the registry" if job is None else f"of job {job}"
        super().__init__(f"there is no run {run} {where}; expected one that `open_run` gave")
        self.run = run
        self.job = job

    def __reduce__(self) -> tuple[type, tuple[int, int | None]]:
        return type(self), (self.run, self.job)


class StudyNotFound(RegistryError, LookupError):
    """No study of this number."""

    def __init__(self, study: int) -> None:
        super().__init__(f"there is no study {study}; expected the number of a study that was started: see `loop studies`")
        self.study = study

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.study,)


class KeyConflict(RegistryError):
    """The unique key is held by an unfinished job with another spec."""

    def __init__(self, key: str, holder: int) -> None:
        super().__init__(
            f"key {key!r} is held by job {holder}, whose spec is another one; expected the same spec or a free key: "
            f"use another key, or wait for job {holder} to end or cancel it"
        )
        self.key = key
        self.holder = holder

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (self.key, self.holder)


class LeaseLost(RegistryError):
    """This attempt no longer holds its job; nothing of the write was kept."""

    def __init__(self, job: int, attempt: int, found: str) -> None:
        super().__init__(f"attempt {attempt} no longer holds job {job}: {found}; nothing was written, and this attempt must stop")
        self.job = job
        self.attempt = attempt
        self.found = found

    def __reduce__(self) -> tuple[type, tuple[int, int, str]]:
        return type(self), (self.job, self.attempt, self.found)


class IllegalTransition(RegistryError):
    """The job's state does not allow what was asked."""

    def __init__(self, what: str, state: str, *, expected: str) -> None:
        super().__init__(f"cannot {what}: it is {state}; expected {expected}")
        self.what = what
        self.state = state
        self.expected = expected

    def __reduce__(self) -> tuple[object, ...]:
        return _illegal_transition, (self.what, self.state, self.expected)


def _illegal_transition(what: str, state: str, expected: str) -> IllegalTransition:
    """Rebuilds one after it crossed to another process."""
    return IllegalTransition(what, state, expected=expected)


class RegistryUnavailable(RegistryError):
    """The database cannot be reached or does not answer."""


class SchemaTooNew(RegistryUnavailable):
    """Its tables were made by a newer version of this program."""


class SchemaTooOld(RegistryUnavailable):
    """Its tables must be upgraded first, or were never made."""
