"""Mazes of the easy-to-hard benchmark (arXiv 2106.04537, 2202.05826), generated here: mark the way from start to end.

A maze of side S, odd, has ((S + 1) / 2)^2 cells at the even rows and columns and, between two neighbours, a wall or an opening.
Openings form a spanning tree, grown depth first from the start cell with a uniform choice among unvisited neighbours, so there
is exactly one way between two cells. The outer wall is not part of the grid.

**Length is the side S.** A batch has N = S^2 positions, row by row. Tokens: 0 wall, 1 free, 2 start, 3 end. Targets: 1 on the way
(start and end too), else 0. The benchmark draws each position as two by two pixels inside an outer wall and a black frame,
2 S + 6 pixels a side: `images` does so.

Shapes: B mazes, S side, N = S^2 positions, K cells, M mazes of a set.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from loopcore.errors import InputError, LengthError, UnknownSymbol
from loopcore.specs.task import LARGEST_MAZE, MazeTask
from loopcore.tasks.pools import kept, rows_of_batch
from loopcore.tasks.task import Batch, Split, generator

__all__ = ["END", "FREE", "LARGEST_SIDE", "START", "WALL", "Mazes", "grown_mazes", "images", "shortest_way"]

WALL, FREE, START, END = range(4)
SYMBOLS = "#.SE"
LARGEST_SIDE = LARGEST_MAZE
_AT_ONCE = 10_000  # mazes grown in step with each other


class Mazes:
    """The mazes of `spec`, a training and a held-out set for each side, drawn apart by `spec.data_seed`.

    Two sets of the benchmark's sizes (50,000 and 10,000) share half of their mazes at side 7, one in two hundred at side 9 and
    none from side 11 on; sides 3 and 5 have few mazes at all.
    """

    score: Literal["exact"] = "exact"
    name = "mazes"
    vocabulary = len(SYMBOLS)
    classes = 2
    grid = 2
    palette = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0))
    """The benchmark's raw input of a convnet, by token: red, green and blue of black walls, white ways, green start, red end."""

    def __init__(self, spec: MazeTask) -> None:
        self.spec = spec
        self.fingerprint = f"maze/{spec.train_examples}/{spec.held_out_examples}/{spec.data_seed}/1"

    def examples(self, split: Split, length: int) -> Batch:
        """Every maze of a split and its answer, uint8 [M, N] both. Raises LengthError, and InputError for a folder that fails."""
        _check_side(length)
        count = self.spec.train_examples if split == "train" else self.spec.held_out_examples
        return _maze_set(count, self.spec.data_seed, split, length, self.spec.folder)

    def random_batch(self, *, seed: int, split: Split, index: int, size: int, length: int) -> Batch:
        """Batch `index` of a stream that goes through the split epoch by epoch: a pure function of the spec and the arguments.

        `length` is the side S; tokens and targets are [B, S^2].
        """
        mazes_MN, ways_MN = self.examples(split, length)
        rows_B = rows_of_batch(len(mazes_MN), "maze", seed, split, length, index=index, size=size)
        return Batch(mazes_MN[rows_B].long(), ways_MN[rows_B].long())

    def open(self, tokens_BN: Tensor) -> Tensor:
        """bool [B, N]: where there is no wall. The benchmark's loss and score count these positions only."""
        return tokens_BN != WALL

    def answer(self, tokens: Sequence[int]) -> list[int]:
        """The right answer: 1 on the shortest way, by breadth-first search. Raises as `check`, InputError where there is none."""
        way = set(shortest_way(tokens))
        return [int(at in way) for at in range(len(tokens))]

    def check(self, tokens: Sequence[int]) -> None:
        """Raises LengthError for what is no square of odd side, UnknownSymbol for a strange token, or not one start and end."""
        _check_square(tokens)
        for token in tokens:
            if not 0 <= token < len(SYMBOLS):
                raise UnknownSymbol(f"token {token} is none of a maze's; expected 0 (wall), 1 (free), 2 (start) or 3 (end)")
        if tokens.count(START) != 1 or tokens.count(END) != 1:
            raise UnknownSymbol(f"expected one start S and one end E, got {tokens.count(START)} and {tokens.count(END)}")

    def encode(self, text: str) -> list[int]:
        """Rows of # (wall), . (free), S and E, separated by spaces or line ends. Raises UnknownSymbol and LengthError."""
        rows = text.split()
        if any(len(row) != len(rows) for row in rows):
            raise LengthError(
                f"expected as many symbols a row as rows, got rows of {sorted({len(row) for row in rows})} in {len(rows)}"
            )
        for symbol in "".join(rows):
            if symbol not in SYMBOLS:
                raise UnknownSymbol(f"{symbol!r} is none of a maze's; expected # (wall), . (free), S (start) or E (end)")
        tokens = [SYMBOLS.index(symbol) for row in rows for symbol in row]
        self.check(tokens)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Rows of symbols, one a line; of answers, rows with . on the way and # off it. Raises LengthError and UnknownSymbol."""
        side = _check_square(tokens)
        if not all(0 <= token < len(SYMBOLS) for token in tokens):
            raise UnknownSymbol(f"expected tokens 0 to {len(SYMBOLS) - 1}, got {max(tokens, key=abs)}")
        text = "".join(SYMBOLS[token] for token in tokens)
        return "\n".join(text[row : row + side] for row in range(0, len(text), side))


def images(tokens_BN: Tensor) -> Tensor:
    """The benchmark's input, float32 [B, 3, 2 S + 6, 2 S + 6]: two by two pixels a position, an outer wall, a black frame."""
    side = math.isqrt(tokens_BN.shape[-1])
    colours_B3SS = torch.tensor(Mazes.palette)[tokens_BN].view(-1, side, side, 3).permute(0, 3, 1, 2)
    return F.pad(colours_B3SS.repeat_interleave(2, -1).repeat_interleave(2, -2), (3, 3, 3, 3))


