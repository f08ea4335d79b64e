"""Mazes: a spanning tree, its only way, the benchmark's picture of it, and the folder that keeps them."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import networkx as nx
import pytest
import torch

from loopcore.errors import InputError, LengthError, UnknownSymbol
from loopcore.specs import MazeTask, TrainSpec
from loopcore.tasks import Mazes, load_task
from loopcore.tasks.mazes import END, START, WALL, images, shortest_way

SMALL = MazeTask(train_examples=60, held_out_examples=20)

BY_HAND = """
S#...
.#.#.
...#.
####.
E....
"""


def graph(tokens: list[int], side: int) -> nx.Graph:
    """Free positions, joined where they touch."""
    grid = nx.Graph(nx.grid_2d_graph(side, side))
    grid.remove_nodes_from([divmod(i, side) for i, token in enumerate(tokens) if token == WALL])
    return grid


@pytest.mark.parametrize("side", [3, 5, 9, 13, 59])
def test_a_maze_is_a_spanning_tree_and_its_answer_the_only_way(side: int) -> None:
    task = Mazes(MazeTask(train_examples=8))
    batch = task.random_batch(seed=0, split="train", index=0, size=8, length=side)
    assert batch.tokens.shape == batch.targets.shape == (8, side * side)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    cells = ((side + 1) // 2) ** 2
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        maze = graph(tokens, side)
        assert nx.is_tree(maze)
        assert maze.number_of_nodes() == 2 * cells - 1  # every cell, and an opening for each edge of the tree
        assert all((2 * row, 2 * column) in maze for row in range((side + 1) // 2) for column in range((side + 1) // 2))
        start, end = divmod(tokens.index(START), side), divmod(tokens.index(END), side)
        assert start[0] % 2 == start[1] % 2 == end[0] % 2 == end[1] % 2 == 0
        way = nx.shortest_path(maze, start, end)
        assert [divmod(at, side) for at in shortest_way(tokens)] == way
        assert {divmod(i, side) for i, marked in enumerate(targets) if marked} == set(way)
        assert task.answer(tokens) == targets


def test_breadth_first_distances_agree() -> None:
    """An independent search: distances from the start grow by one along the answer."""
    tokens = Mazes(SMALL).random_batch(seed=1, split="train", index=0, size=1, length=21).tokens[0].tolist()
    distance, waiting = {tokens.index(START): 0}, deque([tokens.index(START)])
    while waiting:
        at = waiting.popleft()
        for step in (-21, 21, -1, 1):
            there = at + step
            same_row = there // 21 == at // 21
            if 0 <= there < 441 and (abs(step) == 21 or same_row) and tokens[there] != WALL and there not in distance:
                distance[there] = distance[at] + 1
                waiting.append(there)
    assert [distance[at] for at in shortest_way(tokens)] == list(range(distance[tokens.index(END)] + 1))


def test_ends_are_uniform_over_pairs_of_cells() -> None:
    tokens_MN, _ = Mazes(MazeTask(train_examples=12_000)).examples("train", 3)
    pairs = [(row.index(START), row.index(END)) for row in tokens_MN.tolist()]
    counts = [pairs.count((a, b)) for a in (0, 2, 6, 8) for b in (0, 2, 6, 8) if a != b]
    assert counts == pytest.approx([1000] * 12, abs=150)  # deviation 30
    trees = {tuple(min(token, 1) for token in row) for row in tokens_MN.tolist()}
    assert len(trees) == 4  # of a square of four cells


def test_splits_seeds_and_sets() -> None:
    task, other = Mazes(SMALL), Mazes(SMALL.model_copy(update={"data_seed": 1}))
    train, held_out = task.examples("train", 13).tokens, task.examples("held_out", 13).tokens
    assert (len(train), len(held_out)) == (60, 20)
    assert not {bytes(row) for row in train.numpy()} & {bytes(row) for row in held_out.numpy()}
    assert not torch.equal(train, other.examples("train", 13).tokens)
    assert len({task.fingerprint, other.fingerprint, Mazes(MazeTask()).fingerprint}) == 3
    batches = [task.random_batch(seed=seed, split="train", index=0, size=60, length=13).tokens for seed in (0, 0, 1)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert sorted(batches[2].tolist()) == sorted(train.long().tolist())


def test_the_folder_keeps_what_was_generated(tmp_path: Path) -> None:
    spec = MazeTask(train_examples=30, held_out_examples=10, folder=str(tmp_path / "mazes"))
    kept = Mazes(spec).random_batch(seed=0, split="train", index=0, size=10, length=9)
    (file,) = (tmp_path / "mazes").iterdir()
    assert file.name == "mazes-1-train-side9-30-seed0.safetensors"
    in_memory = MazeTask(train_examples=30, held_out_examples=10)
    assert torch.equal(kept.tokens, Mazes(in_memory).random_batch(seed=0, split="train", index=0, size=10, length=9).tokens)
    assert Mazes(spec).fingerprint == Mazes(in_memory).fingerprint


def test_the_picture_is_the_benchmarks() -> None:
    task = Mazes(SMALL)
    picture = images(torch.tensor([task.encode(BY_HAND)]))[0]
    assert picture.shape == (3, 16, 16)
    assert images(torch.zeros(2, 81, dtype=torch.long)).shape == (2, 3, 24, 24)  # the benchmark's 9 x 9
    assert picture[:, :3].max() == picture[:, :, -3:].max() == 0.0  # frame and outer wall are black
    assert picture[:, 3:5, 3:5].flatten(1).unique(dim=1).squeeze(-1).tolist() == [0.0, 1.0, 0.0]  # green start
    assert picture[:, 11:13, 3:5].flatten(1).unique(dim=1).squeeze(-1).tolist() == [1.0, 0.0, 0.0]  # red end
    assert picture[:, 3:5, 5:7].max() == 0.0  # the wall right of the start
    assert picture[:, 5:7, 3:5].min() == 1.0  # the way below it


def test_text() -> None:
    task = Mazes(SMALL)
    tokens = task.encode(BY_HAND)
    assert task.decode(tokens) == BY_HAND.strip()
    assert task.encode(task.decode(tokens)) == tokens
    assert task.decode(task.answer(tokens)) == ".#...\n.#.#.\n...#.\n####.\n....."
    assert torch.equal(task.open(torch.tensor([tokens])).long(), (torch.tensor([tokens]) != 0).long())
    with pytest.raises(LengthError, match="as many symbols a row as rows"):
        task.encode("S.E ...")
    with pytest.raises(LengthError, match="odd number from 3 to 59, got 2"):
        task.encode("S. .E")
    with pytest.raises(UnknownSymbol, match="'x'"):
        task.encode("S.. .x. ..E")
    with pytest.raises(UnknownSymbol, match="one start S and one end E, got 2 and 1"):
        task.encode("S.S ... ..E")
    with pytest.raises(LengthError, match="a maze is a square"):
        task.decode([0] * 8)
    with pytest.raises(UnknownSymbol, match="got 7"):
        task.decode([7] * 9)
    with pytest.raises(InputError, match="no way leads from S to E"):
        task.answer(task.encode("S#. ##. ..E"))


@pytest.mark.parametrize("side", [1, 8, 61])
def test_a_side_that_is_none(side: int) -> None:
    with pytest.raises(LengthError, match="odd number from 3 to 59"):
        Mazes(SMALL).random_batch(seed=0, split="train", index=0, size=1, length=side)


def test_the_spec_names_the_task() -> None:
    square = {"contract": {"lengths": [9]}, "model": {"causal": False, "positions": "rope"}}
    task = load_task(TrainSpec.model_validate({"task": {"kind": "maze"}, **square}).task)
    assert isinstance(task, Mazes)
    assert (task.vocabulary, task.classes, task.score) == (4, 2, "exact")
