"""What a model is trained on."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from loopcore.specs.base import Spec

__all__ = [
    "BUILT_IN",
    "CHESS_SIDE",
    "LARGEST_GROUP",
    "LARGEST_MAZE",
    "ChessTask",
    "IncrementTask",
    "InstalledTask",
    "MazeTask",
    "ParityTask",
    "PrefixSumTask",
    "TaskSpec",
    "TextTask",
    "WordTask",
    "group_order",
]

BUILT_IN = ("word", "text", "parity", "increment", "prefix_sum", "maze", "chess")  # kinds that take a spec of their own
LARGEST_GROUP = 5040  # elements: S7; a multiplication table of this size takes 200 MB

LARGEST_MAZE = 59  # side; the benchmark's largest
CHESS_SIDE = 8

_GROUP = re.compile(r"[ZDSA][1-9][0-9]{0,2}(?:x[ZDSA][1-9][0-9]{0,2}){0,7}")


def group_order(name: str) -> int:
    """Number of elements of the group called `name`. Raises ValueError for a name that is none, and above LARGEST_GROUP."""
    if not _GROUP.fullmatch(name):
        raise ValueError(f"expected a group such as Z60, D4, S3, A5 or a product such as A4xZ5, got {name!r}")
    order = 1
    for part in name.split("x"):
        m = int(part[1:])
        match part[0]:
            case "Z":
                order *= m
            case "D":
                order *= 2 * m
            case "S":
                order *= math.factorial(m)
            case "A":
                order *= max(1, math.factorial(m) // 2)
    if order > LARGEST_GROUP:
        raise ValueError(f"expected a group of at most {LARGEST_GROUP} elements, {name} has more; choose a smaller one")
    return order


class WordTask(Spec):
    """Word problem of a finite group: tokens g_1..g_n, the target at position i is the product g_1...g_i (arXiv 2607.20594)."""

    kind: Literal["word"] = "word"
    group: str = "S3"
    """Z_m, D_m, S_m or A_m, or a product of them: `Z60`, `S3`, `A5`, `A4xZ5`."""

    @field_validator("group")
    @classmethod
    def _is_a_group_name(cls, name: str) -> str:
        group_order(name)
        return name


class TextTask(Spec):
    """Next-byte prediction on a text corpus: 256 tokens and classes, whatever the corpus has of them.

    Set `model.readout_init` to normal: from a readout of zero the bytes that never occur all get the same first updates, which
    pull every weight along, and rates above 2^-6 train far worse than they could (0.2 to 0.4 nats after 300 steps).
    """

    kind: Literal["text"] = "text"
    source: str = "stdlib"
    """`stdlib`: the source of the Python standard library, which every machine has. Otherwise the path of a text file."""
    held_out: float = Field(default=0.1, gt=0.0, lt=0.5)
    """Share of the corpus, at its end, that is kept for evaluation."""


class InstalledTask(Spec):
    """A task that an installed package brings, by an entry point of the group `loopcore.tasks`."""

    kind: Literal["installed"] = "installed"
    name: str
    """Name of the entry point."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What the package's task takes; it checks them itself."""

    @field_validator("name")
    @classmethod
    def _is_not_built_in(cls, name: str) -> str:
        if name in BUILT_IN:
            raise ValueError(f"the task {name!r} is built in: write kind: {name} in place of kind: installed and its name")
        return name


class ParityTask(Spec):
    """Running parity of uniform bits: the target at position i is the sum of bits 1..i mod 2. An endless stream."""

    kind: Literal["parity"] = "parity"


class IncrementTask(Spec):
    """A binary number plus one, least significant bit first, modulo 2^n: n bits in, n bits out."""

    kind: Literal["increment"] = "increment"
    carries: Literal["uniform", "random"] = "uniform"
    """`uniform`: the carry's length is uniform in 0..n, so that every position has to wait for it as often as any other (ours).
    `random`: uniform bits, whose carry runs past position i in one word of 2^i."""


class PrefixSumTask(Spec):
    """The easy-to-hard benchmark's prefix sums (arXiv 2106.04537, 2202.05826): for each length one fixed set of bit strings.

    Targets are running sums mod 2. Below 24 bits the strings of a set differ; from 24 bits on they are drawn independently. Four
    fifths of a set train, the rest is held out. The benchmark has lengths 16 to 64, 72, 128, 256 and 512; others may be asked.
    """

    kind: Literal["prefix_sum"] = "prefix_sum"
    examples: int = Field(default=10_000, ge=5, le=10_000_000)
    """Strings of each length, training and held out together. A length with no more strings than this has all of them in both."""
    data_seed: int = Field(default=0, ge=0, lt=2**31)
    """Draws the sets. A run's own seed only orders them."""


class MazeTask(Spec):
    """The easy-to-hard benchmark's mazes (arXiv 2106.04537, 2202.05826): mark the way from start to end.

    A length is the side of the square, odd; a maze of side s has s^2 positions, row by row. The benchmark's sides are 9 to 59.
    """

    kind: Literal["maze"] = "maze"
    train_examples: int = Field(default=50_000, ge=1, le=10_000_000)
    """Training mazes of each side."""
    held_out_examples: int = Field(default=10_000, ge=1, le=10_000_000)
    """Held-out mazes of each side, drawn apart."""
    data_seed: int = Field(default=0, ge=0, lt=2**31)
    """Draws the mazes. A run's own seed only orders them."""
    folder: str | None = None
    """Folder that generated mazes are kept in for the next process. Empty: every process generates what it needs."""


class ChessTask(Spec):
    """Chess puzzles as in the easy-to-hard benchmark (arXiv 2106.04537): mark where the best move starts and ends.

    A length is the side of the board, 8; a board has 64 positions.
    """

    kind: Literal["chess"] = "chess"
    file: str
    """CSV of Lichess puzzles, unpacked: https://database.lichess.org/#puzzles (lichess_db_puzzle.csv.zst, public domain). Of each
    row the first four fields count: PuzzleId, FEN, Moves, Rating."""
    train_examples: int = Field(default=600_000, ge=1)
    """The easiest puzzles, by rating, that are trained on."""
    held_out_examples: int = Field(default=100_000, ge=1)
    """The puzzles next in rating, held out."""


TaskSpec = Annotated[
    WordTask | TextTask | InstalledTask | ParityTask | IncrementTask | PrefixSumTask | MazeTask | ChessTask,
    Field(discriminator="kind"),
]
