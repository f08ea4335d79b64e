"""The DeepLoop study: what it runs, and what it says of made-up measurements whose answer is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loopcore.studies import STUDIES, Cell, CellResult, Finding, Row, Verdict, cell_keys
from loopcore.studies.deeploop_runs import seeds_needed
from tests.unit.made_up import SECONDS, findings

DEEPLOOP = STUDIES["deeploop"]
SHOWN, NOT_SHOWN, UNDECIDED = Verdict.SHOWN, Verdict.NOT_SHOWN, Verdict.UNDECIDED
CONSTANT = 3.2  # nats of the best constant prediction


def wobble(cell: Cell) -> float:
    """A small difference between seeds that is 0 in the mean of three and of six."""
    return 0.01 * (cell.seed % 3 - 1)


def one_step(cell: Cell, off: float = 0.0) -> list[Row]:
    """Changes that follow 2 - 4p, 1 - 4p and 1 - 2p, all exponents `off` by as much."""
    p, rows = float(cell.axes["p"]), []
    for update, tied, exponent in (
        ("sgd", True, 2 - 4 * p),
        ("sgd", False, 1 - 4 * p),
        ("sign", True, 1 - 2 * p),
        ("sign", False, 1 - 2 * p),
    ):
        for loops in (1, 2, 4, 8, 16):
            axes = {"of": "logit_change", "loops": loops, "update": update, "tied": tied}
            rows.append(Row("perturbation", axes, 1e-3 * loops ** (exponent + off + wobble(cell))))
    return rows


def plateau(below: float) -> list[Row]:
    return [
        Row("plateau", {"of": "below", "loop": 7}, below, below - 0.02, below + 0.02),
        Row("plateau", {"of": "constant", "loop": 7}, CONSTANT, CONSTANT - 0.02, CONSTANT + 0.02),
    ]


def kappa(cell: Cell, growth: dict[str, float]) -> list[Row]:
    """kappa_R = R^g in both forms, .3 less at the end; the bound is R^g times R (b/a)^2, or times R without a rule's p."""
    rule, loops = str(cell.axes["rule"]), int(cell.axes["loops"])
    step = {"deeploop": 1 / loops, "deepnorm": 1.0}.get(rule, loops)
    rows = []
    for at, g in (("start", growth[rule]), ("end", growth[rule] - 0.3)):
        value = loops ** (g + wobble(cell))
        for form in ("max_normalised", "norm_weighted"):
            rows.append(Row("kappa", {"of": f"{form}_largest", "loops": loops, "at": at}, value))
            rows.append(Row("kappa", {"of": f"{form}_bound", "loops": loops, "at": at}, value * step))
            for block in range(int(cell.axes["blocks"])):
                axes = {"of": form, "block": block, "matrix": "all", "loops": loops, "at": at}
                rows.append(Row("kappa", axes, value + block))
    return rows


def stream(cell: Cell) -> list[Row]:
    rule, rows = str(cell.axes["rule"]), []
    over = {"standard": 1.05, "depth_mup": 0.5, "loop_mup": 0.0, "deepnorm": 0.1, "deeploop": 0.0}[rule]
    for tied, visits in ((True, 1.05), (False, 0.6)):
        rows.append(Row("growth", {"of": "exponent", "tied": tied, "loops": 32}, visits + wobble(cell), visits - 1, visits + 1))
        for loops in (1, 2, 4, 8, 16, 32):
            axes = {"of": "final_displacement", "loops": loops, "tied": tied}
            rows.append(Row("growth", axes, loops ** (over + wobble(cell))))
    return rows


ALIGNED = {"standard": 0.1, "depth_mup": 0.4, "loop_mup": 0.8, "deepnorm": 0.97, "deeploop": 1.0}


