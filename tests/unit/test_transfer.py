"""Drift and regret on made-up losses whose answers are worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from loopcore.specs import ContractSpec, OptimizerSpec, TextTask, TrainSpec, TrialPoint, TuneSpec
from loopcore.studies.transfer import TransferRow, Trial, transfer_table

TEXT = TrainSpec(task=TextTask(), contract=ContractSpec(lengths=(32,)), optimizer=OptimizerSpec(decay="linear"))
RATES = (-3.0, -4.0, -5.0, -6.0)

# loss by (rule, loops), a value a rate; T = 1 is one run for both rules.
LOSSES: dict[tuple[str, int], tuple[float | None, ...]] = {
    ("standard", 1): (2.4, 2.0, 2.1, 2.3),
    ("standard", 4): (None, 2.9, 2.2, 2.05),
    ("loop_mup", 4): (2.3, 1.96, 1.95, 2.2),
}


def study(**values: object) -> TuneSpec:
    return TuneSpec.model_validate({"train": TEXT, "log2_lrs": RATES} | values)


def trials(spec: TuneSpec, losses: dict[tuple[str, int], tuple[float | None, ...]]) -> list[Trial]:
    return [Trial(point, losses[point.rule, point.loops][RATES.index(point.log2_lr)]) for point in spec.points()]


def table(spec: TuneSpec, found: list[Trial]) -> dict[tuple[str, int], TransferRow]:
    return {(row.rule, row.loops): row for row in transfer_table(spec, found)}


def test_optimum_drift_and_regret() -> None:
    spec = study()
    rows = table(spec, trials(spec, LOSSES))
    assert list(rows) == [("standard", 1), ("standard", 4), ("loop_mup", 1), ("loop_mup", 4)]
    # Both rules begin at the shared run of T = 1: lowest at 2^-4, where the chords to the neighbours have slopes -.1 and +.4.
    for rule in ("standard", "loop_mup"):
        base = rows[rule, 1]
        assert (base.best_log2_lr, base.best_loss, base.drift_octaves, base.regret) == (-4.0, 2.0, 0.0, 0.0)
        assert base.optimum_log2_lr == pytest.approx(-4.5 + 0.1 / 0.5)
        assert (base.bracketed, base.diverged, base.trials) == (True, 0, 4)
    standard = rows["standard", 4]
    assert (standard.best_log2_lr, standard.best_loss) == (-6.0, 2.05)
    assert (standard.optimum_log2_lr, standard.drift_octaves, standard.bracketed) == (None, None, False)
    assert standard.open_because == "the lowest loss is at 2^-6, the smallest learning rate tried"
    assert standard.regret == pytest.approx(2.9 - 2.05)
    assert standard.diverged == 1
    assert standard.losses == ((-6.0, 2.05), (-5.0, 2.2), (-4.0, 2.9), (-3.0, None))
    looped = rows["loop_mup", 4]
    # Lowest at 2^-5; slopes -.25 at -5.5 and +.01 at -4.5: the vertex is .25/.26 of the way.
    assert (looped.best_log2_lr, looped.bracketed) == (-5.0, True)
    assert looped.optimum_log2_lr == pytest.approx(-5.5 + 0.25 / 0.26)
    assert looped.drift_octaves == pytest.approx((-5.5 + 0.25 / 0.26) - (-4.5 + 0.2))
    assert looped.regret == pytest.approx(0.01)
    # One seed says nothing about spread.
    for row in rows.values():
        assert (row.optimum_low, row.optimum_high, row.regret_low, row.regret_high) == (None, None, None, None)
    assert (looped.drift_low, looped.drift_high) == (None, None)


def test_a_rate_at_which_a_seed_diverged_is_no_optimum() -> None:
    spec = study(rules=("loop_mup",), loops=(4,), seeds=(0, 1))
    losses = {(-3.0, 0): 1.0, (-3.0, 1): math.nan, (-4.0, 0): 1.9, (-4.0, 1): 2.1, (-5.0, 0): 2.0, (-5.0, 1): 2.2}
    found = [Trial(p, losses.get((p.log2_lr, p.seed), 3.0)) for p in spec.points()]
    row = table(spec, found)["loop_mup", 4]
    assert (row.best_log2_lr, row.best_loss, row.low, row.high) == (-4.0, 2.0, 1.9, 2.1)
    # What diverged closes the bracket, but there is no parabola through it: the grid's rate, without an interval.
    assert (row.bracketed, row.optimum_log2_lr, row.optimum_low, row.optimum_high) == (True, -4.0, None, None)
    assert (row.diverged, row.trials) == (1, 8)
    assert dict(row.losses)[-3.0] is None


def test_a_base_rate_that_diverges_with_more_loops_has_no_regret_but_is_told() -> None:
    spec = study()
    losses = dict(LOSSES) | {("standard", 4): (None, math.inf, 2.2, 2.3)}
    row = table(spec, trials(spec, losses))["standard", 4]
    assert (row.regret, row.base_diverged, row.diverged) == (None, True, 2)
    assert row.drift_octaves == pytest.approx(-5.0 - -4.3)


def test_nothing_but_divergence_decides_nothing() -> None:
    spec = study()
    none = (None, None, None, None)
    rows = table(spec, trials(spec, dict(LOSSES) | {("standard", 1): none}))
    base = rows["standard", 1]
    assert (base.best_log2_lr, base.best_loss, base.optimum_log2_lr, base.drift_octaves, base.regret) == (None,) * 5
    assert (base.bracketed, base.open_because, base.diverged) == (False, "every learning rate diverged", 4)
    # Without an optimum at the base there is nothing to drift from.
    looped = rows["loop_mup", 4]
    assert (looped.best_log2_lr, looped.drift_octaves, looped.regret) == (-5.0, None, None)


def test_equal_losses_take_the_smaller_rate() -> None:
    spec = study(rules=("standard",), loops=(1,))
    row = table(spec, trials(spec, {("standard", 1): (2.5, 2.0, 2.0, 2.5)}))["standard", 1]
    assert (row.best_log2_lr, row.optimum_log2_lr) == (-5.0, -4.5)


def test_an_unfinished_study_counts_what_there_is() -> None:
    spec = study()
    some = [trial for trial in trials(spec, LOSSES) if trial.point.loops == 1 and trial.point.log2_lr > -6.0]
    rows = table(spec, some)
    assert (rows["standard", 1].trials, rows["standard", 1].best_log2_lr) == (3, -4.0)
    empty = rows["loop_mup", 4]
    assert (empty.trials, empty.best_log2_lr, empty.open_because) == (0, None, "no learning rate has all of its trials")


def test_a_rate_counts_once_all_of_its_seeds_have_run() -> None:
    spec = study(rules=("loop_mup",), loops=(4,), seeds=(0, 1))
    found = [Trial(p, 2.0 + abs(p.log2_lr + 4)) for p in spec.points() if (p.log2_lr, p.seed) != (-4.0, 1)]
    row = table(spec, found)["loop_mup", 4]
    assert [rate for rate, _ in row.losses] == [-6.0, -5.0, -3.0]
    assert row.trials == 7


def test_intervals_are_over_seeds_drawn_together() -> None:
    """Each seed's parabola has its vertex moved by the same shift at both loop counts: the drift is sure."""
    spec = study(rules=("loop_mup",), loops=(2, 4), seeds=(0, 1, 2), log2_lrs=(-2.0, -3.0, -4.0, -5.0, -6.0))
    shift = {0: -0.2, 1: 0.0, 2: 0.2}
    # A mean of parabolas of one width is a parabola about their mean vertex: -4 at T = 2 and -4.25 at T = 4.
    found = [Trial(p, 2.0 + 0.1 * (p.log2_lr + {2: 4.0, 4: 4.25}[p.loops] - shift[p.seed]) ** 2) for p in spec.points()]
    base, row = (table(spec, found)["loop_mup", loops] for loops in (2, 4))
    # Standard error of the mean of -.2, 0, .2 is .2 / sqrt(3); Student's quantile with 2 degrees is 4.3027.
    reach = 4.3027 * 0.2 / math.sqrt(3)
    assert (base.optimum_log2_lr, base.optimum_low, base.optimum_high) == pytest.approx((-4.0, -4.0 - reach, -4.0 + reach), 1e-4)
    assert (row.optimum_low, row.optimum_high) == pytest.approx((-4.25 - reach, -4.25 + reach), 1e-4)
    assert (row.drift_octaves, row.drift_low, row.drift_high) == pytest.approx((-0.25, -0.25, -0.25))
    assert (base.drift_octaves, base.drift_low, base.drift_high) == (0.0, 0.0, 0.0)
    assert (row.regret, row.regret_low, row.regret_high) == (0.0, 0.0, 0.0)  # the same rate is best in every draw


def test_a_row_is_plain_json() -> None:
    spec = study()
    row = transfer_table(spec, trials(spec, LOSSES))[1].to_json()
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["losses"][0] == [-6.0, 2.05]


def test_every_point_of_the_grid_is_somebody_s_work() -> None:
    spec = study()
    assert len(spec.points()) == 3 * len(RATES)
    for rule in spec.rules:
        for rate in RATES:
            shared = spec.stands_for(TrialPoint(rule=rule, loops=1, log2_lr=rate, seed=0))
            assert shared in spec.points()
    # Off the grid the runs of T = 1 are shared too, under the first rule that is not post-norm.
    assert spec.stands_for(TrialPoint(rule="loop_mup", loops=1, log2_lr=-9.0, seed=0)).rule == "standard"
    assert spec.stands_for(TrialPoint(rule="loop_mup", loops=4, log2_lr=-9.0, seed=0)).rule == "loop_mup"
