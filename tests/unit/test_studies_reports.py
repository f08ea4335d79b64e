"""From cells to jobs, and from rows of the registry to a report: on the registry in memory, with made-up measurements."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from loopcore.studies import Cell, Row, find_study
from services.registry import CurvePoint, Fence, Measurement, MemoryRegistry, RunState, Study
from services.studies import known_findings, plan, report_of
from services.studies.plan import probe_key
from services.studies.report import CURVE, cells_of, command_of
from tests.unit.made_up import speed_rows, train_figures

LAW = find_study("budget-law")
CELLS = LAW.cells("smoke")
ASKED: dict[str, Any] = {"seeds": None, "groups": None, "demands": None}


def started(registry: MemoryRegistry, name: str = "budget-law", **asked: Any) -> Study:
    cells = find_study(name).cells("smoke", **asked)
    return registry.studies.start(name, "smoke", ASKED | asked, plan(cells, user="ada"), provenance={"commit": "c1"}).study


def work_off(registry: MemoryRegistry, exponent: float = 1.0, accuracy: float = 1.0, most: int = 1000) -> None:
    """Plays the workers: every training learns its task, every probe finds v = demand^exponent."""
    cells = {cell.name: cell for cell in CELLS}
    for _ in range(most):
        job = registry.queue.claim("d", cpus=1, gpus=0, memory_gb=1)
        if job is None:
            return
        cell = cells[(job.name or "").split()[0]]
        run = registry.records.open_run(job.fence, kind=job.kind, spec=job.spec)
        if job.kind == "train":
            registry.records.add_points(job.fence, run.id, [CurvePoint(50, CURVE, 0.5), CurvePoint(100, CURVE, math.nan)])
            figures = train_figures(cell.train, accuracy)
            registry.records.finish_run(job.fence, run.id, RunState.FINISHED, figures)
            registry.queue.succeed(job.fence, figures)
            continue
        rows = speed_rows(float(cell.axes["demand"]) ** exponent)
        registry.records.measure(job.fence, run.id, [measured(row) for row in rows])
        registry.records.finish_run(job.fence, run.id, RunState.FINISHED, {})
        registry.queue.succeed(job.fence, {"undecided": {"tau": "3 of 512 words are solved"}})


def measured(row: Row) -> Measurement:
    return Measurement(row.instrument, dict(row.axes), row.value, row.low, row.high)


def report(registry: MemoryRegistry, study: int = 1) -> dict[str, Any]:
    found = report_of(registry.studies.study(study), registry.studies.works(study, curve=CURVE))
    return json.loads(json.dumps(found, default=vars, allow_nan=False))


def by_id(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in found["findings"]}


def test_a_probe_stands_behind_its_training_and_a_warm_start_behind_its_parent() -> None:
    works = plan(find_study("portability").cells("cpu"), priority=3, user="ada", provenance={"commit": "c"})
    place = {work.key: at for at, work in enumerate(works)}
    assert all(place[work.after] < at for at, work in enumerate(works) if work.after is not None)
    assert all(work.after is not None for work in works if work.probe or work.cell.startswith("warm/"))
    job = next(work for work in works if work.cell.startswith("warm/") and not work.probe).submission(7)
    assert (job.kind, job.needs, job.spec["start_from"], job.priority, job.user) == ("train", (7,), 7, 3, "ada")
    assert job.provenance == {"commit": "c"}
    probe = next(work for work in works if work.probe).submission(9)
    assert (probe.kind, probe.needs, probe.spec["job"], probe.priority) == ("probe", (9,), 9, 4)
    assert probe.key is not None
    assert len(probe.key) <= 200


def test_the_same_work_has_one_key_in_every_study() -> None:
    everything = {(work.cell, work.probe): work.key for work in plan(find_study("inside-the-loop").cells("cpu"))}
    for name in ("budget-law", "halting", "walls", "portability"):
        for work in plan(find_study(name).cells("cpu")):
            assert everything[work.cell, work.probe] == work.key
    assert len(set(everything.values())) == len(everything)


def test_what_a_probe_is_called_does_not_matter_and_what_it_asks_does() -> None:
    (probe,) = CELLS[0].probes
    assert probe_key("k", probe) == probe_key("k", probe.model_copy(update={"name": "other"}))
    assert probe_key("k", probe) != probe_key("other", probe)
    assert probe_key("k", probe) != probe_key("k", probe.model_copy(update={"content": probe.content | {"words": 77}}))


def test_a_report_of_nothing_yet_says_so() -> None:
    registry = MemoryRegistry()
    started(registry)
    found = report(registry)
    assert (found["study"], found["scale"], found["command"]) == ("budget-law", "smoke", "loop study budget-law --scale smoke")
    assert found["cost"] == {"jobs": 24, "queued": 24, "seconds": 0.0}
    assert found["finished_at"] is None
    assert [(one["id"], one["verdict"], one["measured"]) for one in found["findings"]] == [
        ("1a", "undecided", None),
        ("1b", "undecided", None),
    ]
    assert "training is queued" in found["findings"][0]["reason"]


def test_a_report_is_the_arithmetic_on_what_the_registry_holds() -> None:
    registry = MemoryRegistry()
    started(registry)
    work_off(registry, exponent=0.9)
    found = report(registry)
    law = by_id(found)["1a"]
    assert law["measured"] == pytest.approx(0.9, abs=1e-9)
    assert (law["verdict"], law["seeds"]) == ("shown", 4)
    assert found["cost"]["succeeded"] == 24
    assert found["finished_at"] is not None
    assert found["provenance"] == {"commit": "c1"}
    assert {"plots", "rows", "rule", "statement"} <= law["detail"].keys()


def test_half_of_a_study_reports_what_it_has() -> None:
    registry = MemoryRegistry()
    started(registry)
    work_off(registry, most=12)
    found = report(registry)
    assert found["cost"]["jobs"] == 24
    assert found["finished_at"] is None
    assert by_id(found)["1a"]["seeds"] <= 4
    assert "Left out" in by_id(found)["1a"]["reason"]


def test_why_a_figure_is_missing_comes_from_the_probe() -> None:
    registry = MemoryRegistry()
    started(registry)
    for _ in range(9):
        work_off(registry, most=1)
    job = registry.queue.claim("d", cpus=1, gpus=0, memory_gb=1)
    assert job is not None
    registry.queue.fail(
        Fence(job.id, job.attempt),
        "the disk is full",
    )
    assert "failed" in by_id(report(registry))["1a"]["reason"]


def test_figures_of_another_recipe_are_not_those_of_the_cell() -> None:
    registry = MemoryRegistry()
    study = started(registry)
    work_off(registry)
    other = [cell.model_copy(update={"train": cell.train.model_copy(update={"batch": 99})}) for cell in CELLS]
    stale = {work.key for work in plan(other)}
    assert not stale & {work.key for work in plan(cells_of(study))}
    registry.studies.start(study.name, study.scale, study.asked, plan(other))
    assert by_id(report(registry))["1a"]["verdict"] == "undecided"
    assert "not started" in by_id(report(registry))["1a"]["reason"]


def test_the_command_says_what_was_asked() -> None:
    registry = MemoryRegistry()
    study = started(registry, seeds=2, groups=["S3", "Z5"], demands=[0.5, 1.0])
    assert command_of(study) == "loop study budget-law --scale smoke --seeds 2 --groups S3,Z5 --demands 0.5,1"
    assert {cell.axes["group"] for cell in cells_of(study)} == {"S3", "Z5"}
    assert {cell.seed for cell in cells_of(study)} == {0, 1}


def test_every_finding_has_its_newest_verdict() -> None:
    registry = MemoryRegistry()
    papers = ("inside-the-loop", "deeploop", "transfer")
    assert [one.id for one in known_findings(registry)] == [claim.id for name in papers for claim in find_study(name).claims]
    assert {one.verdict for one in known_findings(registry)} == {None}
    started(registry)
    work_off(registry)
    found = {one.id: one for one in known_findings(registry)}
    assert (found["1a"].verdict, found["1a"].started, found["1a"].scale) == ("shown", 1, "smoke")
    assert found["1c"].verdict is None


def test_a_study_that_is_not_installed_any_more_is_passed_over() -> None:
    registry = MemoryRegistry()
    registry.studies.start("gone", "smoke", ASKED, [])
    assert {one.verdict for one in known_findings(registry)} == {None}


def test_cells_and_works_have_the_same_names() -> None:
    assert {work.cell for work in plan(CELLS)} == {cell.name for cell in CELLS}
    assert all(isinstance(cell, Cell) for cell in CELLS)
