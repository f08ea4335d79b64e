"""Findings 1a to 1e on made-up measurements whose answers are known."""

from __future__ import annotations

import pytest

from loopcore.studies import STUDIES, Cell, CellResult, Finding, Row, Verdict
from loopcore.studies.drawings import XY, Heat
from tests.unit.made_up import SECONDS, accuracy_rows, findings, position_rows, result, speed_rows

SHOWN, NOT_SHOWN, UNDECIDED = Verdict.SHOWN, Verdict.NOT_SHOWN, Verdict.UNDECIDED
BUDGET, HALTING = STUDIES["budget-law"], STUDIES["halting"]

WOBBLE = {0: 1.0, 1: 0.98, 2: 1.02}  # of the speed, by seed


def budget(exponent: float, **ask: object) -> dict[str, Finding]:
    def come_to(cell: Cell) -> CellResult:
        v = float(cell.axes["demand"]) ** exponent * WOBBLE[cell.seed]
        return result(cell, rows=speed_rows(v, tau_mean=1.2 * v) + position_rows(8, 12, 1))

    return findings(BUDGET, BUDGET.cells("smoke", **({"seeds": 3} | ask)), come_to)


def test_a_priced_speed() -> None:
    law = budget(0.95)["1a"]
    assert law.verdict is SHOWN
    assert law.measured == pytest.approx(0.95)
    # Residuals 0, ln .98, ln 1.02 about their mean at each of 3 demands; 7 degrees of freedom, t = 2.3646; Sxx = 6 ln(2)^2.
    assert law.high == pytest.approx(0.95 + 2.3646 * (3 * 0.000802 / 7 / (6 * 0.4805)) ** 0.5, abs=2e-4)
    assert (law.seeds, law.seconds) == (3, 9 * SECONDS)
    assert law.detail["r2"] > 0.99
    assert law.detail["estimators"]["tau mean"]["exponent"] == pytest.approx(0.95)
    assert len(law.detail["rows"]) == 9
    assert law.detail["rows"][0]["tau mean"] == pytest.approx(1.2 * law.detail["rows"][0]["v"])


def test_its_plots() -> None:
    plots = budget(0.95)["1a"].detail["plots"]
    law, *heats = plots
    assert isinstance(law, XY)
    assert law.log
    assert [len(series.x) for series in law.series] == [9, 3, 3]  # every seed as a point, the fitted line, v = demand
    assert law.series[1].y[1] == pytest.approx(1.0, abs=0.01)
    assert len(heats) == 3
    heat = heats[0]
    assert isinstance(heat, Heat)
    assert (heat.x, heat.y) == (list(range(1, 13)), list(range(1, 9)))
    assert heat.values[3][2] == 0.0  # position 4 after loop 3
    assert heat.values[3][3] == 1.0
    assert list(heat.series[0].y)[:3] == [1, 2, 3]


def test_an_unpriced_speed() -> None:
    law = budget(0.3)["1a"]
    assert law.verdict is NOT_SHOWN
    assert law.measured == pytest.approx(0.3)


def test_an_exponent_from_points_that_scatter() -> None:
    def come_to(cell: Cell) -> CellResult:
        return result(cell, rows=speed_rows(float(cell.axes["demand"]) * {0: 0.5, 1: 1.0, 2: 2.0}[cell.seed]))

    law = findings(BUDGET, BUDGET.cells("smoke", seeds=3), come_to)["1a"]
    assert law.verdict is UNDECIDED
    assert law.measured == pytest.approx(1.0)
    assert law.detail["r2"] == pytest.approx(0.5)  # as much spread between seeds as between demands


def test_too_few_demands_learned() -> None:
    def come_to(cell: Cell) -> CellResult:
        slow = cell.axes["demand"] == 2.0
        return result(cell, accuracy=0.9 if slow else 1.0, rows=speed_rows(float(cell.axes["demand"])))

    law = findings(BUDGET, BUDGET.cells("smoke", seeds=3), come_to)["1a"]
    assert law.verdict is UNDECIDED
    assert law.measured is None
    assert "stand at 2 demand(s) and an exponent needs 3" in law.reason
    assert "Left out 3 of 9 runs" in law.reason
    assert "did not learn its task (0.900 at length 12" in law.reason


