"""From what the registry holds of a study to its report. Made when asked for, so it is never behind the rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loopcore.studies import Cell, CellResult, Finding, Measured, Row, find_study
from services.registry import JobState, Study, WorkDone
from services.studies.plan import plan

__all__ = ["CURVE", "FindingReport", "Report", "cells_of", "command_of", "findings_of", "report_of", "trained_by_cell"]

CURVE = "held_out_token_accuracy"  # the learning curve that reports draw

# What of a submission's origin a report shows; the host's name is nobody's business.
SHOWN = ("commit", "dirty", "packages", "python", "platform", "cpus")


@dataclass(frozen=True)
class FindingReport:
    """What a study says about one published finding; `detail` has the rule, the rows and the plots."""

    id: str
    title: str
    measured: float | None
    low: float | None
    high: float | None
    unit: str
    published: str
    verdict: str
    reason: str
    seeds: int
    seconds: float
    detail: dict[str, Any]

    @classmethod
    def of(cls, finding: Finding) -> FindingReport:
        return cls(**finding.to_json())


@dataclass(frozen=True)
class Report:
    """A study's findings, what they cost, and how to get them again."""

    study: str
    id: int
    title: str
    scale: str
    asked: dict[str, Any]
    command: str
    created_at: float
    started_at: float
    cancelled_at: float | None
    finished_at: float | None
    """When the last of its jobs ended; empty while any is unfinished."""
    provenance: dict[str, Any]
    cost: dict[str, Any]
    """Jobs by state, and seconds of all their attempts."""
    findings: list[FindingReport]


def cells_of(study: Study) -> tuple[Cell, ...]:
    """The work as the study is declared now. Raises InputError where the study is not installed any more."""
    return find_study(study.name).cells(study.scale, **study.asked)


def command_of(study: Study) -> str:
    """What a user types to get it again."""
    words = ["loop", "study", study.name, "--scale", study.scale]
    if study.asked.get("seeds"):
        words += ["--seeds", str(study.asked["seeds"])]
    if study.asked.get("groups"):
        words += ["--groups", ",".join(study.asked["groups"])]
    if study.asked.get("demands"):
        words += ["--demands", ",".join(f"{demand:g}" for demand in study.asked["demands"])]
    return " ".join(words)


def report_of(study: Study, works: Sequence[WorkDone]) -> Report:
    """The report of what there is so far. `works` come with the curve CURVE."""
    states = Counter(one.job.state.value for one in {one.job.id: one for one in works}.values())
    ended = [one.job.finished_at for one in works if one.job.finished_at is not None]
    return Report(
        study=study.name,
        id=study.id,
        title=find_study(study.name).title,
        scale=study.scale,
        asked=study.asked,
        command=command_of(study),
        created_at=study.created_at,
        started_at=study.started_at,
        cancelled_at=study.cancelled_at,
        finished_at=max(ended) if ended and all(one.job.ended for one in works) else None,
        provenance={name: study.provenance[name] for name in SHOWN if study.provenance.get(name) is not None},
        cost={
            "jobs": sum(states.values()),
            **{state.value: states[state.value] for state in JobState if states[state.value]},
            "seconds": sum({one.job.id: one.seconds for one in works}.values()),
        },
        findings=[FindingReport.of(finding) for finding in findings_of(study, works)],
    )


def findings_of(study: Study, works: Sequence[WorkDone]) -> list[Finding]:
    """The arithmetic on what was measured."""
    cells = cells_of(study)
    return find_study(study.name).summarize(Measured(cells, trained_by_cell(cells, works)))


def trained_by_cell(cells: Iterable[Cell], works: Iterable[WorkDone]) -> dict[str, CellResult]:
    """Cell name to what has come of it. Work whose key is not the cell's any more (its recipe changed) is left out."""
    wanted = {(work.cell, work.probe): work.key for work in plan(cells)}
    by_cell: dict[str, list[WorkDone]] = defaultdict(list)
    for one in works:
        if wanted.get((one.cell, one.probe)) == one.key:
            by_cell[one.cell].append(one)
    return {cell: _result(found) for cell, found in by_cell.items()}


def _result(works: Sequence[WorkDone]) -> CellResult:
    training = next((one for one in works if not one.probe), None)
    probes = sorted((one for one in works if one.probe), key=lambda one: one.probe)
    missing: dict[str, str] = {}
    for one in probes:
        if one.job.state is JobState.SUCCEEDED:
            missing |= (one.job.result or {}).get("undecided", {})
        else:
            missing[one.probe] = f"{one.job.state}: {one.job.reason}" if one.job.reason else one.job.state.value
    rows = [
        Row(found.instrument, found.axes, found.value, found.low, found.high)
        for one in probes
        for found in one.measurements
        if found.value is not None
    ]
    figures = training.run.figures if training is not None and training.run is not None else None
    return CellResult(
        state="not started" if training is None else training.job.state.value,
        seconds=sum(one.seconds for one in works),
        figures=figures or {},
        curves={}
        if training is None
        else {CURVE: [(point.step, point.value) for point in training.curve if point.value is not None]},
        rows=tuple(rows),
        missing=missing,
    )


def _curve(training: WorkDone) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in training.curve if point.value is not None]
