"""Chess puzzles as in the easy-to-hard benchmark (arXiv 2106.04537): mark where the best move starts and ends.

The puzzles come from a file given by the user, in the format of https://database.lichess.org/#puzzles (CSV, public domain, CC0;
`zstd -d lichess_db_puzzle.csv.zst` unpacks it). Nothing is downloaded. A row's FEN is the position before the opponent's move;
the first of its moves leads to the puzzle, the second is the answer. Puzzles are ordered by rating; the easiest train.

**Length is the side of the board, 8.** A batch has N = 64 positions: a1, b1, .. h1, a2, .. h8. Tokens: 0 empty, 1..6 king,
queen, bishop, knight, rook, pawn of the side to move, 7..12 of the other. As in the benchmark the board is not turned for Black.
Targets: 1 on the square the answer moves from and on the one it moves to. Shapes: B boards, M puzzles of a split.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from loopcore.errors import InputError, LengthError, UnknownSymbol
from loopcore.specs.task import CHESS_SIDE, ChessTask
from loopcore.tasks.pools import rows_of_batch
from loopcore.tasks.task import Batch, Split

__all__ = ["SQUARES", "Board", "Chess", "after_move", "parse_board", "square"]

SIDE = CHESS_SIDE
SQUARES = SIDE * SIDE
OWN, OTHER = "KQBNRP", "kqbnrp"
EMPTY = "."
_MOVE = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
_WHERE = "https://database.lichess.org/#puzzles"


class Board(NamedTuple):
    """Where the pieces are and who is to move: all of a position that a puzzle's input shows."""

    pieces: str
    """64 letters from a1 to h8, White's upper case, `.` for an empty square."""
    white: bool
    """Whether White is to move."""

    def tokens(self) -> list[int]:
        """64 tokens, seen by the side to move."""
        alphabet = EMPTY + OWN + OTHER if self.white else EMPTY + OTHER + OWN
        return [alphabet.index(piece) for piece in self.pieces]


def square(name: str) -> int:
    """Number of a square such as `e4`: 8 (rank - 1) + file."""
    return SIDE * (int(name[1]) - 1) + "abcdefgh".index(name[0])


def parse_board(fen: str) -> Board:
    """The board of a FEN; without a second field White is to move. Raises UnknownSymbol and LengthError."""
    fields = fen.split()
    if not fields:
        raise LengthError("the position is empty; give a FEN such as 8/8/8/8/8/4k3/4p3/4K3 w")
    rows = []
    for row in fields[0].split("/"):
        for letter in row:
            if letter not in OWN + OTHER + "12345678":
                raise UnknownSymbol(f"{letter!r} is no piece; expected KQBNRP, kqbnrp, 1 to 8 or / in a FEN")
        rows.append("".join(EMPTY * int(letter) if letter.isdigit() else letter for letter in row))
    if len(rows) != SIDE or any(len(row) != SIDE for row in rows):
        raise LengthError(
            f"a FEN has 8 ranks of 8 squares, got {len(rows)} of {sorted({len(row) for row in rows})}: {fields[0]!r}"
        )
    if len(fields) > 1 and fields[1] not in ("w", "b"):
        raise UnknownSymbol(f"expected w or b as the side to move, got {fields[1]!r}")
    return Board("".join(reversed(rows)), len(fields) < 2 or fields[1] == "w")


