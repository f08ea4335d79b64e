"""Cells, asks and verdicts of studies: what is unique, what is shared, what is refused before anything is queued."""

from __future__ import annotations

import json
import math
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from pydantic import ValidationError

from loopcore.errors import InputError, UnknownGroup
from loopcore.specs import TrainSpec
from loopcore.studies import (
    SCALES,
    STUDIES,
    Cell,
    Claim,
    Estimate,
    Measured,
    ProbeRequest,
    Study,
    Verdict,
    cell_keys,
    find_study,
    study_names,
)
from loopcore.studies.base import Ask, merged, plain
from loopcore.studies.inside_the_loop import PARTS
from loopcore.studies.recipes import chance, far_lengths
from loopcore.studies.verdicts import all_of, any_of, difference, judge, mean_of, span
from tests.unit.made_up import SECONDS, findings, result

SHOWN, NOT_SHOWN, UNDECIDED = Verdict.SHOWN, Verdict.NOT_SHOWN, Verdict.UNDECIDED
ALL = STUDIES["inside-the-loop"]
IDS = ["1a", "1b", "1c", "1d", "1e", "2a", "2b", "2c", "3a", "3b", "3c", "4a", "4b", "5a", "5b", "5c", "5d", "6"]


def test_every_finding_of_the_paper() -> None:
    assert [claim.id for claim in ALL.claims] == IDS
    assert all(claim.published and claim.rule and claim.unit and claim.statement for claim in ALL.claims)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_cells(name: str, scale: str) -> None:
    cells = STUDIES[name].cells(scale)
    keys = cell_keys(cells)
    assert len(cells) == len(keys) == len(set(keys.values())), "a piece of work has two names"
    assert all(cell.probes and cell.roles for cell in cells) or name in ("portability", "inside-the-loop", "deeploop", "transfer")
    assert STUDIES[name].cells(scale) == cells
    assert cell_keys(STUDIES[name].cells(scale)) == keys
    for cell in cells:
        assert Cell.model_validate_json(cell.model_dump_json()) == cell
        assert cell.train.evaluate_on >= 256  # Wilson's interval of a final accuracy counts on it
        for probe in cell.probes:
            probe.spec(job=7)
            if not cell.train.model.tied:
                assert probe.spec(job=7).loops_factor == 1.0, "an untied model has weights for T loops only"


@pytest.mark.parametrize("scale", SCALES)
def test_studies_share_their_cells(scale: str) -> None:
    together = ALL.cells(scale)
    keys = cell_keys(together)
    roles = {cell.name: set(cell.roles) for cell in together}
    probes = {cell.name: {probe.name: probe for probe in cell.probes} for cell in together}
    alone, parts = 0, {study.name for study in PARTS}
    for study in STUDIES.values():
        if study.name not in parts:
            continue
        cells = study.cells(scale)
        alone += len(cells)
        for cell, key in zip(cells, cell_keys(cells).values(), strict=True):
            assert keys[cell.name] == key
            assert study.name in roles[cell.name]
            assert all(probes[cell.name][probe.name] == probe for probe in cell.probes)
    assert len(together) < 0.8 * alone
    wide = max(roles.values(), key=len)
    assert {"budget-law", "halting", "portability", "input-schedule", "instruments"} <= wide


def test_what_a_study_alone_says_it_says_among_others() -> None:
    """The cells of other studies change nothing in a study's figures."""

    def come_to(cell: Cell) -> object:
        return result(cell, accuracy=0.99)

    alone = findings(STUDIES["walls"], STUDIES["walls"].cells("cpu"), come_to)
    among = findings(ALL, ALL.cells("cpu"), come_to)
    assert alone.items() <= among.items()


def test_smoke_of_the_budget_law() -> None:
    cells = STUDIES["budget-law"].cells("smoke")
    assert {(cell.axes["length"], cell.axes["loops"], cell.axes["blocks"]) for cell in cells} == {
        (8, 16, 1),
        (8, 8, 1),
        (12, 6, 2),
    }
    # Two thirds of the six minutes that two cores have, for the training alone.
    assert sum(cell.expected_s or math.inf for cell in cells) < 480


def test_three_seeds_on_a_cpu_and_one_where_a_run_costs_five_minutes() -> None:
    seeds: dict[str, set[int]] = {}
    for cell in ALL.cells("cpu"):
        seeds.setdefault(cell.name.rsplit("/", 1)[0], set()).add(cell.seed)
    few = {name for name, found in seeds.items() if found != {0, 1, 2}}
    assert few == {"untied/A5/n8/T8/L1/d96-depth"}
    assert sum(cell.expected_s or 0 for cell in ALL.cells("cpu")) < 3 * 3600  # one thread; two run side by side
    assert {cell.seed for cell in STUDIES["walls"].cells("cpu", seeds=2)} == {0, 1}


