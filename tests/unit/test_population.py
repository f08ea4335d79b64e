"""A population against its members trained alone: losses, weights, stages, ends, checkpoints."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopcore import checkpoint
from loopcore.block import attend
from loopcore.errors import InputError
from loopcore.population import Member, Population, faster_packed
from loopcore.population import population as module
from loopcore.population.layout import Layout, Storage
from loopcore.population.optimizer import AdamW, Due, clip
from loopcore.specs import TrainSpec
from loopcore.training import Training

TOLERANCE = 1e-5  # relative, fp32, after 50 steps


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def specs(members: int = 3, *, rules: Sequence[str] = ("standard",), **fields: Any) -> list[TrainSpec]:
    """Small runs that differ in seed, rule and every number of the optimizer; rates at which rounding does not grow in 50 steps
    (at .002 a run alone leaves itself by 1e-4 if its first weights are off by one rounding)."""
    model = {"width": 16, "heads": 2} | fields.pop("model", {})
    optimizer = fields.pop("optimizer", {})
    content = {"contract": {"lengths": [5]}, "batch": 8, "evaluate_every": 10, "evaluate_on": 24, "steps": 200} | fields
    return [
        TrainSpec.model_validate(
            content
            | {
                "model": model,
                "seed": [3, 4, 3][number % 3] + number // 3,
                "scaling": {"rule": rules[number % len(rules)], "base_width": [8, 16, 32][number % 3]},
                "optimizer": {
                    "lr": [5e-4, 3e-4, 4e-4][number % 3],
                    "weight_decay": [0.0, 0.01, 0.3][number % 3],
                    "epsilon": [1e-8, 1e-7, 1e-6][number % 3],
                    "betas": [(0.9, 0.98), (0.8, 0.99), (0.9, 0.95)][number % 3],
                    "clip": [1.0, 0.05, None][number % 3],
                    "warmup": [10, 20, 0][number % 3],
                }
                | optimizer,
            }
        )
        for number in range(members)
    ]


PRE = ("standard", "loop_mup", "depth_mup")
POST = ("standard", "deepnorm", "deeploop")

SHAPES: dict[str, list[TrainSpec]] = {
    "pre-norm": specs(rules=PRE),
    "post-norm": specs(rules=POST, model={"norm": "post"}),
    "two blocks, rope, no injection": specs(
        rules=PRE, model={"blocks": 2, "positions": "rope", "injection": "none", "readout_init": "normal"}
    ),
    "post-norm, learned positions, added input": specs(
        rules=POST, model={"norm": "post", "blocks": 2, "positions": "learned", "injection": "add", "readout_init": "normal"}
    ),
    "addressed positions": specs(rules=PRE, model={"positions": "scan_offset"}),
    "untied, a loop never trained": specs(rules=PRE, model={"tied": False, "untied_loops": 6, "blocks": 2}),
    "no BOS, all positions seen": specs(rules=PRE, model={"bos": False, "causal": False, "positions": "learned"}),
    "inputs one by one": specs(rules=PRE, contract={"lengths": [5], "input_schedule": "streaming"}),
    "loops drawn by member": specs(rules=PRE, contract={"lengths": [5], "extra_loops": 2.0}),
    "loops drawn, untied": specs(rules=PRE, contract={"lengths": [4], "extra_loops": 1.5}, model={"tied": False}),
    "pairs first": specs(rules=PRE, contract={"lengths": [2, 4], "operator_first": True}),
    "text": specs(
        rules=PRE,
        task={"kind": "text"},
        contract={"lengths": [12], "loops": {"kind": "fixed", "count": 3}},
        model={"positions": "rope", "injection": "none"},
        optimizer={"decay": "linear"},
    ),
}


def apart(one: nn.Module, other: nn.Module) -> float:
    """Largest relative distance of a parameter of the one from that of the other."""
    others = dict(other.named_parameters())
    with torch.no_grad():
        return max(
            float((weight - others[name]).norm() / weight.norm().clamp_min(1e-12)) for name, weight in one.named_parameters()
        )


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, bit for bit and key by key."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("shape", SHAPES)
def test_members_are_what_they_would_be_alone(shape: str) -> None:
    population, alone = Population(SHAPES[shape]), [Training(spec) for spec in SHAPES[shape]]
    for _ in range(50):
        of_members = population.step()
        for number, run in enumerate(alone):
            expected, found = run.step(), of_members[number]
            assert found.keys() == expected.keys()
            assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            assert all(found[name] == expected[name] for name in ("lr", "length", "loops"))
    for member, run in zip(population.members, alone, strict=True):
        assert apart(run.model, member.model) < TOLERANCE


def test_precision_bf16_is_the_members_own_up_to_its_rounding() -> None:
    of_bf16 = specs(rules=PRE, precision="bf16", optimizer={"warmup": 20})
    population, alone = Population(of_bf16), [Training(spec) for spec in of_bf16]
    for _ in range(30):
        of_members = population.step()
        for number, run in enumerate(alone):
            assert of_members[number]["loss"] == pytest.approx(run.step()["loss"], rel=2e-3)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_passes_of_any_size_come_to_the_same(at_once: int) -> None:
    of_five = specs(5, rules=PRE)
    parts, whole = Population(of_five, at_once=at_once), Population(of_five, at_once=5)
    for _ in range(10):
        one, other = parts.step(), whole.step()
        assert list(one) == list(other) == [0, 1, 2, 3, 4]
        for number in one:
            assert one[number] == pytest.approx(other[number], rel=TOLERANCE)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_loop_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as torch.compile does, without the C++ compiler."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    eager, compiled = Population(specs()), Population(specs(), compile=True)
    for _ in range(3):
        one, other = eager.step(), compiled.step()
        assert all(one[number] == pytest.approx(other[number], rel=TOLERANCE) for number in one)


def going_on() -> list[TrainSpec]:
    """Four runs that are promoted at every evaluation, each at its own: they end at steps 18, 27, 36 and, cut off, at 12."""
    of_four = specs(
        4,
        contract={"lengths": [2, 3, 4], "promote_at": 0.0},
        task={"kind": "word", "group": "Z3"},
        optimizer={"cooldown": 6, "cooldown_at": 0.0},
    )
    rhythms = ({"evaluate_every": 4}, {"evaluate_every": 7}, {"evaluate_every": 10}, {"evaluate_every": 5, "steps": 12})
    return [spec.model_copy(update=rhythm) for spec, rhythm in zip(of_four, rhythms, strict=True)]


def to_the_end(run: Training) -> list[Any]:
    found = []
    while not run.finished:
        found.append(run.advance())
    return found


def test_stages_cool_down_and_end_are_each_members_own() -> None:
    of_members = going_on()
    population = Population(of_members)
    found: list[list[Any]] = [[] for _ in of_members]
    together = set()
    while not population.finished:
        together.add(tuple(population.members[m].stages.index for m in population.running))
        for number, progress in population.advance().items():
            found[number].append(progress)
    assert [len(steps) for steps in found] == [18, 27, 36, 12]
    assert {(0, 0, 0, 0), (1, 0, 0, 1), (2, 1, 0, 1), (2, 2, 1)} <= together  # stages of those that run
    assert [member.cooldown_from for member in population.members] == [12, 21, 30, 12]
    alone = [Training(spec) for spec in of_members]
    for member, run, steps in zip(population.members, alone, found, strict=True):
        for step, expected in zip(steps, to_the_end(run), strict=True):
            assert (step.step, step.evaluated, step.metrics.keys()) == (
                expected.step,
                expected.evaluated,
                expected.metrics.keys(),
            )
            assert step.metrics == pytest.approx(expected.metrics, rel=1e-4)
        figures, expected = member.figures(), run.figures()
        assert figures.keys() == expected.keys()
        for name, value in expected.items():
            assert figures[name] == (pytest.approx(value, rel=TOLERANCE) if isinstance(value, float) else value)


def test_a_member_that_diverges_leaves_the_others_alone() -> None:
    of_members = specs(4)
    broken, whole = Population(of_members), Population(of_members)
    for _ in range(5):
        broken.advance()
        whole.advance()
    with torch.no_grad():
        broken.members[1].model.get_parameter("embedding_VD")[0, 0] = math.inf
    before = broken.members[1].state_dict()
    first = broken.advance()
    assert not math.isfinite(first[1].metrics["loss"])
    assert not first[1].evaluated
    expected = whole.advance()
    for number in (0, 2, 3):
        assert first[number].metrics == pytest.approx(expected[number].metrics, rel=TOLERANCE)
    member = broken.members[1]
    assert (member.outcome, member.diverged_at, member.finished) == ("diverged", 6, True)
    after = member.state_dict()
    assert same(after["model"], before["model"])
    assert same(after["optimizer"], before["optimizer"])
    assert broken.running == [0, 2, 3]
    for _ in range(10):
        found, expected = broken.advance(), whole.advance()
        assert list(found) == [0, 2, 3]
        for number, progress in found.items():
            assert progress.metrics == pytest.approx(expected[number].metrics, rel=TOLERANCE)


def test_a_gradient_that_is_not_finite_counts_as_divergence() -> None:
    """The loss may still be finite when the gradient is not: here an embedding of 1e30 overflows in the backward alone."""
    population = Population(specs(2, model={"norm": "post", "readout_init": "normal"}, optimizer={"clip": None}))
    before = population.members[0].state_dict()["model"]

    def overflowing(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        losses, norms, grads = gradients(*arguments)
        return losses, torch.tensor([math.inf, float(norms[1])]), grads

    gradients = population._gradients
    population._gradients = overflowing
    metrics = population.step()
    assert math.isfinite(metrics[0]["loss"])
    assert population.members[0].diverged_at == 1
    assert same(population.members[0].state_dict()["model"], before)
    assert population.members[1].outcome == "running"


def test_taken_up_bit_for_bit(tmp_path: Path) -> None:
    of_members = going_on()
    whole, first = Population(of_members), Population(of_members)
    curve = []
    while not whole.finished:
        curve.append(whole.advance())
    for _ in range(19):
        first.advance()
    for number, member in enumerate(first.members):
        checkpoint.save(tmp_path / str(number), member.state_dict(), spec=member.spec, step=member.step_count)
    second = Population(of_members)
    for number, member in enumerate(second.members):
        member.load_state_dict(checkpoint.load(checkpoint.checkpoints(tmp_path / str(number))[0]).state)
    third = Population(of_members)
    third.load_state_dict(first.state_dict())
    for resumed in (second, third):
        rest = []
        while not resumed.finished:
            rest.append(resumed.advance())
        assert rest == curve[19:]
        assert same(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize("shape", ["pre-norm", "untied, a loop never trained"])
def test_a_members_state_is_the_runs_own(shape: str) -> None:
    """Either takes up what the other put down, and the keys and types of the states are the same."""
    of_shape = SHAPES[shape]
    population, alone = Population(of_shape), [Training(spec) for spec in of_shape]
    for member, spec in zip(population.members, of_shape, strict=True):
        assert same(member.state_dict(), Training(spec).state_dict())
    for _ in range(12):
        population.advance()
        for run in alone:
            run.advance()
    taken = [Training(spec) for spec in of_shape]
    for member, run, other in zip(population.members, alone, taken, strict=True):
        state, expected = member.state_dict(), run.state_dict()
        assert outline(state) == outline(expected)
        other.load_state_dict(state)
        assert same(other.state_dict(), state)
    packed = Population(of_shape)
    for member, run in zip(packed.members, alone, strict=True):
        state = run.state_dict()
        member.load_state_dict(state)
        assert same(member.state_dict(), state)
    for _ in range(10):
        found, from_alone = population.step(), packed.step()
        for number, (run, other) in enumerate(zip(alone, taken, strict=True)):
            expected = run.step()
            for metrics in (found[number], from_alone[number], other.step()):
                assert metrics == pytest.approx(expected, rel=TOLERANCE)


def outline(state: Any) -> Any:
    """Keys, shapes and types of a state."""
    if isinstance(state, dict):
        return {key: outline(value) for key, value in state.items()}
    return (state.shape, state.dtype, str(state.device)) if isinstance(state, Tensor) else type(state)


def test_a_state_is_a_copy_and_a_model_is_the_members() -> None:
    population = Population(specs())
    population.step()
    state = population.state_dict()
    kept = [member["model"]["blocks.0.up.weight"].clone() for member in state["members"]]
    moment = state["members"][0]["optimizer"]["readout_matrix.weight"]["exp_avg"].clone()
    population.step()
    for member, of_member, weight in zip(population.members, state["members"], kept, strict=True):
        assert torch.equal(of_member["model"]["blocks.0.up.weight"], weight)
        assert not torch.equal(member.model.get_parameter("blocks.0.up.weight"), weight)
        assert isinstance(member, Training)
    assert torch.equal(state["members"][0]["optimizer"]["readout_matrix.weight"]["exp_avg"], moment)


@pytest.mark.parametrize("at_once", [16_384, 7])
@pytest.mark.parametrize("asked", [{}, {"length": 3}, {"length": 7, "loops": 9}])
def test_evaluation_is_each_members_own(asked: dict[str, int], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVALUATED_AT_ONCE", at_once)
    population = Population(specs(4, rules=PRE, model={"readout_init": "normal"}))
    population.step()
    found = population.evaluate(**asked)
    assert list(found) == [0, 1, 2, 3]
    for number, member in enumerate(population.members):
        assert found[number] == pytest.approx(member.evaluate(**asked), rel=TOLERANCE)
    assert population.evaluate([2], **asked)[2] == pytest.approx(found[2], rel=TOLERANCE)


def test_batches_are_drawn_once_for_members_of_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    population = Population(specs(3))  # seeds 3, 4, 3
    drawn: list[int] = []
    original = Member._training_batch

    def counted(self: Member) -> Any:
        drawn.append(self.spec.seed)
        return original(self)

    monkeypatch.setattr(Member, "_training_batch", counted)
    batches = population._training_batches([0, 1, 2])
    assert drawn == [3, 4]
    for number, member in enumerate(population.members):
        expected = Training(member.spec)._training_batch()
        assert torch.equal(batches[number].tokens, expected.tokens)
        assert torch.equal(batches[number].targets, expected.targets)


def test_a_stopped_member_stays_where_it_is() -> None:
    population = Population(specs())
    population.advance()
    population.stop(1)
    before = population.members[1].state_dict()
    assert list(population.advance()) == [0, 2]
    assert same(population.members[1].state_dict(), before)
    assert population.members[1].outcome == "running"
    again = Population(specs())
    again.load_state_dict(population.state_dict())
    assert again.running == [0, 2]
    population.stop(0)
    population.stop(2)
    assert population.finished


def test_a_warm_start_reaches_the_batch() -> None:
    source = Training(specs(1)[0])
    for _ in range(3):
        source.step()
    warm = [spec.model_copy(update={"start_from": 7}) for spec in specs(2)]
    population, run = Population(warm), Training(warm[0])
    with pytest.raises(InputError, match="call start_weights"):
        population.step()
    for one in (*population.members, run):
        one.start_weights(source.state_dict(), trained_by=source.spec)
    assert population.step()[0] == pytest.approx(run.step(), rel=TOLERANCE)


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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"width": 32}}, "another model"),
        ({"task": {"kind": "parity"}}, "another task"),
        ({"contract": {"lengths": [6]}}, "another contract"),
        ({"batch": 9}, "another batch"),
        ({"evaluate_on": 25}, "another evaluate_on"),
        ({"precision": "bf16"}, "another precision"),
        ({"progressive": 0.5}, "progressive 0.5"),
    ],
)
def test_members_have_to_be_of_one_shape(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Population([*specs(2), *specs(1, **changed)])


def test_what_cannot_be_a_population_says_why() -> None:
    with pytest.raises(InputError, match="at least one member"):
        Population([])
    with pytest.raises(InputError, match="at least 1 member at once"):
        Population(specs(2), at_once=0)
    convolutional = TrainSpec.model_validate({"model": {"architecture": "recall_conv"}, "task": {"kind": "prefix_sum"}})
    with pytest.raises(InputError, match="trains transformers"):
        Population([convolutional])
    population = Population(specs(2))
    with pytest.raises(InputError, match="expected a member from 0 to 1, got 2"):
        population.stop(2)
    with pytest.raises(InputError, match="the state has 3 members, this population 2"):
        population.load_state_dict(Population(specs(3)).state_dict())
    with pytest.raises(AssertionError, match="steps with its population"):
        population.members[0].step()


def test_a_state_of_another_model_is_refused() -> None:
    population = Population(specs(2))
    population.step()
    member = population.members[0]
    state = member.state_dict()
    state["optimizer"]["blocks.0.query.weight"]["step"] += 1
    with pytest.raises(InputError, match="different numbers of steps"):
        member.load_state_dict(state)
    other = Population(specs(2, model={"width": 32}))
    other.step()
    with pytest.raises(InputError, match="not one of this run's model"):
        member.load_state_dict(other.members[0].state_dict())
    unknown = member.state_dict()
    unknown["optimizer"]["extra"] = unknown["optimizer"]["readout_matrix.weight"]
    with pytest.raises(InputError, match="no parameter is called extra"):
        member.load_state_dict(unknown)
