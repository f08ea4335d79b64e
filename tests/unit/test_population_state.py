"""What a population is and can become: its state, put down and taken up, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopcore import checkpoint
from loopcore.errors import InputError
from loopcore.population import Population
from loopcore.specs import TrainSpec
from loopcore.training import Training
from tests.unit.populations import SHAPES, TOLERANCE, going_on, outline, same, specs


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