def test_a_study_that_was_cut_short_reports_what_it_has() -> None:
    def come_to(cell: Cell) -> CellResult | None:
        if cell.seed == 2:
            return CellResult("cancelled", 3.0) if cell.axes["demand"] == 1.0 else None
        return result(cell, rows=speed_rows(float(cell.axes["demand"]) * WOBBLE[cell.seed]))

    law = findings(BUDGET, BUDGET.cells("smoke", seeds=3), come_to)["1a"]
    assert law.verdict is SHOWN
    assert law.seeds == 2
    assert law.seconds == 6 * SECONDS + 3.0
    assert "Left out 3 of 9 runs" in law.reason
    assert "its training is cancelled" in law.reason
    assert "its training is not started" in law.reason


def test_a_figure_that_no_probe_has_is_left_out_with_its_reason() -> None:
    def come_to(cell: Cell) -> CellResult:
        if cell.seed == 0:
            return CellResult("succeeded", SECONDS, result(cell).figures, missing={"speed": "3 of 256 words are solved"})
        return result(cell, rows=speed_rows(float(cell.axes["demand"])))

    law = findings(BUDGET, BUDGET.cells("smoke", seeds=3), come_to)["1a"]
    assert "no speed by frontier (3 of 256 words are solved)" in law.reason


@pytest.mark.parametrize(
    ("v", "verdict"),
    [((0.97, 1.0, 1.01), SHOWN), ((0.4, 0.41, 0.42), NOT_SHOWN), ((0.8, 1.0, 1.1), UNDECIDED), ((1.4, 1.41, 1.39), NOT_SHOWN)],
)
def test_unit_speed(v: tuple[float, ...], verdict: Verdict) -> None:
    found = findings(BUDGET, BUDGET.cells("smoke", seeds=3), lambda cell: result(cell, rows=speed_rows(v[cell.seed])))["1b"]
    assert found.verdict is verdict
    assert found.measured == pytest.approx(sum(v) / 3)
    assert found.seeds == 3
    assert found.seconds == 3 * SECONDS


def test_unit_speed_is_asked_of_every_group() -> None:
    def come_to(cell: Cell) -> CellResult:
        return result(cell, rows=speed_rows({"S3": 1.0, "A4": 0.94, "A5": 1.02}[str(cell.axes["group"])]))

    found = findings(BUDGET, BUDGET.cells("cpu"), come_to)["1b"]
    assert found.measured == pytest.approx((1.0 + 0.94 + 1.02) / 3)
    assert set(found.detail["by_group"]) == {"S3", "A4", "A5"}
    assert "S3 1.000, A4 0.940, A5 1.020" in found.reason


