"""`/v1/jobs`: submit, list, read, cancel, retry, logs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import Field

from loopcore.specs import Spec
from services.api.bodies import Attempts, JobDetail, JobPage, Kind, LogPage, Number, SubmitAnswer, SubmitRequest, Text
from services.api.doors import Open
from services.api.errors import Responses, may_answer
from services.api.submission import submit
from services.registry import Job, JobState

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

JobId = Annotated[Number, Path(description="Number of a job.")]
NOT_FOUND = may_answer(404, "There is no such job.")
CONFLICT = may_answer(409, "The job's state, or who holds the key, does not allow it.")

KNOWN: Responses = {200: {"model": SubmitAnswer, "description": "It held the key already."}}


class JobFilter(Spec):
    """Which jobs, newest first."""

    state: JobState | None = None
    kind: Kind | None = None
    user: Text | None = None
    before: Number | None = None
    """Only jobs with smaller numbers: `next` of the page before."""
    limit: int = Field(default=50, ge=1, le=1000)


class LogFilter(Spec):
    """Which pieces of log, in order."""

    after: int = Field(default=0, ge=0, lt=2**63)
    """Only what was written later: `next` of the page before."""
    limit: int = Field(default=1000, ge=1, le=5000)


@router.get("")
def list_jobs(doors: Open, asked: Annotated[JobFilter, Query()]) -> JobPage:
    """Jobs, newest first."""
    found = doors.registry.queue.jobs(
        state=asked.state, kind=asked.kind, user=asked.user, before_id=asked.before, limit=asked.limit
    )
    return JobPage(found, found[-1].id if len(found) == asked.limit else None)


@router.post(
    "",
    status_code=201,
    responses=KNOWN | NOT_FOUND | CONFLICT,
)
def submit_job(doors: Open, asked: SubmitRequest, response: Response) -> SubmitAnswer:
    """Queues a job."""
    done = submit(
        doors.registry.queue,
        asked.spec,
        priority=asked.priority,
        after=asked.after,
        key=asked.key,
        delay_s=asked.delay_s,
        user=asked.user,
        provenance=asked.provenance,
    )
    response.status_code = 201 if done.created else 200
    return SubmitAnswer(done.job, done.created)


@router.get("/{job}", responses=NOT_FOUND)
def read_job(doors: Open, job: JobId) -> JobDetail:
    """One job."""
    queue = doors.registry.queue
    return JobDetail.of(queue.job(job), queue.needs(job))


@router.post("/{job}/cancel", responses=NOT_FOUND | CONFLICT)
def cancel_job(doors: Open, job: JobId) -> Job:
    """Cancels a job that has not begun; asks a running one to stop."""
    return doors.registry.queue.cancel(job)


@router.post("/{job}/retry", status_code=201, responses=NOT_FOUND | CONFLICT)
def retry_job(doors: Open, job: JobId) -> Job:
    """Queues a failed or cancelled job anew; its run goes on from the newest checkpoint."""
    return doors.registry.queue.retry(job)


@router.get("/{job}/attempts", responses=NOT_FOUND)
def list_attempts(doors: Open, job: JobId) -> Attempts:
    """All tries at a job."""
    return Attempts(doors.registry.queue.attempts(job))


@router.get("/{job}/logs", responses=NOT_FOUND)
def read_logs(doors: Open, job: JobId, asked: Annotated[LogFilter, Query()]) -> LogPage:
    """What its attempts wrote."""
    queue = doors.registry.queue
    ended = queue.job(job).ended  # asked first: what it wrote before its end is then among what is read
    chunks = queue.logs(job, after_seq=asked.after, limit=asked.limit)
    return LogPage(chunks, chunks[-1].seq if chunks else asked.after, ended)
