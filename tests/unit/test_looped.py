"""The loop around a model's parts, with parts whose every state can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loopcore.errors import InputError
from loopcore.looped import LoopedModule


class Adder(LoopedModule):
    """The state is the sum of what every loop saw of the input, the logits twice the state."""

    def __init__(self, *, always_shown: int = 0, injects: bool = True) -> None:
        super().__init__()
        self.always_shown, self.injects = always_shown, injects

    def admit(self, loops: int) -> None:
        if loops < 1:
            raise InputError("at least 1 loop")

    def embed(self, tokens_BN: Tensor) -> Tensor:
        return tokens_BN.float().unsqueeze(-1)

    def start(self, e_BPD: Tensor) -> Tensor:
        return torch.zeros_like(e_BPD)

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        return h_BPD + e_BPD

    def readout(self, h_BPD: Tensor) -> Tensor:
        return 2 * h_BPD


TOKENS_BN = torch.tensor([[5, 7, 9]])


def test_the_states_before_the_first_loop_and_after_each() -> None:
    states = [h_BPD.flatten().tolist() for h_BPD in Adder().iterate(TOKENS_BN, 2)]
    assert states == [[0, 0, 0], [5, 7, 9], [10, 14, 18]]


@pytest.mark.parametrize(
    ("per_loop", "always_shown", "last"),
    [
        (1.0, 0, [15, 14, 9]),  # input i enters at loop i and is seen from then on: 3, 2 and 1 times
        (2.0, 0, [15, 21, 18]),  # two at once, the third one loop later
        (0.5, 0, [10, 0, 0]),  # nothing in the first loop, one input in the second and third
        (1.0, 1, [15, 21, 18]),  # the first position is none of the inputs
    ],
)
def test_an_input_schedule_shows_inputs_one_after_another(per_loop: float, always_shown: int, last: list[int]) -> None:
    model = Adder(always_shown=always_shown)
    *_, h_BPD = model.iterate(TOKENS_BN, 3, reveal_per_loop=per_loop)
    assert h_BPD.flatten().tolist() == last


def test_a_trace_and_the_plain_pass_are_one_pass() -> None:
    traced = Adder()(TOKENS_BN, 3, reveal_per_loop=1.0, trace=True)
    assert [h_BPD.flatten().tolist() for h_BPD in traced.states] == [[0, 0, 0], [5, 0, 0], [10, 7, 0], [15, 14, 9]]
    assert traced.logits_BNV.flatten().tolist() == [30, 28, 18]
    assert torch.equal(Adder()(TOKENS_BN, 3, reveal_per_loop=1.0), traced.logits_BNV)


@pytest.mark.parametrize(("per_loop", "injects"), [(0.0, True), (-1.0, True), (float("nan"), True), (1.0, False)])
def test_schedules_that_cannot_be(per_loop: float, injects: bool) -> None:
    with pytest.raises(InputError, match=f"got {per_loop:g} and a model {'with' if injects else 'without'} injection"):
        Adder(injects=injects).iterate(TOKENS_BN, 2, reveal_per_loop=per_loop)


def test_parts_that_are_missing_are_found_at_once() -> None:
    class Half(LoopedModule):
        def admit(self, loops: int) -> None: ...

    with pytest.raises(TypeError, match="abstract"):
        Half()  # pyright: ignore[reportAbstractUsage]
