"""Tail metrics, on maps whose Jacobians and limits are known."""

from __future__ import annotations

import json
import math
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from loopcore.errors import InputError, Undecided
from loopcore.instruments.tail import TAIL_METRICS, jacobian_alignment, measure_tail
from loopcore.model import LoopedTransformer
from loopcore.scaling import Multipliers
from loopcore.specs import ModelSpec, WordTask
from loopcore.tasks import WordProblem
from tests.unit.handmade import HandMade, Jumping, Restless

Z5 = WordProblem(WordTask(group="Z5"))


class Linear(HandMade):
    """h' = A_t h on the whole state of a word, P = N + 1 positions of width 2, with one matrix for each loop."""

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices = matrices

    def embed(self, tokens_BN: Tensor) -> Tensor:
        tokens_BP = torch.nn.functional.pad(tokens_BN, (1, 0), value=1)
        return torch.stack([tokens_BP + 1, tokens_BP * 0 + 1], -1).double()

    def start(self, e_BPD: Tensor) -> Tensor:
        return e_BPD

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        matrix = self.matrices[min(t, len(self.matrices) - 1)]
        return (h_BPD.flatten(1) @ matrix.T).view(h_BPD.shape)

    def readout(self, h_BPD: Tensor) -> Tensor:
        return h_BPD[:, 1:]


class Turning(Linear):
    """Every position's state is turned by the same angle in every loop."""

    def __init__(self, degrees: float) -> None:
        angle = math.radians(degrees)
        self.turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        return h_BPD @ self.turn.T


def random_matrices(count: int, size: int) -> list[Tensor]:
    return list(torch.from_numpy(np.random.default_rng(0).normal(size=(count, size, size))))


def test_the_jacobian_alignment_of_known_matrices() -> None:
    first, second, third = random_matrices(3, 8)
    model = Linear([first, second, third])
    tokens_BN = Z5.random_batch(seed=0, split="held_out", index=0, size=5, length=3).tokens

    def expected(a: Tensor, b: Tensor) -> float:
        return float(np.sum(a.numpy() * b.numpy()) / np.linalg.norm(a) / np.linalg.norm(b))

    for loops, pair in ((2, (first, second)), (3, (second, third)), (4, (third, third))):
        value_B, exact = jacobian_alignment(model, tokens_BN, loops)
        assert exact
        assert value_B.tolist() == pytest.approx([expected(*pair)] * 5)
    estimate_B, exact = jacobian_alignment(
        model, tokens_BN, 2, probes=4000, exact_up_to=7, stream=torch.Generator().manual_seed(0)
    )
    assert not exact
    assert estimate_B.tolist() == pytest.approx([expected(first, second)] * 5, abs=0.02)
    one_B, _ = jacobian_alignment(model, tokens_BN, 4, probes=1, exact_up_to=0)
    assert one_B.tolist() == pytest.approx([1.0] * 5)  # equal Jacobians, whatever the probe


def test_a_non_linear_loop_by_finite_differences() -> None:
    spec = ModelSpec(width=4, heads=2, readout_init="normal")
    model = LoopedTransformer(spec, vocabulary=5, classes=5, multipliers=Multipliers(), seed=2).double()
    tokens_BN = Z5.random_batch(seed=0, split="held_out", index=0, size=2, length=2).tokens
    value_B, exact = jacobian_alignment(model, tokens_BN, 3)
    assert exact
    with torch.no_grad():
        e = model.embed(tokens_BN)
        states = list(model.iterate(tokens_BN, 3))
        jacobians = []
        for t in (1, 2):
            columns = []
            for k in range(12):
                step = torch.zeros(12, dtype=torch.float64)
                step[k] = 1e-6
                ahead, behind = (model.loop(states[t] + sign * step.view(3, 4), e, t) for sign in (1, -1))
                columns.append(((ahead - behind) / 2e-6).flatten(1))
            jacobians.append(torch.stack(columns, -1))
    dot = (jacobians[0] * jacobians[1]).sum((1, 2))
    expected = dot / jacobians[0].norm(dim=(1, 2)) / jacobians[1].norm(dim=(1, 2))
    assert value_B.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_turning_state() -> None:
    """30 degrees a loop: adjacent states 30 degrees apart, and loop t 30 (6 - t) from the far one at 6."""
    result = measure_tail(Turning(30), Z5, words=20, length=4, loops=4, far=6, batch=8)
    assert result.curves["adjacent_cosine"] == pytest.approx([math.cos(math.radians(30))] * 4)
    assert result.curves["asymptotic_alignment"] == pytest.approx([math.cos(math.radians(30 * (6 - t))) for t in (1, 2, 3, 4)])
    assert result.end["adjacent_cosine"] == pytest.approx((math.cos(math.radians(30)),) * 3)  # all words alike: no spread
    assert result.value("jacobian_alignment") == pytest.approx(1.0)  # one map, however it turns
    assert result.exact_jacobian
    assert (result.jacobian_words, result.words) == (16, 20)


