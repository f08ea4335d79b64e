"""Word problems: products by hand, streams that are functions of their index, words as people type them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopcore.errors import InputError, LengthError, UnknownGroup, UnknownSymbol
from loopcore.specs import InstalledTask, WordTask
from loopcore.tasks import Batch, Split, Task, WordProblem, load_task


def words(group: str = "S3") -> WordProblem:
    return WordProblem(WordTask(group=group))


def test_targets_are_running_products_from_left_to_right() -> None:
    """In Z5 a running product is a running sum mod 5; in S3, (1,2) (2,3) (1,2,3): (1,2), then (1,3,2), then the identity."""
    z5 = words("Z5")
    assert z5.products(torch.tensor([[3, 1, 4, 1, 5 - 1]])).tolist() == [[3, 4, 3, 4, 3]]
    s3 = words()
    assert s3.decode(s3.answer(s3.encode("(1,2) (2,3) (1,2,3)"))) == "(1,2) (1,3,2) e"


@settings(max_examples=50, deadline=None)
@given(
    group=st.sampled_from(["S3", "S4", "A4xZ5", "D4", "Z7"]),
    seed=st.integers(0, 2**31 - 1),
    split=st.sampled_from(["train", "held_out"]),
    index=st.integers(0, 10**9),
    size=st.integers(1, 5),
    length=st.integers(1, 12),
)
def test_a_batch_is_a_function_of_its_arguments(group: str, seed: int, split: Split, index: int, size: int, length: int) -> None:
    task = words(group)

    def draw() -> Batch:
        return task.random_batch(seed=seed, split=split, index=index, size=size, length=length)

    torch.manual_seed(seed)
    first = draw()
    before = torch.get_rng_state()
    torch.rand(3)
    again = draw()
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.targets, again.targets)
    assert first.tokens.shape == first.targets.shape == (size, length)
    assert first.tokens.dtype == first.targets.dtype == torch.long
    torch.set_rng_state(before)
    draw()
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is left alone
    for tokens, targets in zip(first.tokens.tolist(), first.targets.tolist(), strict=True):
        assert task.answer(tokens) == targets
        assert targets[0] == tokens[0]
        assert all(int(task.group.table_GG[targets[i - 1], tokens[i]]) == targets[i] for i in range(1, length))


def test_the_parts_of_the_key_each_make_another_stream() -> None:
    task = words("S5")
    keys: list[tuple[int, Split, int, int]] = [
        (0, "train", 0, 8),
        (1, "train", 0, 8),
        (0, "held_out", 0, 8),
        (0, "train", 1, 8),
        (0, "train", 0, 9),
        (1, "held_out", 1, 9),
    ]
    batches = [
        task.random_batch(seed=seed, split=split, index=index, size=4, length=length).tokens[:, :8].flatten().tolist()
        for seed, split, index, length in keys
    ]
    assert len({tuple(batch) for batch in batches}) == len(batches)


def test_held_out_words_are_not_the_training_words() -> None:
    """60^8 words of A5 are too many to be drawn twice."""
    task = words("A5")

    def seen(split: Split) -> set[tuple[int, ...]]:
        draws = (task.random_batch(seed=0, split=split, index=index, size=256, length=8) for index in range(20))
        return {tuple(word) for drawn in draws for word in drawn.tokens.tolist()}

    assert len(seen("train")) == len(seen("held_out")) == 20 * 256
    assert not seen("train") & seen("held_out")


def test_words_are_uniform() -> None:
    """60,000 draws of 6 elements: each count is within 5 standard deviations (91) of 10,000."""
    tokens_BN = words().random_batch(seed=0, split="train", index=0, size=10_000, length=6).tokens
    counts_G = torch.bincount(tokens_BN.flatten(), minlength=6)
    assert (counts_G - 10_000).abs().max() < 5 * 92


def test_what_people_type() -> None:
    task = words()
    assert task.encode("  (1,2)   (3,1,2) 5 e ") == [2, 3, 5, 0]
    assert task.decode([2, 3, 5, 0]) == "(1,2) (1,2,3) (1,3) e"
    assert words("Z60").encode("3 1 4 1 59") == [3, 1, 4, 1, 59]


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_word(text: str) -> None:
    with pytest.raises(LengthError, match=r"the word is empty; give at least one element of S3, for example '\(1,3,2\) \(1,3\)'"):
        words().encode(text)
    with pytest.raises(LengthError, match="empty"):
        words().answer([])


def test_a_symbol_outside_the_vocabulary() -> None:
    with pytest.raises(UnknownSymbol, match=r"'\(4,5\)' is no element of S3; expected one of e \(2,3\)"):
        words().encode("(1,2) (4,5)")
    for token in (-1, 6):
        with pytest.raises(UnknownSymbol, match=f"token {token} is no element of S3; expected 0 to 5"):
            words().decode([token])


def test_load_task_gives_the_task_of_a_spec() -> None:
    task: Task = load_task(WordTask(group="A5"))
    assert isinstance(task, WordProblem)
    assert (task.vocabulary, task.classes, task.score, task.name) == (60, 60, "exact", "words of A5")
    assert task.fingerprint == load_task(WordTask(group="A5")).fingerprint != load_task(WordTask(group="S5")).fingerprint


def test_a_group_that_got_past_the_spec() -> None:
    with pytest.raises(UnknownGroup, match="'Q8'"):
        load_task(WordTask.model_construct(group="Q8"))


def test_an_installed_package_brings_a_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real distribution on the path: a module and the metadata that pip would write."""
    (tmp_path / "mirrors.py").write_text(
        "class Mirror:\n    name, vocabulary, classes, score = 'mirror', 3, 3, 'exact'\n"
        "    def __init__(self, spec):\n        self.spec, self.fingerprint = spec, f'mirror/{spec.options}'\n"
    )
    metadata = tmp_path / "mirrors-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mirrors\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[loopcore.tasks]\nmirror = mirrors:Mirror\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task(InstalledTask(name="mirror", options={"depth": 2}))
    assert (task.name, task.fingerprint) == ("mirror", "mirror/{'depth': 2}")


def test_a_task_that_no_package_brings() -> None:
    with pytest.raises(InputError, match=r"no installed package brings a task 'maze_of_mirrors'.*install the package"):
        load_task(InstalledTask(name="maze_of_mirrors"))
