"""Findings 5a to 5d on made-up measurements whose answers are known."""

from __future__ import annotations

import math

import pytest

from loopcore.studies import STUDIES, Cell, CellResult, Finding, Row, Verdict
from tests.unit.made_up import accuracy_rows, findings, result, speed_rows, tail_rows, tau_rows

SHOWN, NOT_SHOWN, UNDECIDED = Verdict.SHOWN, Verdict.NOT_SHOWN, Verdict.UNDECIDED
STUDY = STUDIES["instruments"]
CELLS = STUDY.cells("cpu")
FATES = {cell.name: (7 * i % len(CELLS)) / len(CELLS) for i, cell in enumerate(CELLS)}  # a shuffle of evenly spaced fates
NOISE = {cell.name: (13 * i % len(CELLS)) / len(CELLS) for i, cell in enumerate(CELLS)}  # another, hardly correlated with it
SATURATED = {"one_step_skip": 0.999, "adjacent_cosine": 0.97, "asymptotic_alignment": 0.95, "jacobian_alignment": 0.93}


def population(
    *,
    tail: dict[str, float] | None = None,
    tau_ratio: float = 1.02,
    cone_ratio: float = 1.05,
    reach: float = 0.01,
    r2: float = 0.99,
    head_knows: bool = True,
    tail_knows: bool = False,
    only: int | None = None,
) -> dict[str, Finding]:
    """Every run learned; out of distribution it has the accuracy FATES says, which the frontier's R2 or the tail may know."""

    def come_to(cell: Cell) -> CellResult | None:
        if only is not None and cell.name not in [one.name for one in CELLS[:only]]:
            return None
        v, fate, noise = float(cell.axes["demand"]), FATES[cell.name], NOISE[cell.name]
        known = 0.9 + 0.1 * (fate if head_knows else noise)
        metrics = dict(tail or SATURATED)
        metrics["one_step_skip"] -= 0.01 * (fate if tail_knows else noise)
        rows = speed_rows(v, 0.001, tau_p90=tau_ratio * v, r2_frontier=known, r2_tau_p90=r2, cone=cone_ratio * v)
        rows += [
            Row("speed", {"estimator": "cone"}, cone_ratio * v),
            Row("cone_ratio", {"against": "tau_mean"}, cone_ratio, cone_ratio - reach, cone_ratio + reach),
        ]
        rows += [Row("damage_onset", {"patched": p, "distance": d}, d / v) for p in (1, 2) for d in (1, 2, 3)]
        rows += tail_rows(**metrics) + tau_rows(cell, lambda n: n / v)
        length = math.ceil(1.5 * cell.train.contract.longest)
        loops = math.ceil(length / v)
        rows += accuracy_rows(length, loops if cell.train.model.tied else cell.axes["loops"], lambda t: fate)
        return result(cell, rows=rows)

    return findings(STUDY, CELLS, come_to)


def test_saturated_tails() -> None:
    found = population()["5a"]
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(0.93)  # the smallest of the four, at the last loop
    assert found.seeds == 3
    assert population(tail=SATURATED | {"jacobian_alignment": 0.4})["5a"].verdict is NOT_SHOWN
    assert population(tail=SATURATED | {"jacobian_alignment": 0.9})["5a"].verdict is UNDECIDED


def test_a_tail_metric_that_nobody_measured() -> None:
    three = {name: value for name, value in SATURATED.items() if name != "jacobian_alignment"}
    found = population(tail=three)["5a"]
    assert found.verdict is UNDECIDED
    assert found.measured == pytest.approx(0.95)
    assert "no jacobian_alignment was measured" in found.reason


def test_tau_reads_the_speed() -> None:
    found = population()["5b"]
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(1.02)
    assert population(tau_ratio=1.3)["5b"].verdict is NOT_SHOWN
    assert population(tau_ratio=1.1505)["5b"].verdict is NOT_SHOWN
    assert population(tau_ratio=1.15)["5b"].verdict is UNDECIDED
    assert population(r2=0.5)["5b"].verdict is NOT_SHOWN  # no line, so its slope means nothing
    plot = found.detail["plots"][0]
    assert list(plot.series[1].y) == pytest.approx([n / 0.5 for n in range(2, 13)])


def test_cones() -> None:
    found = population()["5c"]
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(1.05)
    assert "against the frontier 1.05" in found.reason
    plot = found.detail["plots"][0]
    assert [series.name for series in plot.series] == ["position 1 damaged", "position 2 damaged", "edge, v = 0.50"]
    assert list(plot.series[2].y) == pytest.approx([2, 4, 6])
    assert population(cone_ratio=1.4)["5c"].verdict is NOT_SHOWN
    assert population(cone_ratio=1.15)["5c"].verdict is UNDECIDED


def test_the_head_knows_and_the_tail_does_not() -> None:
    found = population()["5d"]
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(1.0)
    best = found.detail["head"]["R2 of the frontier"]
    assert best["spearman"] == pytest.approx(1.0)
    assert best["auroc"] == pytest.approx(1.0)
    assert best["p"] == pytest.approx(5 / 5000)  # one of 5000 orders, five head metrics
    assert found.detail["tail"]["one_step_skip"]["p"] > 0.05
    assert "same value in every run" in found.detail["tail"]["adjacent_cosine"]["undecided"]
    titles = [plot.title for plot in found.detail["plots"]]
    assert "head: R2 of the frontier" in titles
    assert "tail: one step skip" in titles


def test_fates_that_the_tail_knows_too_or_the_head_does_not() -> None:
    assert population(tail_knows=True)["5d"].verdict is NOT_SHOWN
    assert population(head_knows=False)["5d"].verdict is NOT_SHOWN


def test_too_few_runs_for_a_rank_correlation() -> None:
    found = population(only=6)["5d"]
    assert found.verdict is UNDECIDED
    assert "6 runs have an accuracy at 1.5 N, a rank correlation needs 10" in found.reason
