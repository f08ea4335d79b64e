"""The coordinate check: sizes by hand, every visit there, slopes of known streams, muP against no scaling of width."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from loopcore.errors import InputError, Undecided
from loopcore.instruments.coordinates import CoordinateCheck, activation_sizes, check_coordinates
from loopcore.instruments.depth import reshaped, start_of
from loopcore.instruments.fits import PowerFit
from loopcore.instruments.visits import Activation, cross_entropy
from loopcore.optim import make_optimizer
from loopcore.specs import TrainSpec
from tests.unit.noise import Noise, noise_spec

TASK = Noise()
LOGITS = Activation("logits", None, None)


def fast(spec: TrainSpec, **changes: Any) -> TrainSpec:
    """At a learning rate that shows in a step."""
    return reshaped(spec, **changes).model_copy(update={"optimizer": spec.optimizer.model_copy(update={"lr": 2.0**-5})})


def test_sizes_by_hand() -> None:
    spec = reshaped(noise_spec("loop_mup", blocks=2), loops=3, width=64)
    model, tokens_BN, _ = start_of(spec, TASK, "cpu")
    sizes = activation_sizes(model, tokens_BN, 3)
    assert len(sizes) == 2 + 2 * 3 * 9  # embedding and logits; six matrices, two norms and the block itself
    with torch.no_grad():
        states = model(tokens_BN, 3, trace=True).states
        assert sizes[Activation("embedding", None, None)] == pytest.approx(float(states[0].abs().mean()))
        for t in range(3):
            assert sizes[Activation("block", 1, t)] == pytest.approx(float(states[t + 1].abs().mean()))
        sight = model.sight(states[0].shape[1], states[0].device, 2)
        middle_BPD = model.blocks[0](states[2], sight)
        assert sizes[Activation("block", 0, 2)] == pytest.approx(float(middle_BPD.abs().mean()))
        block: Any = model.blocks[1]
        query_BPD = block.query(block.norm_attention(middle_BPD))
        assert sizes[Activation("query", 1, 2)] == pytest.approx(float(query_BPD.abs().mean()))
        logits = 0.5 * model.readout_matrix(torch.nn.functional.layer_norm(states[3][:, 1:], (64,)))  # m = 2
        assert sizes[LOGITS] == pytest.approx(float(logits.abs().mean()))


def test_sizes_after_two_steps_are_those_of_training_by_hand() -> None:
    spec = fast(noise_spec(), loops=2)
    check = check_coordinates(spec, TASK, axis="loops", values=(2,), steps=2, seeds=(3,))
    model, tokens_BN, _ = start_of(reshaped(spec, seed=3), TASK, "cpu")
    optimizer = make_optimizer(model, spec)
    for index in range(2):
        batch = TASK.random_batch(seed=3, split="train", index=index, size=8, length=12)
        optimizer.zero_grad()
        cross_entropy(batch.targets)(model(batch.tokens, 2)).backward()
        optimizer.step()
    for activation, size in activation_sizes(model, tokens_BN, 2).items():
        assert check.size(activation, 2, 2) == (pytest.approx(size),)


def test_slopes_of_known_streams() -> None:
    """Sizes w^1 for one activation, and one that only larger models have."""
    grows, late = Activation("block", 0, 0), Activation("block", 0, 1)
    sizes = {
        grows: {(w, 0): (float(w), 2.0 * w) for w in (1, 2, 4, 8)},
        late: {(w, 0): (w**0.5, w**0.5) for w in (2, 4, 8)},
        LOGITS: {(w, 0): (0.0, 0.0) for w in (1, 2, 4, 8)},
        Activation("query", 0, 3): {(8, 0): (1.0, math.inf)},
    }
    check = CoordinateCheck("loops", (1, 2, 4, 8), 0, (0, 1), "standard", False, sizes)
    assert check.slope(grows, 0).exponent == pytest.approx(1.0)
    assert check.slope(late, 0).exponent == pytest.approx(0.5)
    # The last visit: 1 at one loop, the square root above.
    last = Activation("block", "last", "last")
    assert check.size(last, 1, 0) == (1.0, 2.0)
    assert check.size(last, 4, 0) == (2.0, 2.0)
    with pytest.raises(Undecided, match="positive, finite"):
        check.slope(LOGITS, 0)
    with pytest.raises(Undecided, match="at least 3 different points, got 1"):
        check.slope(Activation("query", 0, 3), 0)
    found = {activation: slope for activation, _, slope in check.slopes()}
    assert set(found) == {grows, late, LOGITS, last}
    assert isinstance(found[LOGITS], str)
    rows = check.rows()
    assert sum(row["axes"]["of"] == "size" for row in rows) == 4 + 3 + 4  # what is not finite has no row
    assert [row["axes"]["activation"] for row in rows if row["axes"]["of"] == "slope"] == ["block", "block", "block"]
    content = json.loads(json.dumps(check.to_json(), allow_nan=False))
    assert [entry["by_seed"] for entry in content["sizes"] if entry["name"] == "query"] == [[1.0, None]]


def test_loops_show_in_the_visits_and_not_in_the_first_one() -> None:
    standard = check_coordinates(fast(noise_spec()), TASK, axis="loops", values=(2, 4, 8), steps=1, seeds=(0, 1))
    scaled = check_coordinates(fast(noise_spec("loop_mup")), TASK, axis="loops", values=(2, 4, 8), steps=1, seeds=(0, 1))
    last, first = Activation("block", "last", "last"), Activation("block", 0, 0)
    assert standard.slope(last, 0).exponent > 0.6
    assert standard.slope(first, 0).exponent == pytest.approx(0.0, abs=1e-6)  # all that the first visit would have told
    for step in (0, 1):
        assert abs(scaled.slope(last, step).exponent) < 0.15
    visits = {activation.visit for activation in scaled.sizes if activation.name == "down"}
    assert visits == set(range(8))


def test_blocks_are_flat_under_loop_mup() -> None:
    check = check_coordinates(fast(noise_spec("loop_mup"), loops=2), TASK, axis="blocks", values=(1, 2, 4), steps=1, seeds=(0, 1))
    last = Activation("block", "last", "last")
    for step in (0, 1):
        assert abs(check.slope(last, step).exponent) < 0.15
    assert {activation.block for activation in check.sizes if activation.name == "up"} == {0, 1, 2, 3}


def test_width_is_flat_under_mup_and_grows_without() -> None:
    """After one Adam step the branches' outputs grow with the width unless the learning rate falls with it."""
    slopes: dict[bool, float] = {}
    for control in (False, True):
        check = check_coordinates(
            fast(noise_spec(readout_init="zero"), loops=2),
            TASK,
            axis="width",
            values=(32, 64, 128),
            steps=2,
            seeds=(0, 1),
            control=control,
        )
        assert check.size(LOGITS, 32, 0) == (0.0, 0.0)
        slope = check.slope(Activation("block", 0, 1), 2)
        assert isinstance(slope, PowerFit)
        slopes[control] = slope.exponent
        assert {row["axes"].get("control") for row in check.rows()} == ({True} if control else {None})
    assert abs(slopes[False]) < 0.2
    assert slopes[True] > slopes[False] + 0.25


def test_the_table_is_the_same_again() -> None:
    spec = fast(noise_spec(), loops=2)
    one, two = (check_coordinates(spec, TASK, axis="width", values=(64, 32), steps=1, seeds=(0,)) for _ in range(2))
    assert one == two
    assert one.values == (32, 64)


def test_arguments_out_of_range() -> None:
    with pytest.raises(InputError, match="at least one value"):
        check_coordinates(noise_spec(), TASK, axis="loops", values=())
    with pytest.raises(InputError, match=r"set scaling\.rule"):
        check_coordinates(noise_spec(), TASK, axis="loops", values=(1, 2), control=True)
    with pytest.raises(InputError, match="head width 16"):
        check_coordinates(noise_spec(), TASK, axis="width", values=(40,))
