"""Which trials a study runs on made-up losses: the grid, then what brackets each minimum."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from loopcore.specs import ContractSpec, OptimizerSpec, TextTask, TrainSpec, TrialPoint, TuneSpec
from loopcore.studies.transfer import Trial, transfer_table
from loopcore.studies.transfer_plan import planned

TEXT = TrainSpec(task=TextTask(), contract=ContractSpec(lengths=(32,)), optimizer=OptimizerSpec(decay="linear"))

Losses = Callable[[TrialPoint], float | None]


def study(**values: object) -> TuneSpec:
    return TuneSpec.model_validate({"train": TEXT, "log2_lrs": (-3.0, -4.0, -5.0), "max_trials": 200} | values)


def bowl(**optima: float) -> Losses:
    """Parabolas with the given vertices, by `rule_T`; a tenth of a nat an octave squared."""
    return lambda point: 2.0 + 0.1 * (point.log2_lr - optima[f"{point.rule}_{point.loops}"]) ** 2


def ran(spec: TuneSpec, losses: Losses, *, shuffled: int | None = None, most: int = 500) -> list[TrialPoint]:
    """The points in the order in which they ran: whatever is planned and not done, one after another."""
    done: dict[TrialPoint, Trial] = {}
    stream = random.Random(shuffled)
    while left := [point for point in planned(spec, done) if point not in done]:
        point = left[0] if shuffled is None else stream.choice(left)
        done[point] = Trial(point, losses(point))
        assert len(done) <= most
    return list(done)


def rates(points: list[TrialPoint], rule: str, loops: int) -> list[float]:
    return sorted({point.log2_lr for point in points if (point.rule, point.loops) == (rule, loops)})


def test_a_bracketed_grid_is_not_extended() -> None:
    spec = study()
    points = ran(spec, bowl(standard_1=-4.2, standard_4=-3.8, loop_mup_4=-4.0))
    assert points == list(spec.points())


def test_each_curve_is_extended_until_it_is_bracketed() -> None:
    spec = study()
    losses = bowl(standard_1=-4.0, standard_4=-7.2, loop_mup_4=-2.6)
    points = ran(spec, losses)
    assert rates(points, "standard", 1) == [-5.0, -4.0, -3.0]
    assert rates(points, "standard", 4) == [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0]
    assert rates(points, "loop_mup", 4) == [-5.0, -4.0, -3.0, -2.0]  # 2^-3 is the lowest: -2.6 lies nearer to it
    rows = {(row.rule, row.loops): row for row in transfer_table(spec, [Trial(point, losses(point)) for point in points])}
    assert all(row.bracketed for row in rows.values())
    assert rows["standard", 4].drift_octaves == pytest.approx(-3.2)
    assert rows["loop_mup", 4].drift_octaves == pytest.approx(1.4)
    assert rows["standard", 4].regret == pytest.approx(0.1 * (3.2**2 - 0.2**2))


def test_the_base_s_best_rate_is_tried_on_every_curve() -> None:
    points = ran(study(rules=("standard",)), bowl(standard_1=-7.0, standard_4=-4.0))
    assert rates(points, "standard", 1) == [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0]
    assert -7.0 in rates(points, "standard", 4)  # its regret is measured there


def test_a_coarse_grid_gets_neighbours_an_octave_away() -> None:
    points = ran(study(rules=("standard",), loops=(4,), log2_lrs=(0.0, -4.0, -8.0)), bowl(standard_4=-4.4))
    assert rates(points, "standard", 4) == [-8.0, -5.0, -4.0, -3.0, 0.0]


def test_all_diverged_goes_down() -> None:
    def losses(point: TrialPoint) -> float | None:
        return None if point.log2_lr > -7 else 2.0 + 0.1 * (point.log2_lr + 8) ** 2

    assert rates(ran(study(rules=("standard",), loops=(4,)), losses), "standard", 4) == [float(rate) for rate in range(-9, -2)]


def test_the_limit_holds_and_what_it_leaves_open_is_told() -> None:
    spec = study(rules=("standard",), loops=(1, 4), seeds=(0, 1), max_trials=17)  # the grid has 12
    losses = bowl(standard_1=-4.0, standard_4=-20.0)
    points = ran(spec, losses)
    assert len(points) == 16  # whole rates only: two seeds each
    row = transfer_table(spec, [Trial(point, losses(point)) for point in points])[1]
    assert row.open_because == "the lowest loss is at 2^-7, the smallest learning rate tried"
    assert len(ran(study(rules=("standard",), loops=(1, 4), max_trials=None), losses)) == 12  # twice the grid's 6


def test_rates_end_where_specs_end() -> None:
    points = ran(study(rules=("standard",), loops=(4,), log2_lrs=(3.0, 2.0, 1.0)), bowl(standard_4=9.0))
    assert rates(points, "standard", 4) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("stream", range(5))
def test_the_order_in_which_trials_end_changes_nothing(stream: int) -> None:
    """Hence a study that was killed, and has done some of a round, comes to the same trials."""
    spec = study(seeds=(0, 1))
    losses = bowl(standard_1=-6.1, standard_4=-7.2, loop_mup_4=-2.6)
    assert sorted(ran(spec, losses), key=str) == sorted(ran(spec, losses, shuffled=stream), key=str)


def test_a_round_waits_for_all_of_the_one_before() -> None:
    spec = study(rules=("standard",), loops=(4,))
    some = {point: Trial(point, 2.0 + point.log2_lr) for point in spec.points()[:2]}
    assert planned(spec, some) == spec.points()
