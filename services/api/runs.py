"""`/v1/runs`: what training runs and other recorded work came to."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import Field

from loopcore.specs import Spec
from services.api.bodies import Checkpoints, Curve, Measurements, Number, RunPage, Word
from services.api.doors import Open
from services.api.errors import may_answer
from services.registry import Run

__all__ = ["router"]

router = APIRouter(prefix="/v1/runs", tags=["runs"])

RunId = Annotated[Number, Path(description="Number of a run.")]
NOT_FOUND = may_answer(404, "There is no such run.")
NO_JOB = may_answer(404, "There is no such job.")


class RunFilter(Spec):
    """Which runs: of one job (oldest first), or of all (newest first)."""

    job: Number | None = None
    """A job, with those it was retried from or as."""
    kind: Word | None = None
    before: Number | None = None
    """Only runs with smaller numbers: `next` of the page before."""
    limit: int = Field(default=50, ge=1, le=1000)


class CurveFilter(Spec):
    """Which points."""

    name: Word | None = None
    """One curve; empty for all."""
    after_step: int = Field(default=-1, ge=-1, lt=2**63)


class MeasurementFilter(Spec):
    """Which measurements."""

    instrument: Word | None = None


@router.get("", responses=NO_JOB)
def list_runs(doors: Open, asked: Annotated[RunFilter, Query()]) -> RunPage:
    """Runs of one job, or of all."""
    found = doors.registry.records.runs(asked.job, kind=asked.kind, before_id=asked.before, limit=asked.limit)
    more = asked.job is None and len(found) == asked.limit
    return RunPage(found, found[-1].id if more else None)


@router.get("/{run}", responses=NOT_FOUND)
def read_run(doors: Open, run: RunId) -> Run:
    """One run with its final figures."""
    return doors.registry.records.run(run)


@router.get("/{run}/curve", responses=NOT_FOUND)
def read_curve(doors: Open, run: RunId, asked: Annotated[CurveFilter, Query()]) -> Curve:
    """Its curves, by step."""
    records = doors.registry.records
    records.run(run)
    return Curve(records.curve(run, asked.name, after_step=asked.after_step))


@router.get("/{run}/measurements", responses=NOT_FOUND)
def list_measurements(doors: Open, run: RunId, asked: Annotated[MeasurementFilter, Query()]) -> Measurements:
    """What instruments found on it."""
    return Measurements(doors.registry.records.measurements(run, instrument=asked.instrument))


@router.get("/{run}/checkpoints", responses=NOT_FOUND)
def list_checkpoints(doors: Open, run: RunId) -> Checkpoints:
    """Its checkpoints, newest first."""
    records = doors.registry.records
    records.run(run)
    return Checkpoints(records.checkpoints(run))
