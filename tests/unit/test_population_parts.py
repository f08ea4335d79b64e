"""The parts of a population: its AdamW, layout, clipping and attention, and the choice whether to pack."""

from __future__ import annotations

import math

import pytest
import torch

from loopcore.block import attend
from loopcore.errors import InputError
from loopcore.population import Member, faster_packed
from loopcore.population.layout import Layout, Storage
from loopcore.population.optimizer import AdamW, Due, clip
from loopcore.training import Training
from tests.unit.populations import PRE, apart, outline, specs


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("way", ["row_by_row", "all_rows"])
def test_adamw_is_torchs_for_every_member(way: str) -> None:
    """Against one torch.optim.AdamW a member: other rates and decays, members out of order, later loops without gradient."""
    of_members = specs(4, rules=PRE, model={"tied": False}, contract={"lengths": [3]})
    members, references = [Member(spec) for spec in of_members], [Training(spec) for spec in of_members]
    layout = Layout(members[0].model)  # pyright: ignore[reportArgumentType]
    storage = Storage.empty(layout, len(members), torch.device("cpu"))
    for row, member in enumerate(members):
        member.move_into(storage, row)
    optimizer = AdamW(storage, members)
    generator = torch.Generator().manual_seed(0)
    for taking_part in ([0, 1, 2, 3], [3, 1], [0, 1, 2, 3], [2, 0, 1]):
        due = [Due(m, 0.5 + 0.1 * m, loops=1 + m % 3) for m in taking_part]
        grads_RC = torch.randn(len(due), layout.columns, generator=generator)
        for (m, factor, loops), grad_C in zip(due, grads_RC, strict=True):
            stretch = {place.name: layout.stretches[place.stretch] for place in layout.places}
            views = layout.views(grad_C)
            for name, parameter in references[m].model.named_parameters():
                parameter.grad = views[name].clone() if stretch[name].loop < loops else None
            for group in references[m].optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
            references[m].optimizer.step()
        with torch.no_grad():
            getattr(optimizer, way)(due, grads_RC)
    for member, reference in zip(members, references, strict=True):
        assert apart(reference.model, member.model) < 1e-6
        found, expected = member.state_dict()["optimizer"], reference.state_dict()["optimizer"]
        assert outline(found) == outline(expected)
        for name, moments in expected.items():
            for key, value in moments.items():
                torch.testing.assert_close(found[name][key], value, rtol=1e-5, atol=1e-9)


def test_columns_of_a_layout() -> None:
    """Width 16, Z3, two loops of one untied block: sizes by hand."""
    spec = specs(1, task={"kind": "word", "group": "Z3"}, model={"tied": False, "untied_loops": 2}, contract={"lengths": [2]})[0]
    layout = Layout(Training(spec).model)  # pyright: ignore[reportArgumentType]
    sizes = [(stretch.group, stretch.loop, stretch.stop - stretch.start) for stretch in layout.stretches]
    block = 4 * 16 * 16 + 2 * 16 * 64  # Q, K, V, O, and the feed-forward there and back
    assert sizes == [
        ("embedding", 0, 4 * 16),  # three elements and BOS
        ("hidden", 0, block),
        ("hidden", 1, block),
        ("vector", 0, 4 * 16),
        ("vector", 1, 4 * 16),
        ("injection", 0, 32 * 16),
        ("injection", 1, 32 * 16),
        ("readout", 0, 16 * 3),
    ]
    assert layout.columns == sum(size for _, _, size in sizes)
    row_C = torch.arange(layout.columns, dtype=torch.float32)
    views, stacked = layout.views(row_C), layout.stacked(torch.stack([row_C, -row_C]))
    for name, view in views.items():
        assert torch.equal(stacked[name][0], view)
        assert torch.equal(stacked[name][1], -view)


def test_gradients_are_clipped_by_member() -> None:
    """Norms 5 and 5 and 0: at most 1, at most 10, at most 1."""
    grads_RC = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
    clip(grads_RC, grads_RC.norm(dim=1), [1.0, 10.0, 1.0])
    torch.testing.assert_close(grads_RC, torch.tensor([[0.6, 0.8], [3.0, 4.0], [0.0, 0.0]]))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positions", [6, 13, 16, 17, 32])
def test_attention_over_many_short_rows(positions: int, causal: bool) -> None:
    """Enough rows for the padded form; the reference is written out in fp64."""
    generator = torch.Generator().manual_seed(1)
    shape = (64, 4, positions, 8)
    q, k, v, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    hidden = torch.full((positions, positions), -math.inf, dtype=torch.float64).triu(1) if causal else 0.0
    exact = [part.clone().requires_grad_() for part in (q, k, v)]
    expected = ((exact[0] @ exact[1].mT / math.sqrt(8) + hidden).softmax(-1)) @ exact[2]
    found = [part.float().requires_grad_() for part in (q, k, v)]
    mixed = attend(*found, causal=causal)
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(
        torch.autograd.grad(mixed, found, upstream.float()), torch.autograd.grad(expected, exact, upstream), strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_calibration_times_both_ways() -> None:
    spec = specs(1, contract={"lengths": [2, 5]}, steps=1)[0].model_copy(update={"start_from": 3})
    times = faster_packed(spec, 6, pairs=3)
    assert times.members == 6
    assert 0 < times.packed_s < 1
    assert 0 < times.sequential_s < 1
    assert 0 < times.low <= times.ratio <= times.high
    for wrong in ({"members": 1}, {"members": 2, "pairs": 0}):
        with pytest.raises(InputError, match="at least 2 members and 1 pair"):
            faster_packed(spec, **wrong)
