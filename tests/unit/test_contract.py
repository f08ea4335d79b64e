"""Stages of a contract: loops per length, promotion, and being put down and taken up again."""

from __future__ import annotations

import pytest

from loopcore.contract import Stages
from loopcore.errors import InputError
from loopcore.specs import ContractSpec, FixedLoops, LogLoops, ProportionalLoops


@pytest.mark.parametrize(
    ("rule", "loops"),
    [
        (ProportionalLoops(), {1: 1, 2: 2, 8: 8, 12: 12}),
        (ProportionalLoops(per_position=0.5), {1: 1, 2: 1, 3: 2, 8: 4, 9: 5}),
        (ProportionalLoops(per_position=2), {1: 2, 8: 16}),
        (ProportionalLoops(per_position=0.1), {1: 1, 10: 1, 11: 2, 30: 3}),  # 0.1 * 30 is above 3 in floating point
        (FixedLoops(count=5), {1: 5, 100: 5}),
        (LogLoops(), {1: 1, 2: 1, 3: 2, 8: 3, 9: 4, 16: 4}),
        (LogLoops(extra=1), {1: 1, 2: 2, 16: 5}),
    ],
)
def test_loops_of_a_length(rule: ProportionalLoops | FixedLoops | LogLoops, loops: dict[int, int]) -> None:
    stages = Stages(ContractSpec(loops=rule))
    assert {length: stages.loops_for(length) for length in loops} == loops


def test_a_stage_ends_when_its_accuracy_is_enough() -> None:
    stages = Stages(ContractSpec(lengths=(2, 4, 8), loops=ProportionalLoops(per_position=0.5), promote_at=0.9))
    assert (stages.index, stages.length, stages.loops, stages.last) == (0, 2, 1, False)
    assert not stages.advance(0.8999)
    assert stages.index == 0
    assert stages.advance(0.9)
    assert (stages.index, stages.length, stages.loops, stages.last) == (1, 4, 2, False)
    assert stages.advance(1.0)
    assert (stages.index, stages.length, stages.loops, stages.last) == (2, 8, 4, True)
    assert not stages.advance(1.0)
    assert stages.reached(0.9)
    assert not stages.reached(0.89)


def test_taken_up_where_it_was_put_down() -> None:
    spec = ContractSpec(lengths=(2, 4, 8))
    before, after = Stages(spec), Stages(spec)
    before.advance(1.0)
    after.load_state_dict(before.state_dict())
    assert (after.index, after.length) == (1, 4)
    with pytest.raises(InputError, match="the state is at stage 1, this contract has stages 0 to 0"):
        Stages(ContractSpec(lengths=(2,))).load_state_dict(before.state_dict())


def test_a_streaming_contract_shows_an_input_a_loop() -> None:
    assert Stages(ContractSpec()).reveal_per_loop is None
    assert Stages(ContractSpec(input_schedule="streaming")).reveal_per_loop == 1.0