def test_recipes() -> None:
    assert far_lengths(12) == (12, 15, 18, 24, 48)
    assert chance("S5", 6) == pytest.approx(0.1736, abs=1e-4)  # RECIPES measured .174
    direct = next(cell for cell in ALL.cells("cpu") if cell.axes["family"] == "direct")
    curriculum = next(cell for cell in ALL.cells("cpu") if cell.axes["family"] == "operator-first")
    assert direct.train.contract.lengths == (6,)
    assert curriculum.train.contract.lengths == (2, 3, 4, 6)
    assert curriculum.train.contract.operator_first
    free = next(cell for cell in ALL.cells("cpu") if cell.name == "free/S3/n12/T12/L1/s0")
    assert free.train.contract.lengths == (2, 4, 6, 8, 10, 12)
    gpu = next(cell for cell in ALL.cells("gpu") if cell.axes["family"] == "free")
    assert gpu.train.contract.lengths == (4, 8, 16, 32)
    assert (gpu.train.model.width, gpu.train.model.blocks, gpu.train.batch, gpu.train.optimizer.lr) == (128, 2, 256, 3e-4)
    assert gpu.resources.gpus > 0


def test_demands_of_ones_own() -> None:
    cells = STUDIES["budget-law"].cells("smoke", seeds=1, demands=(0.25, 1, 4))
    assert [(cell.axes["length"], cell.axes["loops"]) for cell in cells] == [(8, 32), (8, 8), (24, 6)]
    assert [cell.axes["demand"] for cell in cells] == [0.25, 1.0, 4.0]


