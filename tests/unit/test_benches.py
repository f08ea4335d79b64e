"""The arithmetic of benches, on seconds that are made up, and that the block they time against computes what ours does."""

from __future__ import annotations

import pytest
import torch

from loopcore.benches import BenchAsk
from loopcore.benches.figures import heads_of, median, ratio
from loopcore.benches.plain import PlainRun
from loopcore.benches.train import SIZES, fastest, figures_of, spec_at
from loopcore.errors import InputError
from loopcore.model import LoopedTransformer
from loopcore.tasks import load_task
from loopcore.training import Training

CPU = torch.device("cpu")


def test_a_ratio_is_taken_pair_by_pair() -> None:
    found = ratio("r", slow=[2.0, 30.0, 8.0], fast=[1.0, 10.0, 2.0], against="x")
    assert (found.value, found.low, found.high) == (3.0, 2.0, 4.0)  # of medians it would be 8 / 2
    assert (found.unit, found.against) == ("times", "x")


def test_a_ratio_needs_a_pair_for_every_round() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio("r", slow=[1.0, 2.0], fast=[1.0], against="")


def test_the_median_of_an_even_number_lies_between_the_two_in_the_middle() -> None:
    found = median("m", [8.0, 1.0, 3.0, 4.0], "s")
    assert (found.value, found.low, found.high) == (3.5, 1.0, 8.0)


def test_the_fastest_way_is_that_of_the_smallest_median() -> None:
    assert fastest({"a": [1.0, 5.0, 5.0], "b": [3.0, 4.0, 9.0]}) == "b"


@pytest.mark.parametrize(("width", "narrowest", "heads"), [(256, 32, 8), (65, 32, 1), (96, 16, 6), (100, 16, 5), (8, 16, 1)])
def test_heads_divide_every_width(width: int, narrowest: int, heads: int) -> None:
    assert heads_of(width, narrowest) == heads


@pytest.mark.parametrize("wrong", [{"widths": (64, 0)}, {"rounds": 0}, {"threads": -1}])
def test_nothing_is_timed_on_less_than_one(wrong: dict) -> None:
    with pytest.raises(InputError, match="at least 1"):
        BenchAsk(**wrong)


def test_figures_of_training_are_those_of_the_faster_plain_block_and_the_fastest_way() -> None:
    """d 16, batch 2, n 8, T 2: 16 positions, 6 x 16 x (12 x 256 x 2 + 16 x 2) = 592,896 FLOPs a step."""
    seconds = {
        "plain_fp32": [0.4, 0.6],
        "plain_bf16": [0.3, 0.4],
        "training_fp32": [0.2, 0.2],
        "packed_bf16": [0.1, 0.1],
    }
    ceilings = {"fp32": [1.0, 1.0], "bf16": [11_857_920.0, 5_928_960.0]}
    made = figures_of(16, seconds, ceilings, spec_at(16, SIZES["smoke"]), SIZES["smoke"], CPU)
    found = {figure.name: (figure.value, figure.low, figure.high) for figure in made}
    assert found["ratio_eager_d16"] == pytest.approx((3.5, 3.0, 4.0))
    assert found["ratio_eager_fp32_d16"] == pytest.approx((2.5, 2.0, 3.0))
    assert found["ratio_training_d16"] == pytest.approx((1.75, 1.5, 2.0))
    assert found["ceiling_share_d16"] == pytest.approx((0.75, 0.5, 1.0))
    assert found["tokens_per_second_plain_fp32_d16"] == pytest.approx((100 / 3, 80 / 3, 40.0))
    assert found["ceiling_bf16_d16"] == pytest.approx((0.00889344, 0.00592896, 0.01185792))


def test_the_plain_block_does_the_work_of_ours() -> None:
    """With the same weights it gives the same loss and the same step: no more and no less is computed."""
    spec = spec_at(16, SIZES["smoke"], "fp32")
    ours, plain = Training(spec, device="cpu"), PlainRun(spec, load_task(spec.task), CPU, bf16=False)
    assert isinstance(ours.model, LoopedTransformer)
    block = ours.model.blocks[0]
    with torch.no_grad():
        plain.model.embedding.weight.copy_(ours.model.embedding_VD)
        plain.model.qkv.weight.copy_(torch.cat([block.query.weight, block.key.weight, block.value.weight]))  # pyright: ignore
        for name in ("out", "up", "down"):
            getattr(plain.model, name).weight.copy_(getattr(block, name).weight)
        plain.model.readout.weight.copy_(ours.model.readout_matrix.weight)
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (ours.model, plain.model)]
    assert sizes[0] == sizes[1]
    tokens = torch.randint(0, 2, (3, 8), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain.model(tokens, 2), ours.model(tokens, 2), rtol=1e-5, atol=1e-5)
    assert plain.step() == pytest.approx(ours.step()["loss"], rel=1e-5)
