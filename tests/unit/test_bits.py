"""Parity, increment and prefix sums, against Python's own arithmetic."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopcore.errors import InputError, LengthError, UnknownSymbol
from loopcore.specs import IncrementTask, ParityTask, PrefixSumTask, TrainSpec
from loopcore.tasks import Increment, Parity, PrefixSums, Task, load_task
from loopcore.tasks.pools import kept, rows_of_batch

TASKS: list[Task] = [
    Parity(ParityTask()),
    Increment(IncrementTask()),
    Increment(IncrementTask(carries="random")),
    PrefixSums(PrefixSumTask()),
]


@given(st.lists(st.integers(0, 1), min_size=1, max_size=70))
def test_increment_is_pythons_addition(bits: list[int]) -> None:
    number = sum(bit << i for i, bit in enumerate(bits))
    expected = [(number + 1 >> i) & 1 for i in range(len(bits))]
    assert Increment(IncrementTask()).answer(bits) == expected


@given(st.lists(st.integers(0, 1), min_size=1, max_size=40))
def test_parity_and_prefix_sums_count_the_ones(bits: list[int]) -> None:
    expected = [sum(bits[: i + 1]) % 2 for i in range(len(bits))]
    assert Parity(ParityTask()).answer(bits) == expected
    assert PrefixSums(PrefixSumTask()).answer(bits) == expected


def test_worked_by_hand() -> None:
    assert Increment(IncrementTask()).answer([1, 1, 0, 1]) == [0, 0, 1, 1]  # 11 + 1 = 12
    assert Increment(IncrementTask()).answer([1, 1, 1]) == [0, 0, 0]  # 7 + 1 = 0 mod 8
    assert Parity(ParityTask()).answer([1, 0, 1, 1, 0]) == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.fingerprint)
def test_a_batch_is_right_and_a_function_of_its_arguments(task: Task) -> None:
    batch = task.random_batch(seed=3, split="train", index=5, size=20, length=17)
    assert batch.tokens.shape == batch.targets.shape == (20, 17)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        assert task.answer(tokens) == targets  # type: ignore[attr-defined]
    again = task.random_batch(seed=3, split="train", index=5, size=20, length=17)
    assert torch.equal(batch.tokens, again.tokens)
    for other in ({"seed": 4}, {"split": "held_out"}, {"index": 6}):
        arguments = {"seed": 3, "split": "train", "index": 5} | other
        assert not torch.equal(task.random_batch(size=20, length=17, **arguments).tokens, batch.tokens)  # type: ignore[arg-type]


def test_uniform_carries_reach_every_position_equally_often() -> None:
    tokens = Increment(IncrementTask()).random_batch(seed=0, split="train", index=0, size=9000, length=8).tokens
    ones = tokens.cumprod(-1).sum(-1)  # the carry's length, 0..8: 1000 each expected, deviation 30
    assert torch.bincount(ones, minlength=9).tolist() == pytest.approx([1000] * 9, abs=150)
    random = Increment(IncrementTask(carries="random")).random_batch(seed=0, split="train", index=0, size=8000, length=8)
    ones = random.tokens.cumprod(-1).sum(-1)
    assert torch.bincount(ones)[:3].tolist() == pytest.approx([4000, 2000, 1000], abs=180)


def test_prefix_sum_sets_are_the_benchmarks() -> None:
    task = PrefixSums(PrefixSumTask())
    for length in (16, 23, 24, 32):
        train, held_out = task.examples("train", length), task.examples("held_out", length)
        assert train.shape == (8000, length)
        assert held_out.shape == (2000, length)
        assert train.float().mean() == pytest.approx(0.5, abs=0.01)
        if length < 24:
            assert len({bytes(row) for part in (train, held_out) for row in part.numpy()}) == 10_000


def test_a_short_length_has_all_its_strings_in_both_splits() -> None:
    task = PrefixSums(PrefixSumTask(examples=100))
    for split in ("train", "held_out"):
        assert sorted(map(tuple, task.examples(split, 6).tolist())) == sorted(
            tuple(number >> i & 1 for i in range(6)) for number in range(64)
        )
    assert len(task.examples("train", 7)) == 80  # 128 strings do not fit into a set of 100


def test_the_data_seed_draws_the_set_and_the_seed_only_orders_it() -> None:
    first, second = PrefixSums(PrefixSumTask(examples=50)), PrefixSums(PrefixSumTask(examples=50, data_seed=1))
    assert not torch.equal(first.examples("train", 20), second.examples("train", 20))
    assert first.fingerprint != second.fingerprint
    seen = [
        sorted(map(tuple, first.random_batch(seed=seed, split="train", index=0, size=40, length=20).tokens.tolist()))
        for seed in (0, 1)
    ]
    assert seen[0] == seen[1] == sorted(map(tuple, first.examples("train", 20).tolist()))


@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 4))
def test_a_stream_goes_through_all_examples_before_it_repeats_one(examples: int, size: int, passes: int) -> None:
    batches = -(-examples * passes // size)
    rows = [row for index in range(batches) for row in rows_of_batch(examples, "k", index=index, size=size).tolist()]
    for epoch in range(len(rows) // examples):
        assert sorted(rows[epoch * examples : (epoch + 1) * examples]) == list(range(examples))
    assert set(collections.Counter(rows[: passes * examples]).values()) == {passes}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.fingerprint)
def test_text(task: Task) -> None:
    assert task.encode("0110") == task.encode(" 0 1 1\n0 ") == [0, 1, 1, 0]
    assert task.decode([0, 1, 1, 0]) == "0110"
    with pytest.raises(UnknownSymbol, match="'2' is no bit"):
        task.encode("012")
    with pytest.raises(LengthError, match="empty"):
        task.encode(" ")
    with pytest.raises(UnknownSymbol, match="token 5"):
        task.decode([0, 5])


def test_specs_name_their_tasks() -> None:
    for kind, cls in (("parity", Parity), ("increment", Increment), ("prefix_sum", PrefixSums)):
        task = load_task(TrainSpec.model_validate({"task": {"kind": kind}}).task)
        assert isinstance(task, cls)
        assert (task.vocabulary, task.classes, task.score) == (2, 2, "exact")
    with pytest.raises(LengthError, match="at least 1 bit"):
        PrefixSums(PrefixSumTask()).examples("train", 0)


def test_kept_examples_survive_damage_and_say_when_they_cannot_be_kept(tmp_path: Path) -> None:
    made = []

    def make() -> dict[str, torch.Tensor]:
        made.append(1)
        return {"x": torch.arange(6).view(2, 3)}

    folder = tmp_path / "deep" / "folder"
    for _ in range(2):
        assert kept(folder, "set", make)["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(made) == 1
    file = folder / "set.safetensors"
    assert [path.name for path in folder.iterdir()] == [file.name]
    content = bytearray(file.read_bytes())
    content[-8] ^= 1  # one bit of the last number
    file.write_bytes(content)
    assert kept(folder, "set", make)["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    file.write_bytes(b"short")
    assert kept(folder, "set", make)["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(made) == 3
    assert kept(folder, "set", lambda: pytest.fail("made anew"))["x"].shape == (2, 3)
    with pytest.raises(InputError, match="cannot keep generated examples"):
        kept(file, "set", make)  # a file where a folder should be
    assert kept(None, "set", make)["x"].shape == (2, 3)
