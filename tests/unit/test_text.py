"""Text: windows and their next bytes, a held-out end that training never touches, corpora that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopcore.errors import InputError, LengthError, UnknownSymbol
from loopcore.specs import TextTask
from loopcore.tasks import Split, Text, load_task
from loopcore.tasks.text import STDLIB_BYTES, stdlib_corpus


def text_of(path: Path, content: bytes, held_out: float = 0.1) -> Text:
    path.write_bytes(content)
    return Text(TextTask(source=str(path), held_out=held_out))


def test_targets_are_the_bytes_that_follow(tmp_path: Path) -> None:
    """Byte i of this corpus is i mod 251, so every window says where it is and what comes next."""
    task = text_of(tmp_path / "corpus", bytes(i % 251 for i in range(5000)))
    batch = task.random_batch(seed=0, split="train", index=0, size=64, length=20)
    assert batch.tokens.shape == batch.targets.shape == (64, 20)
    assert batch.tokens.dtype == batch.targets.dtype == torch.long
    assert torch.equal(batch.targets, (batch.tokens + 1) % 251)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_the_held_out_end_is_not_trained_on(tmp_path: Path) -> None:
    """The last fifth is made of another letter: 800 a, 200 b."""
    task = text_of(tmp_path / "corpus", b"a" * 800 + b"b" * 200, held_out=0.2)

    def seen(split: Split) -> set[int]:
        batch = task.random_batch(seed=0, split=split, index=0, size=2000, length=30)
        return set(batch.tokens.flatten().tolist()) | set(batch.targets.flatten().tolist())

    assert seen("train") == {ord("a")}
    assert seen("held_out") == {ord("b")}
    assert (len(task.part("train")), len(task.part("held_out"))) == (800, 200)


def test_every_window_of_a_part_can_be_drawn(tmp_path: Path) -> None:
    """A held-out part of 10 bytes has 10 - 8 = 2 windows of 8 with the byte that follows."""
    task = text_of(tmp_path / "corpus", bytes(range(100)))
    starts = task.random_batch(seed=0, split="held_out", index=0, size=200, length=8).tokens[:, 0]
    assert set(starts.tolist()) == {90, 91}


def test_a_batch_is_a_function_of_its_arguments(tmp_path: Path) -> None:
    task = text_of(tmp_path / "corpus", bytes(i % 256 for i in range(9999)))
    keys = [(0, "train", 0), (0, "train", 1), (1, "train", 0), (0, "held_out", 0)]
    batches = [
        [task.random_batch(seed=seed, split=split, index=index, size=8, length=16).tokens for seed, split, index in keys]
        for _ in range(2)
    ]
    assert all(torch.equal(first, again) for first, again in zip(*batches, strict=True))
    assert len({tuple(tokens.flatten().tolist()) for tokens in batches[0]}) == len(keys)


def test_the_standard_library_is_a_corpus() -> None:
    task = load_task(TextTask())
    assert isinstance(task, Text)
    assert (task.vocabulary, task.classes, task.score) == (256, 256, "loss")
    corpus = bytes(task.corpus.numpy())
    assert len(corpus) == STDLIB_BYTES
    assert corpus.count(b"import ") > 1000


def test_the_standard_library_is_read_the_same_way_in_every_process(run_python) -> None:
    code = "from loopcore.specs import TextTask; from loopcore.tasks import Text; print(Text(TextTask()).fingerprint)"
    assert run_python(code).stdout.strip() == Text(TextTask()).fingerprint


def test_the_corpus_is_read_once_and_not_before_it_is_needed(tmp_path: Path) -> None:
    assert stdlib_corpus() is stdlib_corpus()
    task = Text(TextTask(source=str(tmp_path / "not there yet")))
    assert task.encode("abc") == [97, 98, 99]
    (tmp_path / "not there yet").write_bytes(bytes(100))
    assert len(task.corpus) == 100


def test_another_corpus_or_share_is_another_fingerprint(tmp_path: Path) -> None:
    prints = {
        text_of(tmp_path / "a", b"x" * 100).fingerprint,
        text_of(tmp_path / "b", b"y" * 100).fingerprint,
        text_of(tmp_path / "c", b"x" * 100, held_out=0.2).fingerprint,
    }
    assert len(prints) == 3
    assert text_of(tmp_path / "d", b"x" * 100).fingerprint in prints


def test_bytes_and_back() -> None:
    task = Text(TextTask())
    assert task.encode("aé") == [97, 195, 169]
    assert task.decode([97, 195, 169]) == "aé"
    assert task.decode([195]) == "\N{REPLACEMENT CHARACTER}"
    with pytest.raises(LengthError, match="the text is empty; give at least one character"):
        task.encode("")
    with pytest.raises(UnknownSymbol, match="cannot be written in UTF-8"):
        task.encode("\ud800")
    with pytest.raises(UnknownSymbol, match="token 256 is no byte; expected 0 to 255"):
        task.decode([256])


def test_a_corpus_that_is_not_there(tmp_path: Path) -> None:
    for source, reason in ((tmp_path / "missing.txt", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=f"cannot read the corpus .*{reason}.*use the source 'stdlib'"):
            _ = Text(TextTask(source=str(source))).corpus


def test_a_corpus_that_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is empty"):
        _ = text_of(tmp_path / "empty", b"").corpus
    task = text_of(tmp_path / "short", bytes(100))
    with pytest.raises(
        LengthError, match=r"the held-out part of .* has 10 bytes, a window of length 10 takes 11; use a longer corpus"
    ):
        task.random_batch(seed=0, split="held_out", index=0, size=1, length=10)
    assert task.random_batch(seed=0, split="held_out", index=0, size=1, length=9).tokens.shape == (1, 9)