@pytest.mark.parametrize(
    ("name", "ask", "kind", "message"),
    [
        ("budget-law", {"scale": "huge"}, InputError, "expected a scale of smoke, cpu, gpu, got 'huge'"),
        ("budget-law", {"seeds": 0}, InputError, "expected 1 to 64 seeds, got 0"),
        ("budget-law", {"seeds": 65}, InputError, "got 65"),
        ("budget-law", {"groups": ("S3", "Q8")}, UnknownGroup, "expected a group such as .* got 'Q8'"),
        ("budget-law", {"groups": ("S9",)}, UnknownGroup, "at most 5040"),
        ("budget-law", {"groups": ()}, InputError, "at least one of the groups"),
        ("halting", {"groups": ("S3", "S3")}, InputError, "each once"),
        ("walls", {"groups": ("S3",)}, InputError, "walls is about groups of its own"),
        ("halting", {"demands": (1.0,)}, InputError, "has demands of its own"),
        ("budget-law", {"demands": (0.0,)}, InputError, "a demand from 1/64 to 32"),
        ("budget-law", {"demands": (0.01,)}, InputError, "a demand from 1/64 to 32"),
        ("budget-law", {"demands": (float("nan"),)}, InputError, "a demand from 1/64 to 32"),
        (
            "budget-law",
            {"demands": (1.0, 1.7)},
            InputError,
            r"no loop count meets a demand of 1.7 at length 11 on S3; the nearest",
        ),
    ],
)
def test_what_is_refused_before_any_job(name: str, ask: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        STUDIES[name].cells(**({"scale": "smoke"} | ask))


def test_a_warm_start_is_other_work_under_another_parent() -> None:
    cells = STUDIES["portability"].cells("smoke", seeds=2)
    parent, child = cells[0], cells[1]
    assert child.start_from == parent.name
    keys = cell_keys(cells)
    changed = parent.model_copy(update={"train": parent.train.model_copy(update={"batch": 8})})
    other = cell_keys([changed, child])
    assert other[child.name] != keys[child.name]
    plain_start = child.model_copy(update={"start_from": None})
    assert cell_keys([plain_start])[child.name] != keys[child.name]
    # What is measured on a cell, who reads it and what it is called change nothing about the work.
    assert cell_keys([parent.model_copy(update={"probes": (), "roles": (), "axes": {}})])[parent.name] == keys[parent.name]


def test_merging() -> None:
    a = Cell(name="a", train=TrainSpec(), probes=(ProbeRequest(name="speed", content={}),), roles=("x",))
    b = a.model_copy(update={"probes": (ProbeRequest(name="far", content={"words": 9}),), "roles": ("y",)})
    (one,) = merged([a, b, a])
    assert [probe.name for probe in one.probes] == ["speed", "far"]
    assert one.roles == ("x", "y")
    with pytest.raises(AssertionError, match="two kinds of work"):
        merged([a, a.model_copy(update={"train": TrainSpec(seed=1)})])
    with pytest.raises(AssertionError, match="two probes"):
        merged([a, a.model_copy(update={"probes": (ProbeRequest(name="speed", content={"words": 9}),)})])
    with pytest.raises(AssertionError, match="stands before"):
        merged([a.model_copy(update={"start_from": "b"})])


def test_a_cell_is_checked() -> None:
    with pytest.raises(ValidationError, match="instruments"):
        ProbeRequest(name="x", content={"instruments": ("crystal ball",)})
    with pytest.raises(ValidationError, match="a job, known only later"):
        Cell(name="a", train=TrainSpec(start_from=3))


@pytest.mark.parametrize("name", STUDIES)
def test_nothing_measured_decides_nothing(name: str) -> None:
    study = STUDIES[name]
    cells = study.cells("cpu")
    for measured in (Measured(cells, {}), Measured((), {})):
        for finding in study.summarize(measured):
            assert finding.verdict is UNDECIDED
            assert finding.measured is None
            assert finding.seeds == 0
            assert finding.reason
    found = findings(study, cells, lambda cell: result(cell, accuracy=1.0))
    assert all(finding.seconds >= SECONDS for finding in found.values())
    for finding in found.values():
        json.dumps(finding.to_json(), allow_nan=False)


def test_judging() -> None:
    assert judge(Estimate(1.0, 0.9, 1.1), 0.8, 1.2) is SHOWN
    assert judge(Estimate(1.0, 0.7, 1.1), 0.8, 1.2) is UNDECIDED
    assert judge(Estimate(0.5, 0.4, 0.7), 0.8, 1.2) is NOT_SHOWN
    assert judge(Estimate(1.5, 1.3, 1.7), 0.8, 1.2) is NOT_SHOWN
    assert judge(Estimate(1.0), 0.8, 1.2) is UNDECIDED  # nobody knows how far off a single figure is
    assert judge(None) is UNDECIDED
    assert all_of([SHOWN, SHOWN]) is SHOWN
    assert all_of([SHOWN, UNDECIDED]) is UNDECIDED
    assert all_of([UNDECIDED, NOT_SHOWN]) is NOT_SHOWN
    assert all_of([]) is UNDECIDED
    assert any_of([NOT_SHOWN, SHOWN]) is SHOWN
    assert any_of([NOT_SHOWN, UNDECIDED]) is UNDECIDED
    assert any_of([NOT_SHOWN, NOT_SHOWN]) is NOT_SHOWN


def test_means_over_runs() -> None:
    # 1, 2, 3: standard error 1 / sqrt(3), t with two degrees of freedom 4.3027.
    mean = mean_of([Estimate(1.0), Estimate(2.0), Estimate(3.0)])
    assert mean.value == 2
    assert mean.high == pytest.approx(2 + 4.30265 / math.sqrt(3), rel=1e-4)
    assert mean_of([Estimate(2.0, 1.5, 2.75)]) == Estimate(2.0, 1.5, 2.75)
    # Seeds that agree exactly are known no better than each of them: .3 / sqrt(3) below, .6 / sqrt(3) above.
    same = mean_of([Estimate(1.0, 0.7, 1.6)] * 3)
    assert same.low == pytest.approx(1 - 0.3 / math.sqrt(3))
    assert same.high == pytest.approx(1 + 0.6 / math.sqrt(3))
    assert span([Estimate(1.0, 0.8, 1.1), Estimate(0.5, 0.4, 0.6)]) == Estimate(0.75, 0.4, 1.1)
    assert span([Estimate(1.0, 0.8, 1.1), Estimate(0.5)]) == Estimate(0.75)
    apart = difference(Estimate(1.0, 0.7, 1.4), Estimate(0.5, 0.2, 0.9))
    assert (apart.value, apart.low, apart.high) == pytest.approx((0.5, 0.5 - math.hypot(0.3, 0.4), 0.5 + math.hypot(0.4, 0.3)))


def test_no_report_holds_what_is_no_number() -> None:
    claim = Claim("9", "title", "statement", "published", "unit", "rule")
    finding = claim.finding(SHOWN, "why", estimate=Estimate(math.nan, -math.inf, 2.0), detail={"rows": [{"v": math.inf, "n": 3}]})
    found = finding.to_json()
    assert (found["measured"], found["low"], found["high"], found["verdict"]) == (None, None, 2.0, "shown")
    assert found["detail"] == {"statement": "statement", "rule": "rule", "rows": [{"v": None, "n": 3}]}
    assert plain((1, "a", None, True)) == [1, "a", None, True]


def test_studies_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = EntryPoints([EntryPoint("mine", "made_up_package:STUDY", "loopcore.studies")])
    monkeypatch.setattr("loopcore.studies.entry_points", lambda group: brought)
    study = Study("mine", "Mine", (), lambda ask: [], lambda measured: [])
    monkeypatch.setattr(EntryPoint, "load", lambda self: study)
    assert find_study("mine") is study
    assert study_names()[-1] == "mine"
    monkeypatch.setattr(EntryPoint, "load", lambda self: 3)
    with pytest.raises(InputError, match="is a int, expected a Study"):
        find_study("mine")
    with pytest.raises(InputError, match=r"no study is called 'yours'; expected one of budget-law, .*mine"):
        find_study("yours")
    assert find_study("walls") is STUDIES["walls"]


def test_seed_ranges() -> None:
    assert Ask("cpu").seed_range() == range(3)
    assert Ask("cpu", seeds=5).seed_range(cpu=1) == range(5)
    assert Ask("gpu").seed_range() == range(16)