def shortest_way(tokens: Sequence[int]) -> list[int]:
    """Positions of a shortest way from start to end, both included. Raises InputError where there is none.

    In a generated maze it is the only one, so its order is the one in which an answer can be found from the start.
    """
    side = math.isqrt(len(tokens))
    start, end = tokens.index(START), tokens.index(END)
    came_from: dict[int, int | None] = {start: None}
    waiting = deque([start])
    while waiting and end not in came_from:
        at = waiting.popleft()
        row, column = divmod(at, side)
        for there, inside in (
            (at - side, row > 0),
            (at + side, row < side - 1),
            (at - 1, column > 0),
            (at + 1, column < side - 1),
        ):
            if inside and tokens[there] != WALL and there not in came_from:
                came_from[there] = at
                waiting.append(there)
    if end not in came_from:
        raise InputError("no way leads from S to E; open a wall between them")
    way, at = [], end
    while at is not None:
        way.append(at)
        at = came_from[at]
    return way[::-1]


def grown_mazes(count: int, side: int, stream: torch.Generator) -> Batch:
    """`count` mazes of a side and their ways, uint8 [count, S^2] both, grown in step: one move of every maze at a time."""
    across = (side + 1) // 2
    K, N = across * across, side * side
    cell_K = torch.arange(K)
    place_K = 2 * side * (cell_K // across) + 2 * (cell_K % across)  # a cell's position in the grid
    # Neighbours up, down, left, right; K, a cell that always counts as visited, beyond the edge.
    row_K, column_K = cell_K // across, cell_K % across
    neighbour_K4 = torch.stack(
        [
            torch.where(row_K > 0, cell_K - across, K),
            torch.where(row_K < across - 1, cell_K + across, K),
            torch.where(column_K > 0, cell_K - 1, K),
            torch.where(column_K < across - 1, cell_K + 1, K),
        ],
        dim=-1,
    )
    start_B = torch.randint(K, (count,), generator=stream)
    end_B = (start_B + torch.randint(1, K, (count,), generator=stream)) % K  # uniform over the other cells
    every_B = torch.arange(count)
    mazes_BN = torch.zeros(count, N, dtype=torch.uint8)
    mazes_BN[every_B, place_K[start_B]] = FREE
    visited_BK = torch.zeros(count, K + 1, dtype=torch.bool)
    visited_BK[:, K] = True
    visited_BK[every_B, start_B] = True
    parent_BK = start_B.unsqueeze(-1).repeat(1, K)
    at_B, left_B = start_B.clone(), torch.full((count,), K - 1)
    while bool((left_B > 0).any()):
        next_B4 = neighbour_K4[at_B]
        unvisited_B4 = ~visited_BK.gather(1, next_B4)
        # The largest of independent uniform numbers is a uniform choice. The draw is made for finished mazes too: what a maze
        # looks like must not depend on when others are done.
        drawn_B4 = torch.rand(count, 4, generator=stream).masked_fill(~unvisited_B4, -1.0)
        chosen_B = next_B4.gather(1, drawn_B4.argmax(-1, keepdim=True)).squeeze(-1)
        moves_B = unvisited_B4.any(-1) & (left_B > 0)
        here_B, there_B, row_B = at_B[moves_B], chosen_B[moves_B], every_B[moves_B]
        visited_BK[row_B, there_B] = True
        parent_BK[row_B, there_B] = here_B
        mazes_BN[row_B, place_K[there_B]] = FREE
        mazes_BN[row_B, (place_K[here_B] + place_K[there_B]) // 2] = FREE
        left_B[moves_B] -= 1
        at_B = torch.where(moves_B, chosen_B, parent_BK[every_B, at_B])  # forward, or back from a dead end
    ways_BN = torch.zeros_like(mazes_BN)
    at_B = end_B
    for _ in range(K):
        before_B = parent_BK[every_B, at_B]
        ways_BN[every_B, place_K[at_B]] = 1
        ways_BN[every_B, (place_K[at_B] + place_K[before_B]) // 2] = 1
        if bool((at_B == start_B).all()):
            break
        at_B = before_B
    mazes_BN[every_B, place_K[start_B]] = START
    mazes_BN[every_B, place_K[end_B]] = END
    return Batch(mazes_BN, ways_BN)


@functools.lru_cache(maxsize=8)
def _maze_set(count: int, data_seed: int, split: Split, side: int, folder: str | None) -> Batch:
    def make() -> dict[str, Tensor]:
        parts = [
            grown_mazes(min(_AT_ONCE, count - first), side, generator("maze set", data_seed, split, side, first))
            for first in range(0, count, _AT_ONCE)
        ]
        return {"mazes": torch.cat([part.tokens for part in parts]), "ways": torch.cat([part.targets for part in parts])}

    place = None if folder is None else Path(folder).expanduser().absolute()
    tensors = kept(place, f"mazes-1-{split}-side{side}-{count}-seed{data_seed}", make)
    return Batch(tensors["mazes"], tensors["ways"])


def _check_side(side: int) -> None:
    if side < 3 or side % 2 == 0 or side > LARGEST_SIDE:
        raise LengthError(f"a maze's length is its side: expected an odd number from 3 to {LARGEST_SIDE}, got {side}")


def _check_square(tokens: Sequence[int]) -> int:
    side = math.isqrt(len(tokens))
    if side * side != len(tokens):
        raise LengthError(f"a maze is a square: expected S^2 tokens with S odd, got {len(tokens)}")
    _check_side(side)
    return side