def after_move(board: Board, move: str) -> Board:
    """The board after a legal move in long notation: `e2e4`, `e7e8q`, castling as the king's move `e1g1`.

    Legality is not checked; the file's moves are legal. Raises UnknownSymbol for what is no move, or moves no piece.
    """
    if not _MOVE.fullmatch(move):
        raise UnknownSymbol(f"expected a move such as e2e4 or e7e8q, got {move!r}")
    pieces, source, target = list(board.pieces), square(move[:2]), square(move[2:4])
    piece = pieces[source]
    if piece == EMPTY:
        raise UnknownSymbol(f"the move {move} starts on an empty square")
    if piece in "Pp" and source % SIDE != target % SIDE and pieces[target] == EMPTY:  # en passant
        pieces[SIDE * (source // SIDE) + target % SIDE] = EMPTY
    if piece in "Kk" and abs(source - target) == 2:  # castling: the rook jumps over
        corner = source - source % SIDE + (SIDE - 1 if target > source else 0)
        pieces[(source + target) // 2], pieces[corner] = pieces[corner], EMPTY
    pieces[source] = EMPTY
    pieces[target] = piece if len(move) == 4 else move[4].upper() if piece == "P" else move[4]
    return Board("".join(pieces), not board.white)


class Chess:
    """The puzzles of `spec.file`, read on the first draw, so that a model can be served where its file is not."""

    score: Literal["exact"] = "exact"
    name = "chess puzzles"
    vocabulary = 1 + len(OWN + OTHER)
    classes = 2
    grid = 2
    palette = tuple(tuple(float(plane == token) for plane in range(1, 13)) for token in range(13))
    """The benchmark's raw input of a convnet, by token: twelve planes, the own six pieces first."""

    def __init__(self, spec: ChessTask) -> None:
        self.spec = spec

    @property
    def fingerprint(self) -> str:
        """Raises as `random_batch`."""
        _, _, digest = self._puzzles
        return f"chess/{digest[:32]}/{self.spec.train_examples}/{self.spec.held_out_examples}/1"

    @property
    def _puzzles(self) -> tuple[Tensor, Tensor, str]:
        path = Path(self.spec.file).expanduser().absolute()
        return _read_puzzles(path, self.spec.train_examples + self.spec.held_out_examples)

    def examples(self, split: Split) -> Batch:
        """Every puzzle of a split with its answer, by rising rating, uint8 [M, 64] both. Raises InputError as `random_batch`."""
        tokens_MN, targets_MN, _ = self._puzzles
        train = self.spec.train_examples
        part = slice(0, train) if split == "train" else slice(train, None)
        return Batch(tokens_MN[part], targets_MN[part])

    def random_batch(self, *, seed: int, split: Split, index: int, size: int, length: int = SIDE) -> Batch:
        """Batch `index` of a stream that goes through the split epoch by epoch: a pure function of the file and the arguments.

        Raises LengthError for a length other than 8, InputError for a file that cannot be read or has too few puzzles.
        """
        if length != SIDE:
            raise LengthError(f"a chess board's length is its side, 8; got {length}")
        tokens_MN, targets_MN = self.examples(split)
        rows_B = rows_of_batch(len(tokens_MN), "chess", seed, split, index=index, size=size)
        return Batch(tokens_MN[rows_B].long(), targets_MN[rows_B].long())

    def encode(self, text: str) -> list[int]:
        """64 tokens of a FEN, seen by its side to move. Raises UnknownSymbol and LengthError."""
        return parse_board(text).tokens()

    def decode(self, tokens: Sequence[int]) -> str:
        """FEN of a board with the side to move as White; of answers, `.` and `x`, the eighth rank first, ranks parted by /."""
        if len(tokens) != SQUARES:
            raise LengthError(f"a board has {SQUARES} squares, got {len(tokens)} tokens")
        if not all(0 <= token < self.vocabulary for token in tokens):
            raise UnknownSymbol(f"expected tokens 0 to {self.vocabulary - 1}, got {max(tokens, key=abs)}")
        # A board has two kings, the other side's being 7: what has only 0 and 1 is an answer.
        marks = max(tokens) < 2
        text = "".join((".x" if marks else EMPTY + OWN + OTHER)[token] for token in tokens)
        ranks = [text[row : row + SIDE] for row in range(SQUARES - SIDE, -1, -SIDE)]
        if marks:
            return "/".join(ranks)
        return "/".join(re.sub(r"\.+", lambda run: str(len(run[0])), rank) for rank in ranks) + " w"


@functools.lru_cache(maxsize=2)
def _read_puzzles(path: Path, count: int) -> tuple[Tensor, Tensor, str]:
    """The `count` easiest puzzles: tokens and targets, uint8 [M, 64], and a digest of both. Equal ratings keep their order."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            puzzles = heapq.nsmallest(count, _puzzle_rows(csv.reader(file), path), key=lambda row: row[0])
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise InputError(
            f"cannot read the puzzles {path}: {getattr(problem, 'strerror', None) or problem}; name a CSV of Lichess puzzles, "
            f"unpacked ({_WHERE})"
        ) from None
    if len(puzzles) < count:
        raise InputError(
            f"{path} has {len(puzzles)} puzzles, {count} were asked for; lower the task's train_examples and held_out_examples, "
            f"or take the whole file from {_WHERE}"
        )
    tokens_MN = torch.empty(count, SQUARES, dtype=torch.uint8)
    targets_MN = torch.zeros(count, SQUARES, dtype=torch.uint8)
    for m, (_, fen, moves) in enumerate(puzzles):
        try:
            first, answer = moves.split()[:2]
            board = after_move(parse_board(fen), first)
            after_move(board, answer)
        except ValueError as problem:  # UnknownSymbol and LengthError are ValueErrors, too
            raise InputError(f"{path} has a puzzle that cannot be read: {problem} (FEN {fen!r}, moves {moves!r})") from None
        tokens_MN[m] = torch.tensor(board.tokens(), dtype=torch.uint8)
        targets_MN[m, [square(answer[:2]), square(answer[2:4])]] = 1
    digest = hashlib.sha256(tokens_MN.numpy().data)
    digest.update(targets_MN.numpy().data)
    return tokens_MN, targets_MN, digest.hexdigest()


def _puzzle_rows(rows: Iterable[list[str]], path: Path) -> Iterator[tuple[int, str, str]]:
    """Rating, FEN and moves of every row but a heading; one at a time, since the whole file has millions."""
    for line, row in enumerate(rows, 1):
        if not row or row[0] == "PuzzleId":
            continue
        try:
            yield int(row[3]), row[1], row[2]
        except (IndexError, ValueError):
            raise InputError(
                f"line {line} of {path} is no puzzle: expected PuzzleId,FEN,Moves,Rating,.. with a whole number as the rating"
            ) from None
