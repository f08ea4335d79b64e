"""A population against its members trained alone: losses, weights, stages, ends."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from loopcore.population import Member, Population
from loopcore.population import population as module
from loopcore.training import Training
from tests.unit.populations import PRE, SHAPES, TOLERANCE, apart, going_on, same, specs, to_the_end


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
    assert [member.cooldown_from for member in population.members] == [12, 21, 30, 6]
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