def made(
    *,
    off: float = 0.0,
    trains: Callable[[Cell], bool] = lambda cell: cell.axes["p"] != 0.25,
    gain: Callable[[Cell], float] = lambda cell: 0.01 * (int(cell.axes["loops"]) - 1),
    spread: float = 0.0005,
    growth: dict[str, float] = ALIGNED,
) -> Callable[[Cell], CellResult]:
    """`gain`: what deeploop's loss is below standard's; `spread` of it over seeds. The middle rate is the best one."""

    def come_to(cell: Cell) -> CellResult:
        rows: list[Row] = []
        for probe in cell.probes:
            asked = probe.content["instruments"]
            if "perturbation" in asked:
                rows += one_step(cell, off)
            if "plateau" in asked:
                rows += plateau(0.9 if trains(cell) else -0.01)
            if "kappa" in asked:
                rows += kappa(cell, growth)
            if "growth" in asked:
                rows += stream(cell)
        if cell.axes["family"] == "sweep":
            loss = CONSTANT - (0.9 if trains(cell) else -0.01)
        else:
            rate = 0.0 if cell.axes["rate"] == 0.01 else 0.2
            loss = 2.0 + rate - (gain(cell) + spread * (cell.seed - 1) if cell.axes["rule"] == "deeploop" else 0.0)
        return CellResult(
            "succeeded", SECONDS, {"outcome": "finished", "loss": loss, "steps": cell.train.steps}, rows=tuple(rows)
        )

    return come_to


def said(come_to: Callable[[Cell], CellResult | None], scale: str = "cpu", seeds: int | None = None) -> dict[str, Finding]:
    found = findings(DEEPLOOP, DEEPLOOP.cells(scale, seeds=seeds), come_to)
    for finding in found.values():
        finding.to_json()
    return found


def test_the_plan_on_a_cpu() -> None:
    cells = DEEPLOOP.cells("cpu")
    assert len(set(cell_keys(cells).values())) == len(cells)
    by_family = {family: [c for c in cells if c.axes["family"] == family] for family in ("sweep", "loops", "blocks")}
    assert sum(map(len, by_family.values())) == len(cells)
    # 4 exponents x 2 warm-ups x 6 seeds; 5 rules x 4 R x 3 seeds at 100 and at 300 steps, there with two more rates of two rules.
    assert len(by_family["sweep"]) == 48
    assert len(by_family["loops"]) == 60 + 60 + 2 * 4 * 2 * 3
    assert len(by_family["blocks"]) == 15
    assert {cell.train.scaling.exponent for cell in by_family["sweep"]} == {0.25, 0.35, 0.5, 0.6}
    assert {cell.train.scaling.rule for cell in by_family["loops"]} == {
        "standard",
        "depth_mup",
        "loop_mup",
        "deepnorm",
        "deeploop",
    }
    # Half of an hour of two cores: the rest is for probes and for starting jobs.
    assert sum(cell.expected_s or 0 for cell in cells) < 3600
    assert sum(cell.expected_s or 0 for cell in DEEPLOOP.cells("smoke")) < 120
    assert {cell.seed for cell in DEEPLOOP.cells("cpu", seeds=2)} == {0, 1}


def test_what_follows_the_paper_is_shown() -> None:
    found = said(made())
    assert {id: finding.verdict for id, finding in found.items()} == {f"D{n}": SHOWN for n in range(1, 9)}
    assert found["D1"].measured == pytest.approx(0.0, abs=1e-6)
    assert found["D1"].seeds == 6
    assert found["D3"].measured == pytest.approx(1.0)
    assert found["D4"].measured == pytest.approx(0.0, abs=1e-6)  # g - 1 at the start, below it later
    assert found["D6"].measured == pytest.approx(1.0)  # 6 of 6 against 0 of 6
    assert found["D6"].low == pytest.approx(1 - 2**0.5 * 0.3903, abs=1e-3)  # Wilson of 0/6 reaches .3903
    assert found["D7"].measured == pytest.approx(0.0, abs=1e-9)
    assert found["D8"].measured == pytest.approx(0.01)
    rows = {(row["rule"], row["loops"]): row for row in found["D8"].detail["best_rates"]}
    assert rows["deeploop", 7]["rate"] == 0.01
    assert rows["deeploop", 7]["at_edge"] is False
    assert {row["block"] for row in found["D3"].detail["blocks"]} == {0, 1}
    assert all(finding.seconds > 0 for finding in found.values())


