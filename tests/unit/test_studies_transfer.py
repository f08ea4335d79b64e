"""The transfer study's plan, and its findings on made-up losses whose optima are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from loopcore.reports import write
from loopcore.studies import STUDIES, Cell, CellResult, Finding, Verdict
from loopcore.studies.base import plain
from loopcore.studies.drawings import XY
from tests.unit.made_up import SECONDS, findings

SHOWN, NOT_SHOWN, UNDECIDED = Verdict.SHOWN, Verdict.NOT_SHOWN, Verdict.UNDECIDED
STUDY = STUDIES["transfer"]
CELLS = STUDY.cells("cpu")

# Optima by rule and loop count, and how far each seed's lie from them; every curve is a parabola, so the fit is exact.
DRIFTING: Mapping[str, Mapping[int, float]] = {
    "standard": {1: -4.2, 2: -4.8, 4: -5.6, 8: -6.3},
    "depth_mup": {1: -4.2, 2: -4.0, 4: -3.6, 8: -3.3},
    "loop_mup": {1: -4.2, 2: -4.2, 4: -4.3, 8: -4.4},
}
SHIFTS = {0: -0.05, 1: 0.0, 2: 0.05}


def losses(
    optima: Mapping[str, Mapping[int, float]] = DRIFTING,
    *,
    lift: Callable[[Cell], float] = lambda cell: 0.0,
    diverged: Callable[[Cell], bool] = lambda cell: False,
) -> Callable[[Cell], CellResult | None]:
    def come_to(cell: Cell) -> CellResult:
        axes = cell.axes
        at = optima[str(axes["rule"])][int(axes["loops"])] + SHIFTS[cell.seed] * (1 if axes["loops"] == 8 else -1)
        figures = {"outcome": "finished", "loss": 2.0 + 0.1 * (float(axes["log2_lr"]) - at) ** 2 + lift(cell)}
        if diverged(cell):
            figures |= {"outcome": "diverged", "loss": None}
        return CellResult("succeeded", SECONDS, figures)

    return come_to


def said(come_to: Callable[[Cell], CellResult | None], scale: str = "cpu") -> dict[str, Finding]:
    return findings(STUDY, STUDY.cells(scale), come_to)


def test_the_plan() -> None:
    """T = 1 once for all rules, at the rates of all; six rates a curve otherwise; three seeds."""
    assert len(CELLS) == 3 * (7 + 3 * 3 * 6)
    assert {(cell.axes["rule"], cell.axes["loops"]) for cell in CELLS if cell.axes["loops"] == 1} == {("standard", 1)}
    rates = {float(cell.axes["log2_lr"]) for cell in CELLS if (cell.axes["rule"], cell.axes["loops"]) == ("loop_mup", 8)}
    assert rates == {-7.0, -6.0, -5.0, -4.0, -3.0, -2.0}
    cell = next(cell for cell in CELLS if cell.name == "transfer/cpu/loop_mup/T8/lr-5/s1")
    assert (cell.train.scaling.rule, cell.train.scaling.loops, cell.train.contract.most_loops) == ("loop_mup", 8, 8)
    assert (cell.train.optimizer.lr, cell.train.seed, cell.train.steps) == (2.0**-5, 1, 300)
    # 9 s at T = 1 and 40 s at T = 8 were measured; two cores have an hour, smoke has four minutes.
    assert cell.expected_s == pytest.approx(40.0, abs=0.1)
    assert sum(cell.expected_s or 0 for cell in CELLS) < 0.65 * 2 * 3600
    assert sum(cell.expected_s or 0 for cell in STUDY.cells("smoke")) < 0.65 * 2 * 240


def test_drift_under_standard_scaling_and_none_under_loop_mup() -> None:
    found = said(losses())
    assert {found[name].verdict for name in ("M1", "M2", "M3", "M4", "M5")} == {SHOWN}
    # All bowls are equally deep, and at T = 8 the grid comes a tenth of an octave nearer to the optimum of standard scaling.
    assert found["M6"].measured == pytest.approx(0.1 * (0.3**2 - 0.4**2))
    assert found["M6"].verdict is not SHOWN
    assert found["M1"].measured == pytest.approx(-2.1)
    # Seeds shift the base by +.05, 0, -.05 and T = 8 by the opposite: their difference has a standard error of .1 / sqrt(3).
    assert found["M1"].low == pytest.approx(-2.1 - 4.3027 * 0.1 / 3**0.5, abs=1e-4)
    assert found["M3"].measured == pytest.approx(2.1 - 0.2)
    assert found["M5"].measured == pytest.approx(0.9 - 0.2)
    # The base's best rate is -4, and -6 is the best at T = 8 under standard scaling; under loop_mup it is -4 too.
    assert found["M4"].measured == pytest.approx(0.1 * (2.3**2 - 0.3**2))
    assert (found["M1"].seeds, found["M1"].seconds) == (3, len(CELLS) * SECONDS)
    assert "12 of 12 minima are bracketed" in found["M1"].reason


def test_rows_and_plots() -> None:
    detail = said(losses(diverged=lambda cell: cell.name.startswith("transfer/cpu/standard/T8/lr-3/s0")))["M1"].detail
    assert [(row["rule"], row["loops"]) for row in detail["rows"]][:5] == [
        ("standard", 1),
        ("standard", 2),
        ("standard", 4),
        ("standard", 8),
        ("depth_mup", 1),
    ]
    standard, _, scaled = detail["plots"]
    assert isinstance(standard, XY)
    assert [mark.at for mark in standard.marks] == pytest.approx([-4.2, -4.8, -5.6, -6.3])
    assert [one.name for one in standard.series] == ["T = 1", "T = 2", "T = 4", "T = 8", "T = 8, diverged"]
    assert list(standard.series[-1].x) == [-3.0]
    assert standard.series[3].y[list(standard.series[3].x).index(-3.0)] is None
    assert [mark.at for mark in scaled.marks] == pytest.approx([-4.2, -4.2, -4.3, -4.4])


def test_a_rule_that_does_not_drift_is_said_not_to() -> None:
    still: dict[str, Mapping[int, float]] = {rule: dict.fromkeys((1, 2, 4, 8), -4.2) for rule in DRIFTING}
    found = said(losses(still))
    assert found["M1"].verdict is NOT_SHOWN
    assert found["M2"].verdict is SHOWN
    # The two agree in every draw: a difference of 0 is none.
    assert [found[name].measured for name in ("M3", "M4", "M6")] == [0.0, 0.0, 0.0]
    assert {found[name].verdict for name in ("M3", "M4", "M6")} == {NOT_SHOWN}
    moving = dict(DRIFTING) | {"loop_mup": {1: -4.2, 2: -4.2, 4: -4.3, 8: -6.0}}
    assert said(losses(moving))["M2"].verdict is NOT_SHOWN


def test_a_minimum_at_the_edge_gives_no_drift() -> None:
    edge = dict(DRIFTING) | {"standard": {1: -4.2, 2: -4.8, 4: -5.6, 8: -9.0}}
    found = said(losses(edge))
    assert {found[name].verdict for name in ("M1", "M3", "M6")} == {UNDECIDED}
    assert "the lowest loss is at 2^-8, the smallest learning rate tried" in found["M1"].reason
    assert "11 of 12 minima are bracketed" in found["M1"].reason
    assert found["M2"].verdict is SHOWN


def test_losses_at_the_best_rates_are_compared() -> None:
    found = said(losses(lift=lambda cell: 0.5 if (cell.axes["rule"], cell.axes["loops"]) == ("standard", 8) else 0.0))
    assert found["M6"].verdict is SHOWN
    # Each at its best rate of the grid: .3 octaves off under standard (-6.3 at -6), .4 under loop_mup (-4.4 at -4).
    assert found["M6"].measured == pytest.approx(0.5 + 0.1 * (0.3**2 - 0.4**2))


def test_a_rate_that_diverges_with_loops_has_no_regret() -> None:
    found = said(losses(diverged=lambda cell: cell.name.startswith("transfer/cpu/standard/T8/lr-4")))["M4"]
    assert found.verdict is UNDECIDED
    assert "under standard a seed diverged at the base's best rate" in found.reason


def test_a_study_that_has_not_ended_says_so() -> None:
    everything = losses()
    found = said(lambda cell: everything(cell) if cell.axes["loops"] != 8 else None)
    assert {one.verdict for one in found.values()} == {UNDECIDED}
    assert f"{3 * 3 * 6} of {len(CELLS)} runs have not ended" in found["M1"].reason
    nothing = said(lambda cell: None)
    assert {one.verdict for one in nothing.values()} == {UNDECIDED}
    assert nothing["M1"].seeds == 0


def test_smoke_has_two_rules_and_says_what_is_left_out() -> None:
    optima = {"standard": {1: -4.2, 4: -4.4}, "loop_mup": {1: -4.2, 4: -4.3}}
    found = said(losses(optima), "smoke")
    assert found["M5"].verdict is UNDECIDED
    assert "depth_mup is not trained at this scale" in found["M5"].reason


def test_one_seed_decides_nothing() -> None:
    everything = losses()
    found = findings(STUDY, STUDY.cells("cpu", seeds=1), everything)
    assert {one.verdict for one in found.values()} == {UNDECIDED}
    assert found["M1"].measured == pytest.approx(-2.1 - 0.05 - 0.05)


def test_the_report_can_be_written(tmp_path: Path) -> None:
    report = {"study": "transfer", "findings": [plain(one) for one in said(losses()).values()]}
    written = write(report, tmp_path, stem="transfer")
    assert {path.suffix for path in written} >= {".html", ".md", ".json"}
    assert "optimum at T = 8: -4.40" in (tmp_path / "transfer.html").read_text()