def test_everything_saturates_at_a_fixed_point() -> None:
    result = measure_tail(Turning(0), Z5, words=10, length=3, loops=3)
    assert result.undecided == {}
    assert [result.value(metric) for metric in TAIL_METRICS] == pytest.approx([1.0] * 4)


def test_one_step_skip_counts_unchanged_predictions() -> None:
    """Two positions of twelve become known in every loop, the others' prediction stays."""
    result = measure_tail(Jumping(5, 2), Z5, words=20, length=12, loops=8, far=8)
    assert result.curves["one_step_skip"] == pytest.approx([10 / 12] * 6 + [1.0, 1.0])
    assert result.undecided == {}
    restless = measure_tail(Restless(5, 12), Z5, words=20, length=12, loops=6)
    assert restless.curves["one_step_skip"] == pytest.approx([0.0] * 6)


def test_the_interval_is_students_over_words() -> None:
    """A map that leaves some words alone and turns others: word by word from the cosine alone."""
    spec = ModelSpec(width=16, heads=2, readout_init="normal")
    model = LoopedTransformer(spec, vocabulary=5, classes=5, multipliers=Multipliers(), seed=0)
    result = measure_tail(model, Z5, words=6, length=5, loops=2, far=2, batch=4)
    by_word = []
    with torch.no_grad():
        for index, size in ((0, 4), (1, 2)):
            tokens_BN = Z5.random_batch(seed=0, split="held_out", index=index, size=size, length=5).tokens
            _, before, after = model.iterate(tokens_BN, 2)
            for a, b in zip(before[:, 1:].double().numpy(), after[:, 1:].double().numpy(), strict=True):
                cosines = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
                by_word.append(cosines.mean())
    value, low, high = result.end["adjacent_cosine"]
    spread = 2.570582 * np.std(by_word, ddof=1) / math.sqrt(6)  # Student's t, 5 degrees of freedom, 95 %
    assert value == pytest.approx(np.mean(by_word), rel=1e-5)
    assert (low, high) == pytest.approx((value - spread, value + spread), rel=1e-4)
    assert not measure_tail(model, Z5, words=6, length=32, loops=2).exact_jacobian  # 33 x 16 numbers
    rows = result.rows()
    assert len(rows) == 3 * 2 + 1
    assert sum(row["low"] is not None for row in rows) == 4
    assert json.loads(json.dumps(result.to_json()))["end"]["adjacent_cosine"][0] == value


def test_reasons_in_place_of_numbers() -> None:
    spec = ModelSpec(width=16, heads=2, tied=False)
    untied = LoopedTransformer(spec, vocabulary=5, classes=5, multipliers=Multipliers(), untied_loops=4)
    result = measure_tail(untied, Z5, words=8, length=4, loops=4)
    assert set(result.undecided) == {"asymptotic_alignment"}
    assert "needs 8 loops and this untied model has weights for 4" in result.undecided["asymptotic_alignment"]
    assert set(measure_tail(untied, Z5, words=8, length=4, loops=5).undecided) == set(TAIL_METRICS)
    once = measure_tail(Turning(10), Z5, words=8, length=4, loops=1)
    assert "at least 2 loops" in once.undecided["jacobian_alignment"]

    class Stepping(Jumping):
        def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
            return super().loop(h_BPD, e_BPD, t).detach().round()

    stepping = measure_tail(Stepping(5, 2), Z5, words=8, length=4, loops=3)
    assert set(stepping.undecided) == {"jacobian_alignment"}
    with pytest.raises(Undecided, match="no derivative"):
        stepping.value("jacobian_alignment")

    exploding = measure_tail(Linear([torch.eye(8).double() * 1e200]), Z5, words=8, length=3, loops=3)
    assert set(exploding.undecided) == set(TAIL_METRICS)
    assert all("not finite" in reason for reason in exploding.undecided.values())
    zero = measure_tail(Linear([torch.zeros(8, 8).double()]), Z5, words=8, length=3, loops=3)
    assert "zero or not finite" in zero.undecided["jacobian_alignment"]
    with pytest.raises(InputError, match="far of at least loops"):
        measure_tail(Turning(0), Z5, words=8, length=3, loops=3, far=2)


def test_states_are_streamed() -> None:
    class Counting(Jumping):
        most, states = 0, weakref.WeakSet()

        def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
            new_BPD = super().loop(h_BPD, e_BPD, t)
            self.states.add(new_BPD)
            Counting.most = max(self.most, len(self.states))
            return new_BPD

    measure_tail(Counting(5, 1), Z5, words=10, length=5, loops=40)
    assert Counting.most <= 4
