"""Drift and regret on made-up losses whose answers are worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from loopcore.specs import ContractSpec, OptimizerSpec, TextTask, TrainSpec, TuneSpec
from loopcore.specs.tune import TrialPoint
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
    # Both rules begin at the shared run of T = 1: optimum 2^-4.
    for rule in ("standard", "loop_mup"):
        base = rows[rule, 1]
        assert (base.optimum_log2_lr, base.best_loss, base.drift_octaves, base.regret) == (-4.0, 2.0, 0.0, 0.0)
        assert (base.at_edge, base.diverged, base.trials) == (False, 0, 4)
    standard = rows["standard", 4]
    assert (standard.optimum_log2_lr, standard.best_loss, standard.drift_octaves) == (-6.0, 2.05, -2.0)
    assert standard.regret == pytest.approx(2.9 - 2.05)
    assert standard.at_edge
    assert standard.diverged == 1
    assert standard.losses == ((-6.0, 2.05), (-5.0, 2.2), (-4.0, 2.9), (-3.0, None))
    looped = rows["loop_mup", 4]
    assert (looped.optimum_log2_lr, looped.drift_octaves, looped.at_edge) == (-5.0, -1.0, False)
    assert looped.regret == pytest.approx(0.01)


def test_a_rate_at_which_a_seed_diverged_is_no_optimum() -> None:
    spec = study(rules=("loop_mup",), loops=(4,), seeds=(0, 1))
    losses = {(-3.0, 0): 1.0, (-3.0, 1): math.nan, (-4.0, 0): 1.9, (-4.0, 1): 2.1, (-5.0, 0): 2.0, (-5.0, 1): 2.2}
    found = [Trial(p, losses.get((p.log2_lr, p.seed), 3.0)) for p in spec.points()]
    row = table(spec, found)["loop_mup", 4]
    assert (row.optimum_log2_lr, row.best_loss, row.low, row.high) == (-4.0, 2.0, 1.9, 2.1)
    assert (row.diverged, row.trials) == (1, 8)
    assert dict(row.losses)[-3.0] is None


def test_a_base_rate_that_diverges_with_more_loops_has_no_regret_but_is_told() -> None:
    spec = study()
    losses = dict(LOSSES) | {("standard", 4): (None, math.inf, 2.2, 2.05)}
    row = table(spec, trials(spec, losses))["standard", 4]
    assert (row.regret, row.base_diverged, row.diverged) == (None, True, 2)
    assert row.drift_octaves == -2.0


def test_nothing_but_divergence_decides_nothing() -> None:
    spec = study()
    none = (None, None, None, None)
    rows = table(spec, trials(spec, dict(LOSSES) | {("standard", 1): none}))
    base = rows["standard", 1]
    assert (base.optimum_log2_lr, base.best_loss, base.drift_octaves, base.regret, base.at_edge) == (
        None,
        None,
        None,
        None,
        False,
    )
    assert base.diverged == 4
    # Without an optimum at the base there is nothing to drift from.
    assert (rows["standard", 4].optimum_log2_lr, rows["standard", 4].drift_octaves, rows["standard", 4].regret) == (
        -6.0,
        None,
        None,
    )


def test_equal_losses_take_the_smaller_rate() -> None:
    spec = study(rules=("standard",), loops=(1,))
    row = table(spec, trials(spec, {("standard", 1): (2.5, 2.0, 2.0, 2.5)}))["standard", 1]
    assert row.optimum_log2_lr == -5.0


def test_an_unfinished_study_counts_what_there_is() -> None:
    spec = study()
    some = [trial for trial in trials(spec, LOSSES) if trial.point.loops == 1 and trial.point.log2_lr > -6.0]
    rows = table(spec, some)
    assert (rows["standard", 1].trials, rows["standard", 1].optimum_log2_lr) == (3, -4.0)
    assert (rows["loop_mup", 4].trials, rows["loop_mup", 4].optimum_log2_lr, rows["loop_mup", 4].at_edge) == (0, None, False)


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
