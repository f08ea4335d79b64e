"""`/v1/studies` and `/v1/findings`: start a study, see how far it is, read its report."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import Field

from loopcore.errors import InputError
from loopcore.specs import Spec
from loopcore.studies import find_study
from services.api.bodies import Findings, Number, StudyDetail, StudyPage, StudyRequest, StudyStarted, Word, WorkState
from services.api.doors import Open
from services.api.errors import Refused, Responses, may_answer
from services.problems import Problem
from services.registry import Study
from services.studies import Report, known_findings, plan, report_of
from services.studies.report import CURVE

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["studies"])

StudyId = Annotated[Number, Path(description="Number of a study that was started.")]
NOT_FOUND = may_answer(404, "There is no such study.")
CONFLICT = may_answer(409, "A job stands in the way.")
KNOWN: Responses = {200: {"model": StudyStarted, "description": "It was started before, and goes on."}}


class StudyFilter(Spec):
    """Which studies, newest first."""

    study: Word | None = None
    """Only those of this name."""
    before: Number | None = None
    """Only studies with smaller numbers: `next` of the page before."""
    limit: int = Field(default=50, ge=1, le=200)


@router.get("/findings")
def list_findings(doors: Open) -> Findings:
    """Every published finding, with what the study started last says about it."""
    return Findings(known_findings(doors.registry))


@router.get("/studies")
def list_studies(doors: Open, asked: Annotated[StudyFilter, Query()]) -> StudyPage:
    """Studies that were started, newest first."""
    found = doors.registry.studies.studies(name=asked.study, before_id=asked.before, limit=asked.limit)
    return StudyPage(found, found[-1].id if len(found) == asked.limit else None)


@router.post("/studies", status_code=201, responses=KNOWN | CONFLICT)
def start_study(doors: Open, asked: StudyRequest, response: Response) -> StudyStarted:
    """Queues what is missing of a study's work; the same study again goes on where it was."""
    chosen = {"seeds": asked.seeds, "groups": asked.groups, "demands": asked.demands}
    try:
        cells = find_study(asked.study).cells(asked.scale, **chosen)
    except InputError as error:
        raise Refused(422, Problem(str(error), None, "see `loop studies`")) from None
    provenance = asked.provenance.resolved()
    works = plan(cells, priority=asked.priority, user=asked.user, provenance=provenance)
    kept = {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}
    started = doors.registry.studies.start(asked.study, asked.scale, kept, works, user=asked.user, provenance=provenance)
    response.status_code = 201 if started.study.created_at == started.study.started_at else 200
    return StudyStarted(started.study, started.created, started.retried, started.shared, started.kept)


@router.get("/studies/{study}", responses=NOT_FOUND)
def read_study(doors: Open, study: StudyId) -> StudyDetail:
    """One study, with the jobs that do its work."""
    found = doors.registry.studies.study(study)
    works = [
        WorkState(one.cell, one.probe, one.job.id, one.job.state, one.job.reason, one.seconds)
        for one in doors.registry.studies.works(study, found=False)
    ]
    return StudyDetail(**{field.name: getattr(found, field.name) for field in fields(Study)}, works=works)


@router.post("/studies/{study}/cancel", responses=NOT_FOUND)
def cancel_study(doors: Open, study: StudyId) -> Study:
    """Cancels its unfinished jobs, but for those that another study needs too."""
    return doors.registry.studies.cancel(study)


@router.get("/studies/{study}/report", responses=NOT_FOUND | may_answer(409, "The study is not declared any more as it was."))
def read_report(doors: Open, study: StudyId) -> Report:
    """What it says about each finding, from what has been measured so far."""
    found = doors.registry.studies.study(study)
    try:
        return report_of(found, doors.registry.studies.works(study, curve=CURVE))
    except InputError as error:
        raise Refused(409, Problem(f"study {study} cannot be worked out: {error}")) from None