def halting(
    late: float = 0.99,
    at_trained: float = 0.5,
    off: int = 0,
    far: float = 0.6,
    far_remedied: float = 0.98,
    v_remedied: float = 1.0,
    kept: int | None = None,
    loops: float = 8.0,
) -> dict[str, Finding]:
    """v is the demand's; accuracy is `at_trained` below T*, `late` from T* + `off` to twice that, and `far` past it.

    Of 20 calibrations `kept` keep their promise, with `loops` of 12.
    """

    def come_to(cell: Cell) -> CellResult:
        extra, demand = cell.axes["family"] == "extra", float(cell.axes["demand"])
        v = demand * (v_remedied if extra else 1.0)
        rows = speed_rows(v)
        for length in (12, 15):
            planned = -(-length // v)

            def accuracy(t: int, planned: float = planned) -> float:
                if t < planned + off:
                    return at_trained
                return late if t <= 2 * planned else (far_remedied if extra else far)

            rows += accuracy_rows(length, int(4 * planned), accuracy)
        if kept is not None and demand == 1.0 and not extra:
            rows += calibration_rows(kept, loops)
        return result(cell, rows=rows)

    return findings(HALTING, HALTING.cells("cpu", groups=("S3",)), come_to)


def calibration_rows(kept: int, loops: float, draws: int = 20) -> list[Row]:
    whole = {"kept": kept, "draws": draws, "loops": loops, "fixed_loops": 12}
    rows = [Row("calibration", {"of": of, "eps": 0.01}, value) for of, value in whole.items()]
    for draw in range(draws):
        rows.append(Row("calibration", {"of": "margin", "eps": 0.01, "draw": draw}, -2))
        rows.append(Row("calibration", {"of": "risk", "eps": 0.01, "draw": draw}, 0.004 if draw < kept else 0.012))
    return rows


def test_late_positions_rescued() -> None:
    found = halting()["1c"]
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx((0.99 - 0.5) / 0.5)
    assert found.seeds == 3
    assert "from 0.50 at T_train to 0.99 at T*" in found.reason
    plot = found.detail["plots"][0]
    assert [mark.label for mark in plot.marks] == ["T_train", "T*"]
    assert [mark.at for mark in plot.marks] == [24, 30]  # demand 1/2: 12 / .5, and 15 / .5 for words of length 15
    assert [series.name for series in plot.series] == ["all positions", "last position"]


def test_late_positions_not_rescued() -> None:
    found = halting(late=0.6)["1c"]
    assert found.verdict is NOT_SHOWN
    assert found.measured == pytest.approx(0.2)


def test_nothing_to_rescue() -> None:
    found = halting(at_trained=0.985)["1c"]
    assert found.verdict is UNDECIDED
    assert "nothing is left to rescue" in found.reason


def test_the_rule_stops_at_the_best() -> None:
    found = halting()["1d"]
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(0.0)
    assert found.detail["loops_off"]["value"] == 0
    # Demand 1: 1 + ... + 12 loops against 12 x 12; 1/2: twice both; 2: (1 + 1 + 2 + 2 + ... + 6 + 6) against 12 x 6.
    assert found.detail["loops_saved"] == pytest.approx(1 - (78 / 144 + 156 / 288 + 42 / 72) / 3)


def test_the_rule_stops_too_early() -> None:
    found = halting(off=4)["1d"]
    assert found.verdict is NOT_SHOWN
    assert found.measured == pytest.approx(0.49)
    assert found.detail["loops_off"]["value"] == 4


def test_the_rule_near_the_line_is_undecided() -> None:
    # .02 is allowed: .985 against .965 has an interval on both sides of it.
    found = halting(late=0.985, at_trained=0.965, off=1)["1d"]
    assert found.measured == pytest.approx(0.02)
    assert found.verdict is UNDECIDED


@pytest.mark.parametrize(
    ("kept", "loops", "verdict"), [(20, 8.0, SHOWN), (19, 8.0, SHOWN), (18, 8.0, NOT_SHOWN), (20, 12.0, NOT_SHOWN)]
)
def test_a_calibrated_promise(kept: int, loops: float, verdict: Verdict) -> None:
    rule = halting(kept=kept, loops=loops)["1d"]
    found = rule.detail["calibrated"]
    assert rule.verdict is SHOWN  # the published rule is judged by itself
    assert found["verdict"] is verdict
    assert (found["kept"], found["draws"], found["seeds"]) == (3 * kept, 60, 3)
    assert (found["loops"], found["fixed_loops"]) == (loops, 12)
    assert f"in {3 * kept} of 60 calibrations" in rule.reason
    assert {row["worst_risk"] for row in found["rows"]} == {0.004 if kept == 20 else 0.012}


def test_a_promise_that_was_not_measured_is_undecided() -> None:
    found = halting()["1d"].detail["calibrated"]
    assert found["verdict"] is UNDECIDED
    assert "Nothing was calibrated" in found["reason"]


def test_overthinking_and_its_remedy() -> None:
    found = halting()["1e"]
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(0.39)
    remedy = found.detail["remedy"]
    assert remedy["verdict"] is SHOWN
    assert remedy["measured"] == pytest.approx(0.01)
    assert remedy["speed_ratio"]["value"] == pytest.approx(1.0)
    assert remedy["seeds"] == 3


def test_no_overthinking() -> None:
    assert halting(far=0.98)["1e"].verdict is NOT_SHOWN
    assert halting(far=0.94)["1e"].verdict is UNDECIDED


def test_a_remedy_that_does_not_work_or_changes_the_speed() -> None:
    assert halting(far_remedied=0.7)["1e"].detail["remedy"]["verdict"] is NOT_SHOWN
    assert halting(v_remedied=0.75)["1e"].detail["remedy"]["verdict"] is NOT_SHOWN
    assert halting(far_remedied=0.94)["1e"].detail["remedy"]["verdict"] is UNDECIDED


def test_overthinking_that_was_not_watched_far_enough() -> None:
    def come_to(cell: Cell) -> CellResult:
        return result(cell, rows=speed_rows(float(cell.axes["demand"])) + accuracy_rows(12, 13, lambda t: 1.0))

    found = findings(HALTING, HALTING.cells("cpu", groups=("S3",)), come_to)["1e"]
    assert found.verdict is UNDECIDED
    assert "were watched for 13 loops, and 36 are needed" in found.reason
