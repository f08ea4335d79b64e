"""Findings 2a to 4b and 6 on made-up measurements whose answers are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from loopcore.studies import STUDIES, Cell, CellResult, Finding, Row, Verdict
from loopcore.studies.recipes import chance
from tests.unit.made_up import SECONDS, accuracy_rows, findings, result, speed_rows, tau_rows

SHOWN, NOT_SHOWN, UNDECIDED = Verdict.SHOWN, Verdict.NOT_SHOWN, Verdict.UNDECIDED
PRIOR, WALLS, PORTABILITY = STUDIES["architecture-prior"], STUDIES["walls"], STUDIES["portability"]
SCHEDULE, EASY = STUDIES["input-schedule"], STUDIES["easy-to-hard"]


def serial(n: int) -> float:
    return float(n)


def scan(n: int) -> float:
    return 1 + math.log2(n)


def prior(
    tied: Callable[[int], float],
    untied: Callable[[int], float],
    scanned: Callable[[int], float] = serial,
    *,
    tied_far: float = 0.9,
    untied_far: float = 0.6,
    untied_a5: float = 0.7,
    untied_steps: int = 5000,
    a5: bool = True,
) -> dict[str, Finding]:
    def come_to(cell: Cell) -> CellResult | None:
        family, of_a5 = cell.axes["family"], cell.axes["group"] == "A5"
        if of_a5 and not a5:
            return None
        loose = str(family).startswith("untied")
        tau = {"free": tied, "scan": scanned}.get(str(family), untied)
        rows = speed_rows(1.0) + tau_rows(cell, tau)
        for length in (16, 32):
            rows += accuracy_rows(length, 8 if loose else 3 * length, lambda t: untied_far if loose else tied_far)
        return result(cell, untied_a5 if loose and of_a5 else 1.0, rows, steps=untied_steps if loose else 2000)

    return findings(PRIOR, PRIOR.cells("cpu"), come_to)


# Squared correlation of n with log2 n over the prefixes 2 .. 8: what a perfect line of one kind leaves the other.
_N, _LOG = range(2, 9), [math.log2(n) for n in range(2, 9)]
OTHER_R2 = (
    sum((n - 5) * (log - sum(_LOG) / 7) for n, log in zip(_N, _LOG, strict=True)) ** 2
    / sum((n - 5) ** 2 for n in _N)
    / sum((log - sum(_LOG) / 7) ** 2 for log in _LOG)
)


def test_the_flip() -> None:
    found = prior(serial, scan)["2a"]
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(2 * (1 - OTHER_R2))  # one margin up, one down
    assert found.seeds == 3
    plots = found.detail["plots"]
    assert len(plots) == 3  # tied, untied at matched depth, untied at matched parameters
    assert [series.name for series in plots[0].series] == ["tau, 90th percentile", "serial, R2 1.000", f"log2, R2 {OTHER_R2:.3f}"]
    assert list(plots[0].series[0].x) == list(_N)
    assert found.detail["rows"][0]["margin"] == pytest.approx(1 - OTHER_R2)


def test_no_flip_where_untied_models_are_serial_too() -> None:
    found = prior(serial, serial)["2a"]
    assert found.verdict is NOT_SHOWN
    assert found.measured == pytest.approx(0.0)


def test_an_untied_model_that_shows_nothing_before_its_last_block() -> None:
    found = prior(serial, lambda n: 8.0)["2a"]
    assert found.verdict is UNDECIDED
    assert found.measured is None
    assert "tau is the same at every position" in found.reason


def test_the_prior_against_addressing() -> None:
    assert prior(serial, scan, serial)["2b"].verdict is SHOWN
    assert prior(serial, scan, serial)["2b"].measured == pytest.approx(1 - OTHER_R2)
    assert prior(serial, scan, scan)["2b"].verdict is NOT_SHOWN
    assert prior(serial, scan, lambda n: 4.0)["2b"].verdict is UNDECIDED


def test_untied_models_extrapolate_worst() -> None:
    found = prior(serial, scan)["2c"]
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(0.3)
    assert found.seeds == 3
    assert "On A5 untied models come to 0.7" in found.reason
    row = next(row for row in found.detail["rows"] if row["cell"].startswith("untied/S3"))
    assert (row["2 N"], row["4 N"]) == (0.6, 0.6)


def test_untied_models_extrapolate_as_well() -> None:
    found = prior(serial, scan, untied_far=0.95)["2c"]
    assert found.verdict is NOT_SHOWN
    assert found.measured == pytest.approx(-0.05)


def test_an_untied_model_that_learns_a5() -> None:
    assert prior(serial, scan, untied_a5=1.0)["2c"].verdict is NOT_SHOWN


def test_an_untied_model_that_was_cut_short_did_not_fail_a5() -> None:
    found = prior(serial, scan, untied_steps=3000)["2c"]
    assert found.verdict is UNDECIDED
    assert "slower, not shown to fail" in found.reason
    assert prior(serial, scan, a5=False)["2c"].verdict is UNDECIDED


def walls(a5: float = 1.0, direct: float = 0.18, first: float = 1.0, scale: str = "cpu", **steps: int) -> dict[str, Finding]:
    def come_to(cell: Cell) -> CellResult:
        family = str(cell.axes["family"])
        accuracy = {"free": a5, "direct": direct, "operator-first": first}[family]
        rows = accuracy_rows(cell.train.contract.longest, 40, lambda t: accuracy) + speed_rows(1.0)
        found = result(cell, accuracy, rows, steps=steps.get(family.replace("-", "_"), 4000))
        return CellResult(
            found.state, SECONDS, found.figures, {"held_out_token_accuracy": [(50, 0.2), (100, accuracy)]}, found.rows
        )

    return findings(WALLS, WALLS.cells(scale), come_to)


def test_a5_generalizes() -> None:
    found = walls()["3a"]
    assert (found.verdict, found.measured, found.seeds) == (SHOWN, 1.0, 3)
    assert walls(a5=0.6)["3a"].verdict is NOT_SHOWN
    assert walls(a5=0.951)["3a"].verdict is UNDECIDED
    assert walls(a5=0.6, scale="smoke")["3a"].verdict is UNDECIDED  # 1500 steps are not what A5 takes


def test_the_wall() -> None:
    at_chance = chance("S5", 6)
    found = walls(direct=at_chance + 0.01)["3b"]
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(0.01 / (1 - at_chance))
    assert (found.low, found.high) == pytest.approx((0.005 / (1 - at_chance), 0.015 / (1 - at_chance)))
    assert found.seeds == 3
    assert "3 of 3 runs at n = 6 are stuck after 4000 steps" in found.reason
    assert walls(direct=0.6)["3b"].verdict is NOT_SHOWN
    assert walls(direct=at_chance + 0.1 * (1 - at_chance))["3b"].verdict is UNDECIDED
    assert walls(scale="smoke")["3b"].verdict is UNDECIDED
    assert "took more steps than these runs had" in walls(operator_first=6000)["3b"].reason


def test_one_seed_that_learns_is_enough_to_break_the_wall() -> None:
    cells = WALLS.cells("cpu")

    def come_to(cell: Cell) -> CellResult:
        accuracy = 0.9 if cell.seed == 1 else 0.18
        return result(cell, accuracy, accuracy_rows(cell.train.contract.longest, 10, lambda t: accuracy))

    found = findings(WALLS, cells, come_to)["3b"]
    assert found.verdict is NOT_SHOWN
    assert "2 of 3 runs" in found.reason


def test_the_curriculum() -> None:
    found = walls()["3c"]
    assert (found.verdict, found.measured, found.seeds) == (SHOWN, 1.0, 3)
    plot = found.detail["plots"][0]
    assert [series.name for series in plot.series] == [
        f"{kind}, seed {seed}" for kind in ("direct", "operator first") for seed in range(3)
    ]
    assert list(plot.series[3].y) == [0.2, 1.0]
    assert walls(first=0.3)["3c"].verdict is NOT_SHOWN
    assert walls(first=0.951)["3c"].verdict is UNDECIDED
    assert walls(first=0.3, scale="smoke")["3c"].verdict is UNDECIDED
    assert walls(first=1.0, scale="smoke")["3c"].verdict is SHOWN


def warm(
    share: float, accuracy: float = 1.0, steps: int = 500, parent_accuracy: float = 1.0, wobble: tuple[float, ...] = (0, 0, 0)
) -> Finding:
    def come_to(cell: Cell) -> CellResult:
        if cell.axes["family"] == "free":
            return result(cell, parent_accuracy, speed_rows(1.0, reach=1e-4), steps=2000)
        v = float(cell.axes["demand"]) ** (share + wobble[cell.seed])
        failed = cell.axes["demand"] == 2.0 and cell.seed == 1
        return result(cell, accuracy if failed else 1.0, speed_rows(v, reach=1e-4), steps=steps if failed else 400)

    return findings(PORTABILITY, PORTABILITY.cells("cpu", groups=("S3",)), come_to)["4a"]


def test_warm_starts() -> None:
    found = warm(0.8)
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(0.8)
    assert found.seeds == 3
    assert (
        "6 of 6 warm starts learn the new contract (S3 to demand 0.5: 3 of 3, v 0.57; S3 to demand 2: 3 of 3, v 1.74)"
        in found.reason
    )
    plot = found.detail["plots"][0]
    assert list(plot.series[0].x) == [1.0, 0.5]
    assert list(plot.series[0].y) == pytest.approx([1.0, 0.5**0.8])


def test_warm_starts_that_keep_the_old_speed() -> None:
    assert warm(0.1).verdict is NOT_SHOWN
    assert warm(0.5, wobble=(0.0, 0.1, -0.1)).verdict is UNDECIDED


def test_a_warm_start_that_does_not_learn() -> None:
    found = warm(0.8, accuracy=0.6, steps=2500)  # longer than its parent took from scratch
    assert found.verdict is NOT_SHOWN
    assert "5 of 6 warm starts" in found.reason
    assert warm(0.8, accuracy=0.6, steps=1500).verdict is UNDECIDED
    assert warm(0.8, parent_accuracy=0.5).verdict is UNDECIDED  # there was nothing to transfer


def schedule(own: float, visible: float | None, free: float = 1.0) -> Finding:
    def come_to(cell: Cell) -> CellResult:
        if cell.axes["family"] == "free":
            return result(cell, free)
        loops = int(cell.axes["loops"])
        rows = [
            Row("schedules", {"schedule": kind, "of": "token", "loop": t}, value if t == loops else 0.0)
            for kind, value in (("streaming", own), ("all", visible))
            if value is not None
            for t in (1, loops)
        ]
        return result(cell, own, rows)

    return findings(SCHEDULE, SCHEDULE.cells("cpu"), come_to)["4b"]


def test_seriality_imposed() -> None:
    found = schedule(own=0.5, visible=0.3)
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(0.5)
    assert found.detail["all_visible"]["value"] == pytest.approx(0.3)
    learned = schedule(own=1.0, visible=0.3)
    assert learned.verdict is NOT_SHOWN
    assert "to 0.3 [0.3, 0.3] with all inputs visible" in learned.reason
    assert schedule(own=0.95, visible=None).verdict is UNDECIDED
    assert "not measured with all inputs visible" in schedule(own=0.95, visible=None).reason
    assert [series.name for series in found.detail["plots"][0].series] == [
        "free training",
        "streaming, own schedule",
        "streaming, all inputs visible",
    ]


def easy(transformer: float, conv: float, trained: float = 1.0) -> Finding:
    def come_to(cell: Cell) -> CellResult:
        hard = int(cell.axes["hard"])
        exact = conv if cell.axes["architecture"] == "recall_conv" else transformer
        rows = speed_rows(2.0) + accuracy_rows(hard, hard, lambda t: exact if t >= hard / 2 else 0.0)
        return result(cell, trained, rows)

    return findings(EASY, EASY.cells("cpu"), come_to)["6"]


def test_easy_to_hard() -> None:
    found = easy(0.2, 0.99)
    assert found.verdict is SHOWN
    assert found.measured == pytest.approx(0.99)
    assert (found.seeds, found.seconds) == (3, 6 * SECONDS)
    assert "looped transformer 16 to 64 bits: 0.2" in found.reason
    assert "recall convnet 16 to 64 bits: 0.99" in found.reason
    assert "0.00 after T_train" in found.reason
    assert [mark.at for mark in found.detail["plots"][1].marks] == [16, 32]
    assert easy(0.2, 0.3).verdict is NOT_SHOWN
    assert easy(0.2, 0.9).verdict is UNDECIDED
    assert easy(0.99, 0.99, trained=0.7).verdict is UNDECIDED
