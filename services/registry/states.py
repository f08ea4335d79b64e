"""What a job can be, which way it may go, and the arithmetic of trying again: the one place where these rules stand."""

from __future__ import annotations

from enum import StrEnum

from services.registry.errors import IllegalTransition

__all__ = [
    "BACKOFF_FIRST_S",
    "BACKOFF_MOST_S",
    "ENDED",
    "LEFT_OPEN",
    "STARTS",
    "TRANSITIONS",
    "WITHOUT_SUCCESS",
    "AttemptOutcome",
    "JobState",
    "RunState",
    "after_error",
    "after_loss",
    "after_release",
    "backoff_s",
    "blocked_reason",
    "check_transition",
    "failure_reason",
    "loss_reason",
    "release_reason",
    "sources",
]

BACKOFF_FIRST_S = 5.0  # seconds between the first error of a job and its next try
BACKOFF_MOST_S = 600.0  # seconds that no pause between tries exceeds


class JobState(StrEnum):
    """What a job is doing."""

    QUEUED = "queued"
    """Waits for its turn, for its time (`run_after`) or for jobs it needs (`unmet`)."""
    BLOCKED = "blocked"
    """Needs a job that failed, was cancelled or is itself blocked; `reason` names it."""
    RUNNING = "running"
    """An attempt holds it under a lease."""
    SUCCEEDED = "succeeded"
    """Ended with a result."""
    FAILED = "failed"
    """Ended by its own error, or lost more often than its budget allows."""
    CANCELLED = "cancelled"
    """Ended because somebody asked for it."""


class AttemptOutcome(StrEnum):
    """How one attempt at a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """Its worker or node went away; not the job's fault."""
    RELEASED = "released"
    """It gave its job back, because its cluster was shut down in order; no budget is spent."""


class RunState(StrEnum):
    """What a training run (or another record of work inside a job) came to."""

    RUNNING = "running"
    """Being worked on, or waiting for the job's next attempt. No job that has ended has one."""
    FINISHED = "finished"
    """Did all that its spec asked for; whether it solved its task stands in its figures."""
    DIVERGED = "diverged"
    """Its loss left the finite numbers; the step stands in its figures."""
    FAILED = "failed"
    """Stopped by an error; a later attempt may take it up again."""
    CANCELLED = "cancelled"
    """Stopped on request; a later attempt may take it up again."""


# The states a new job begins in.
STARTS: frozenset[JobState] = frozenset({JobState.QUEUED, JobState.BLOCKED})

# Every way from one state to another. What is not here never happens; in particular, nothing leaves an ended state.
TRANSITIONS: dict[tuple[JobState, JobState], str] = {
    (JobState.QUEUED, JobState.RUNNING): "a dispatcher claimed it",
    (JobState.QUEUED, JobState.BLOCKED): "a job it needs ended without success, or became blocked",
    (JobState.QUEUED, JobState.CANCELLED): "it was cancelled before it began",
    (JobState.BLOCKED, JobState.QUEUED): "the job it needs is tried again",
    (JobState.BLOCKED, JobState.CANCELLED): "it was cancelled before it began",
    (JobState.RUNNING, JobState.SUCCEEDED): "its attempt gave a result",
    (JobState.RUNNING, JobState.FAILED): "its attempt failed or was lost, and the budget for that is spent",
    (JobState.RUNNING, JobState.CANCELLED): "its attempt stopped on request, or ended after one and is not tried again",
    (JobState.RUNNING, JobState.QUEUED): "its attempt failed, was lost or gave it back, and it is tried again",
}

ENDED: frozenset[JobState] = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

# What becomes of a run that is still open when its job ends: its process could not say so, or did not.
LEFT_OPEN: dict[JobState, RunState] = {
    JobState.SUCCEEDED: RunState.FINISHED,
    JobState.FAILED: RunState.FAILED,
    JobState.CANCELLED: RunState.CANCELLED,
}

# What a job must not be for those that need it to have a chance.
WITHOUT_SUCCESS: frozenset[JobState] = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.BLOCKED})


def sources(target: JobState) -> tuple[JobState, ...]:
    """The states from which `target` can be reached, in the order of the enumeration."""
    return tuple(state for state in JobState if (state, target) in TRANSITIONS)


def check_transition(what: str, state: JobState, target: JobState) -> None:
    """Raises IllegalTransition, saying that one cannot do `what`, unless the table has a way from `state` to `target`."""
    if (state, target) not in TRANSITIONS:
        raise IllegalTransition(what, state, expected=" or ".join(sources(target)))


def backoff_s(errors: int) -> float:
    """Seconds to wait before the try that follows error number `errors` (from 1): doubles from 5 s up to 10 minutes."""
    return min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0 ** min(errors - 1, 32))


def after_error(errors: int, budget: int, *, retry: bool, cancel_requested: bool) -> JobState:
    """Where a job goes after its own error, `errors` counting this one.

    A cancel request takes the place of another try; an error that ends the job anyway is shown as such.
    """
    if not retry or errors > budget:
        return JobState.FAILED
    return JobState.CANCELLED if cancel_requested else JobState.QUEUED


def after_loss(losses: int, budget: int, *, cancel_requested: bool) -> JobState:
    """Where a job goes after its worker was lost, `losses` counting this one."""
    if cancel_requested:
        return JobState.CANCELLED
    return JobState.FAILED if losses > budget else JobState.QUEUED


def after_release(*, cancel_requested: bool) -> JobState:
    """Where a job goes after its attempt gave it back."""
    return JobState.CANCELLED if cancel_requested else JobState.QUEUED


def blocked_reason(need: int, state: JobState) -> str:
    """Why a job that needs job `need` is blocked."""
    words = {JobState.FAILED: "failed", JobState.CANCELLED: "was cancelled", JobState.BLOCKED: "is itself blocked"}
    return f"needs job {need}, which {words[state]}; retry job {need} or cancel this one"


def _last_line(error: str) -> str:
    """What a traceback says at its end, at a length that fits in a table."""
    lines = error.strip().splitlines() or ["no message"]
    return lines[-1] if len(lines[-1]) <= 200 else lines[-1][:199] + "…"


def failure_reason(attempt: int, error: str, target: JobState) -> str:
    """What a job says of itself after its own error sent it to `target`."""
    what = f"attempt {attempt} failed: {_last_line(error)}"
    ends = {JobState.QUEUED: "; it is tried again", JobState.CANCELLED: "; cancelled instead of another try", JobState.FAILED: ""}
    return what + ends[target]


def loss_reason(attempt: int, losses: int, why: str, target: JobState) -> str:
    """What a job says of itself after its worker was lost and that sent it to `target`."""
    if target is JobState.FAILED:
        return f"lost {losses} time{'s' if losses != 1 else ''}, more than its budget allows; the last time: {_last_line(why)}"
    ends = {JobState.QUEUED: "it is tried again", JobState.CANCELLED: "cancelled as requested"}
    return f"attempt {attempt} was lost: {_last_line(why)}; {ends[target]}"


def release_reason(attempt: int, why: str, target: JobState) -> str:
    """What a job says of itself after its attempt gave it back and that sent it to `target`."""
    ends = {JobState.QUEUED: "it goes on with another", JobState.CANCELLED: "cancelled as requested"}
    return f"attempt {attempt} ended: {_last_line(why)}; {ends[target]}"
