"""Growth of the residual stream: by hand on a linear stream, as published at initialisation, and flat under loop_mup."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from loopcore.errors import Undecided
from loopcore.instruments.depth import Depth, reshaped, start_of
from loopcore.instruments.growth import GrowthCurve, GrowthResult, measure_growth, sweep_displacement, sweep_growth
from loopcore.instruments.visits import Activation, watch_calls
from tests.unit.noise import Noise, noise_spec

TASK = Noise()


def test_a_curve_by_hand() -> None:
    """Displacement, norm and cosine of every visit, from states that were written down by other means."""
    spec = reshaped(noise_spec(blocks=2, injection="linear"), loops=3)
    model, tokens_BN, _ = start_of(spec, TASK, "cpu")
    curve = measure_growth(model, tokens_BN, loops=3)

    with torch.no_grad():
        e_BPD = model.embed(tokens_BN)
        h_BPD, increments, states = e_BPD, [], []
        for t in range(3):
            h_BPD = model.inject(h_BPD, e_BPD, t)
            for block in model.blocks:
                after_BPD = block(h_BPD, model.sight(h_BPD.shape[1], h_BPD.device, t))
                increments.append(after_BPD - h_BPD)
                states.append(h_BPD := after_BPD)

    def size(x: Tensor) -> float:
        return float(x.pow(2).sum(-1).mean().sqrt())

    assert curve.depth == Depth(2, 3)
    assert curve.displacement == pytest.approx([size(state - e_BPD) for state in states], rel=1e-5)
    assert curve.norm == pytest.approx([size(state) for state in states], rel=1e-5)
    cosines = [(a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)) for a, b in itertools.pairwise(increments)]
    assert curve.cosine == pytest.approx([float(cosine.mean()) for cosine in cosines], abs=1e-5)


def test_a_shared_block_grows_linearly_and_distinct_ones_by_the_root() -> None:
    """As published for any width: 1.06-1.08 with cosines of .98 and more, against .59-.60 with cosines of 0."""
    shared = sweep_growth(noise_spec(), TASK, loops=16, seeds=(0, 1, 2))
    distinct = sweep_growth(noise_spec(tied=False), TASK, loops=16, seeds=(0, 1, 2))
    assert shared.fit.exponent == pytest.approx(1.05, abs=0.12)
    assert distinct.fit.exponent == pytest.approx(0.55, abs=0.1)
    assert shared.fit.low is not None
    assert distinct.fit.high is not None
    assert distinct.fit.high < shared.fit.low
    assert shared.cosine[0] > 0.95
    assert abs(distinct.cosine[0]) < 0.05


def test_loop_mup_is_free_of_depth_and_standard_linear_in_loops() -> None:
    sweeps = {
        rule: sweep_displacement(noise_spec(rule), TASK, blocks=(1, 2, 4), loops=(2, 4, 8), seeds=(0, 1))
        for rule in ("standard", "depth_mup", "loop_mup")
    }
    for at in (1, 2, 4):
        assert sweeps["standard"].exponent("loops", at).exponent == pytest.approx(1.0, abs=0.12)
        assert sweeps["depth_mup"].exponent("loops", at).exponent == pytest.approx(0.5, abs=0.1)
        assert sweeps["loop_mup"].exponent("loops", at).exponent == pytest.approx(0.0, abs=0.08)
    for at in (2, 4, 8):
        assert sweeps["standard"].exponent("blocks", at).exponent == pytest.approx(0.55, abs=0.15)
        for rule in ("depth_mup", "loop_mup"):
            assert sweeps[rule].exponent("blocks", at).exponent == pytest.approx(0.0, abs=0.1)


def test_distinct_blocks_are_flat_under_the_root() -> None:
    sweep = sweep_displacement(noise_spec("depth_mup", tied=False), TASK, loops=(2, 4, 8, 16), seeds=(0, 1))
    assert abs(sweep.exponent("loops", 1).exponent) < 0.1


def test_every_visit_is_seen_and_named() -> None:
    for tied in (True, False):
        spec = reshaped(noise_spec(tied=tied, blocks=2, injection="linear"), loops=3)
        model, tokens_BN, _ = start_of(spec, TASK, "cpu")
        seen: list[Activation] = []
        with watch_calls(model, lambda activation, _before, _after, seen=seen: seen.append(activation)):
            model(tokens_BN, 3)
        assert [found for found in seen if found.name == "block"] == [
            Activation("block", block, visit) for visit in range(3) for block in range(2)
        ]
        assert [found for found in seen if found.name == "injection"] == [Activation("injection", None, t) for t in range(3)]
        assert seen[-1] == Activation("readout", None, None)
        assert len(set(seen)) == len(seen) == 3 + 1 + 2 * 3 * 9


def test_watching_ends_with_the_block() -> None:
    model, tokens_BN, _ = start_of(reshaped(noise_spec(), loops=2), TASK, "cpu")
    seen: list[Any] = []
    with watch_calls(model, lambda *call: seen.append(call)):
        pass
    model(tokens_BN, 2)
    assert seen == []


def test_one_visit_has_no_exponent() -> None:
    result = sweep_growth(noise_spec(), TASK, loops=1, seeds=(0,))
    with pytest.raises(Undecided, match="at least 3 different points"):
        _ = result.fit
    with pytest.raises(Undecided, match="at least 2 visits"):
        _ = result.cosine
    assert {row["axes"]["of"] for row in result.rows()} == {"displacement", "norm"}
    assert "at least 3" in json.loads(json.dumps(result.to_json(), allow_nan=False))["exponent"]


def test_rows_and_json() -> None:
    curves = tuple(
        GrowthCurve(Depth(1, 4), tuple(scale * v for v in (1.0, 2.0, 3.0, 4.0)), (5.0, 5.5, 6.0, 6.5), (cosine, cosine, cosine))
        for scale, cosine in ((1.0, 0.9), (2.0, 1.0))
    )
    result = GrowthResult((0, 1), curves, tied=True, rule="standard")
    rows = result.rows()
    assert len(rows) == 4 + 4 + 3 + 1 + 1
    by_name = {row["axes"]["of"]: row for row in rows}
    assert by_name["exponent"]["value"] == pytest.approx(1.0)
    assert by_name["mean_cosine"]["value"] == pytest.approx(0.95)
    assert by_name["displacement"]["value"] == pytest.approx(6.0)  # the last visit: 4 and 8
    assert by_name["displacement"]["axes"] == {
        "of": "displacement", "visit": 4, "rule": "standard", "tied": True, "blocks": 1, "loops": 4,
    }  # fmt: skip
    content = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert content["exponent"]["exponent"] == pytest.approx(1.0)
    assert content["curves"][1]["displacement"] == [2.0, 4.0, 6.0, 8.0]
