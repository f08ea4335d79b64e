"""Chess puzzles: moves on positions worked out by hand, and the file they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopcore.errors import InputError, LengthError, UnknownSymbol
from loopcore.specs import ChessTask, TrainSpec
from loopcore.tasks import Chess, load_task
from loopcore.tasks.chess import after_move, parse_board, square

OPENING = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
HEADING = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags"
# Fool's mate (White blunders g2g4, the queen mates), a back-rank mate for White, and a king that walks.
FOOL = "a1,rnbqkbnr/pppp1ppp/8/4p3/8/5P2/PPPPP1PP/RNBQKBNR w KQkq - 0 2,g2g4 d8h4,900,80,90,100,mate,x,y"
BACK_RANK = "b2,6k1/5ppp/8/8/8/8/r4PPP/3R2K1 b - - 0 1,a2b2 d1d8,600,80,90,100,mate,x,y"
WALK = "c3,8/8/8/8/8/4k3/4p3/4K3 w - - 0 1,e1f2 e3d2,900,80,90,100,endgame,x,y"


def placement(pieces: str) -> str:
    """The eighth rank first, as one reads a board."""
    return "/".join(pieces[row : row + 8] for row in range(56, -8, -8))


def test_squares_and_the_opening() -> None:
    assert [square(name) for name in ("a1", "h1", "a2", "e4", "h8")] == [0, 7, 8, 28, 63]
    board = parse_board(OPENING)
    assert board.white
    assert board.pieces[square("d1")] == "Q"
    assert board.pieces[square("e8")] == "k"
    assert board.tokens()[:8] == [5, 4, 3, 2, 1, 3, 4, 5]  # R N B Q K B N R
    assert board.tokens()[48:56] == [12] * 8
    black = parse_board(OPENING.replace(" w ", " b "))
    assert black.tokens()[56:] == [5, 4, 3, 2, 1, 3, 4, 5]  # the own pieces come first, the board is not turned
    assert black.tokens()[:8] == [11, 10, 9, 8, 7, 9, 10, 11]


@pytest.mark.parametrize(
    ("fen", "move", "expected"),
    [
        ("4k3/8/8/8/8/8/4P3/4K3 w", "e2e4", "....k.../......../......../......../....P.../......../......../....K..."),
        ("r3k3/8/8/8/8/8/8/4K2R w", "e1g1", "r...k.../......../......../......../......../......../......../.....RK."),
        ("r3k3/8/8/8/8/8/8/4K2R b", "e8c8", "..kr..../......../......../......../......../......../......../....K..R"),
        ("4k3/8/8/3pP3/8/8/8/4K3 w", "e5d6", "....k.../......../...P..../......../......../......../......../....K..."),
        ("4k3/8/8/8/3pP3/8/8/4K3 b", "d4e3", "....k.../......../......../......../......../....p.../......../....K..."),
        ("3rk3/4P3/8/8/8/8/8/4K3 w", "e7d8q", "...Qk.../......../......../......../......../......../......../....K..."),
        ("4k3/8/8/8/8/8/p7/4K3 b", "a2a1n", "....k.../......../......../......../......../......../......../n...K..."),
        ("4k3/8/8/3p4/4P3/8/8/4K3 w", "e4d5", "....k.../......../......../...P..../......../......../......../....K..."),
    ],
    ids=["double step", "castles short", "castles long", "en passant", "black en passant", "promotion", "to knight", "capture"],
)
def test_moves(fen: str, move: str, expected: str) -> None:
    board = parse_board(fen)
    after = after_move(board, move)
    assert placement(after.pieces) == expected
    assert after.white is not board.white


def test_bad_moves_and_positions() -> None:
    board = parse_board(OPENING)
    with pytest.raises(UnknownSymbol, match="e2e9"):
        after_move(board, "e2e9")
    with pytest.raises(UnknownSymbol, match="empty square"):
        after_move(board, "e4e5")
    with pytest.raises(UnknownSymbol, match="'X' is no piece"):
        parse_board("X7/8/8/8/8/8/8/8")
    with pytest.raises(UnknownSymbol, match="side to move"):
        parse_board("8/8/8/8/8/8/8/8 white")
    with pytest.raises(LengthError, match="8 ranks of 8"):
        parse_board("8/8/8")
    with pytest.raises(LengthError, match="empty"):
        parse_board("")


@pytest.mark.parametrize("heading", [True, False])
def test_puzzles_are_ordered_by_rating_and_shown_after_the_opponents_move(tmp_path: Path, heading: bool) -> None:
    file = tmp_path / "puzzles.csv"
    file.write_text("\n".join([*([HEADING] if heading else []), FOOL, BACK_RANK, WALK]) + "\n")
    task = Chess(ChessTask(file=str(file), train_examples=2, held_out_examples=1))
    tokens_MN, targets_MN = task.examples("train")
    # The easiest first; of equal ratings the file's first.
    assert torch.nonzero(targets_MN[0]).flatten().tolist() == [square("d1"), square("d8")]
    assert torch.nonzero(targets_MN[1]).flatten().tolist() == [square("h4"), square("d8")]
    assert tokens_MN[0, square("b2")] == 11  # the rook has moved; White, who answers, sees it as the other's
    assert tokens_MN[0, square("a2")] == 0
    assert tokens_MN[1, square("g4")] == 12  # White's pawn, seen by Black
    assert tokens_MN[1, square("d8")] == 2  # its queen
    held_out = task.random_batch(seed=0, split="held_out", index=0, size=3, length=8)
    assert held_out.tokens.shape == held_out.targets.shape == (3, 64)
    assert torch.nonzero(held_out.targets[2]).flatten().tolist() == [square("d2"), square("e3")]
    assert torch.equal(held_out.tokens[0], held_out.tokens[2])  # the only one, over and over
    again = Chess(ChessTask(file=str(file), train_examples=2, held_out_examples=1))
    assert again.fingerprint == task.fingerprint
    assert Chess(ChessTask(file=str(file), train_examples=1, held_out_examples=2)).fingerprint != task.fingerprint


def test_text() -> None:
    task = Chess(ChessTask(file="nowhere.csv"))  # the file is not read for this
    fen = "6k1/5ppp/8/8/8/8/r4PPP/3R2K1 w"
    assert task.decode(task.encode(fen)) == fen
    assert task.decode(task.encode("6K1/5PPP/8/8/8/8/R4ppp/3r2k1 b")) == fen
    answer = [0] * 64
    answer[square("d1")] = answer[square("d8")] = 1
    assert task.decode(answer) == "...x..../" + "......../" * 6 + "...x...."
    with pytest.raises(LengthError, match="64 squares, got 3"):
        task.decode([0, 1, 2])
    with pytest.raises(UnknownSymbol, match="got 13"):
        task.decode([13] * 64)
    assert len(task.palette) == task.vocabulary == 13
    assert {len(colour) for colour in task.palette} == {12}


def test_files_that_will_not_do(tmp_path: Path) -> None:
    def draw(file: Path, examples: int = 1) -> None:
        spec = ChessTask(file=str(file), train_examples=examples, held_out_examples=1)
        Chess(spec).random_batch(seed=0, split="train", index=0, size=1, length=8)

    with pytest.raises(InputError, match=r"cannot read the puzzles .*database\.lichess\.org"):
        draw(tmp_path / "none.csv")
    packed = tmp_path / "packed.csv"
    packed.write_bytes(b"\x28\xb5\x2f\xfd\x00\xff\xfe")
    with pytest.raises(InputError, match="unpacked"):
        draw(packed)
    few = tmp_path / "few.csv"
    few.write_text(FOOL + "\n")
    with pytest.raises(InputError, match="has 1 puzzles, 3 were asked for"):
        draw(few, 2)
    odd = tmp_path / "odd.csv"
    odd.write_text("a,b,c\n")
    with pytest.raises(InputError, match=r"line 1 .* is no puzzle"):
        draw(odd)
    odd_move = tmp_path / "move.csv"
    odd_move.write_text(FOOL.replace("d8h4", "") + "\n" + WALK + "\n")
    with pytest.raises(InputError, match="a puzzle that cannot be read"):
        draw(odd_move)
    with pytest.raises(LengthError, match="its side, 8; got 64"):
        Chess(ChessTask(file=str(few))).random_batch(seed=0, split="train", index=0, size=1, length=64)


def test_the_spec_names_the_task() -> None:
    board = {"contract": {"lengths": [8]}, "model": {"causal": False, "positions": "rope"}}
    task = load_task(TrainSpec.model_validate({"task": {"kind": "chess", "file": "puzzles.csv"}, **board}).task)
    assert isinstance(task, Chess)
    assert (task.vocabulary, task.classes, task.score) == (13, 2, "exact")
