"""Next-byte prediction on a text corpus. Shapes: B windows, N positions."""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from loopcore.errors import InputError, LengthError, UnknownSymbol
from loopcore.specs.task import TextTask
from loopcore.tasks.task import Batch, Split, generator

__all__ = ["STDLIB_BYTES", "Text", "stdlib_corpus"]

STDLIB_BYTES = 4_000_000
BYTES = 256
# Not every installation has these, and tests read unlike the rest.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})


class Text:
    """Random windows of a corpus of bytes; the target at a position is the byte that follows.

    The last `spec.held_out` of the corpus is kept for evaluation. The corpus is read on the first draw, so that a model can be
    served where its corpus is not.
    """

    score: Literal["loss"] = "loss"
    vocabulary = classes = BYTES

    def __init__(self, spec: TextTask) -> None:
        self.spec = spec
        self.name = "text of the Python standard library" if spec.source == "stdlib" else f"text of {Path(spec.source).name}"

    @functools.cached_property
    def corpus(self) -> Tensor:
        """The whole corpus, uint8. Raises InputError for a file that cannot be read or is empty."""
        return stdlib_corpus() if self.spec.source == "stdlib" else _file_corpus(Path(self.spec.source).expanduser().absolute())

    @property
    def fingerprint(self) -> str:
        return f"text/{hashlib.sha256(self.corpus.numpy().data).hexdigest()}/{self.spec.held_out!r}/1"

    def part(self, split: Split) -> Tensor:
        """The training or the held-out part of the corpus, uint8."""
        first_held_out = len(self.corpus) - round(self.spec.held_out * len(self.corpus))
        return self.corpus[:first_held_out] if split == "train" else self.corpus[first_held_out:]

    def random_batch(self, *, seed: int, split: Split, index: int, size: int, length: int) -> Batch:
        """`size` uniform windows of `length` bytes: a pure function of the arguments and the corpus.

        Raises InputError for a corpus that cannot be read, LengthError for one that has no window of this length.
        """
        part = self.part(split)
        starts = len(part) - length
        if starts < 1:
            raise LengthError(
                f"the {split.replace('_', '-')} part of {self.spec.source} has {len(part)} bytes, a window of length {length} "
                f"takes {length + 1}; use a longer corpus or a shorter contract length"
            )
        start_B = torch.randint(starts, (size,), generator=generator("text", seed, split, index, length))
        window_BN = part[start_B[:, None] + torch.arange(length + 1)].long()
        return Batch(window_BN[:, :-1], window_BN[:, 1:])

    def encode(self, text: str) -> list[int]:
        """The text's UTF-8 bytes. Raises LengthError where there are none, UnknownSymbol for text that UTF-8 cannot hold."""
        if not text:
            raise LengthError("the text is empty; give at least one character")
        try:
            return list(text.encode())
        except UnicodeEncodeError as problem:
            raise UnknownSymbol(f"{text[problem.start]!r} cannot be written in UTF-8; leave it out") from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the bytes; what is no UTF-8 becomes U+FFFD. Raises UnknownSymbol for a token that is no byte."""
        for token in tokens:
            if not 0 <= token < BYTES:
                raise UnknownSymbol(f"token {token} is no byte; expected 0 to {BYTES - 1}")
        return bytes(tokens).decode(errors="replace")


@functools.cache
def stdlib_corpus() -> Tensor:
    """Source of the Python standard library: the first 4 MB of its modules, uint8, read once a process.

    The order is that of a digest of the modules' paths: the same on every machine with this Python, and so mixed that the
    held-out end reads like the rest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        modules.extend(Path(folder, name) for name in files if name.endswith(".py"))
    modules.sort(key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())
    content = bytearray()
    for path in modules:
        content += path.read_bytes()
        if len(content) >= STDLIB_BYTES:
            break
    if not content:
        raise InputError(f"no source of the standard library under {root}; name a text file as the task's source")
    return _tensor(bytes(content[:STDLIB_BYTES]))


@functools.lru_cache(maxsize=4)
def _file_corpus(path: Path) -> Tensor:
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise InputError(
            f"cannot read the corpus {path}: {problem.strerror or problem}; name a text file that this machine has, or use the "
            "source 'stdlib'"
        ) from None
    if not content:
        raise InputError(f"the corpus {path} is empty; name a text file with something in it")
    return _tensor(content)


def _tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