def test_exponents_that_are_elsewhere_are_not_shown() -> None:
    found = said(made(off=0.3))
    assert found["D1"].verdict is NOT_SHOWN
    assert found["D1"].measured == pytest.approx(0.3)
    assert found["D2"].verdict is NOT_SHOWN
    assert said(made(off=0.145))["D1"].verdict is UNDECIDED  # the interval reaches over .15


def test_visits_that_do_not_align() -> None:
    found = said(made(growth=ALIGNED | {"deeploop": 0.5, "deepnorm": 0.0}))
    assert found["D3"].verdict is NOT_SHOWN
    assert found["D3"].measured == pytest.approx(0.5)
    row = next(row for row in found["D3"].detail["growth"] if (row["rule"], row["steps"]) == ("deeploop", 0))
    assert row["implied_p"] == pytest.approx(0.375)
    assert found["D4"].verdict is NOT_SHOWN  # the bound of DeepNorm does not grow


def test_losses_that_differ_more_by_seed_than_by_rule_decide_nothing() -> None:
    found = said(made(spread=0.02))
    assert found["D7"].verdict is UNDECIDED
    assert found["D8"].verdict is UNDECIDED
    # Differences of -.02, 0 and .02: t(.95, n - 1) .02 / sqrt(n) <= .005 from n = 64 on (t = 1.998).
    assert "0.02 nats over seeds" in found["D7"].reason
    assert "about 64 seeds" in found["D7"].reason
    assert "3 were run" in found["D7"].reason


def test_a_loss_at_one_loop_is_not_neutral() -> None:
    found = said(made(gain=lambda cell: 0.05 + 0.002 * ((cell.seed + int(cell.axes["loops"])) % 3 - 1)))
    assert found["D7"].verdict is NOT_SHOWN
    assert found["D8"].verdict is UNDECIDED  # better everywhere, by as much everywhere: the slope is about 0


def test_a_plateau_is_a_failure_and_so_is_a_divergence() -> None:
    def come_to(cell: Cell) -> CellResult:
        result = made(trains=lambda cell: cell.seed > 0)(cell)
        if cell.axes.get("p") == 0.25 and cell.seed == 1:
            return CellResult("succeeded", SECONDS, {"outcome": "diverged", "loss": None})
        return result

    found = said(come_to)["D6"]
    rows = {(row["p"], row["warmup"]): row for row in found.detail["shares"]}
    assert (rows[0.25, 20]["trained"], rows[0.25, 20]["plateau"], rows[0.25, 20]["diverged"]) == (4, 1, 1)
    assert (rows[0.5, 20]["trained"], rows[0.5, 20]["plateau"], rows[0.5, 20]["diverged"]) == (5, 1, 0)
    assert found.verdict is UNDECIDED  # 5 of 6 against 4 of 6
    assert "8 sit on a plateau" in found.reason
    assert "2 diverged" in found.reason


def test_fewer_than_six_seeds_are_no_share() -> None:
    found = said(made(), seeds=3)["D6"]
    assert found.verdict is UNDECIDED
    assert "3 seeds are too few" in found.reason


@pytest.mark.parametrize("scale", ["smoke", "cpu", "gpu"])
def test_nothing_decides_nothing(scale: str) -> None:
    found = said(lambda cell: None, scale)
    assert {finding.verdict for finding in found.values()} == {UNDECIDED}
    assert all(finding.measured is None for finding in found.values())


def test_one_seed_has_no_interval() -> None:
    assert {finding.verdict for finding in said(made(), "smoke", seeds=1).values()} == {UNDECIDED}


@pytest.mark.parametrize(("spread", "effect", "seeds"), [(0.02, 0.005, 64), (0.002, 0.01, 3), (0.0, 0.01, 2)])
def test_seeds_needed(spread: float, effect: float, seeds: int) -> None:
    """t .975: 1.998 at 63 degrees, 1.9983 at 62 (63 seeds: .00504); 12.7 at 1, 4.30 at 2."""
    assert seeds_needed(spread, effect) == seeds
