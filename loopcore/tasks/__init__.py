"""What a model is trained on: sequences with a right answer at every position."""

from __future__ import annotations

from importlib.metadata import entry_points

from loopcore.errors import InputError
from loopcore.specs.task import (
    BUILT_IN,
    ChessTask,
    IncrementTask,
    InstalledTask,
    MazeTask,
    ParityTask,
    PrefixSumTask,
    TaskSpec,
    TextTask,
    WordTask,
)
from loopcore.tasks.bits import Increment, Parity, PrefixSums
from loopcore.tasks.chess import Chess
from loopcore.tasks.groups import Group, finite_group
from loopcore.tasks.mazes import Mazes
from loopcore.tasks.task import Batch, Split, Task
from loopcore.tasks.text import Text
from loopcore.tasks.words import WordProblem

__all__ = [
    "Batch",
    "Chess",
    "Group",
    "Increment",
    "Mazes",
    "Parity",
    "PrefixSums",
    "Split",
    "Task",
    "Text",
    "WordProblem",
    "finite_group",
    "load_task",
]

ENTRY_POINTS = "loopcore.tasks"


def load_task(spec: TaskSpec) -> Task:
    """The task of `spec`. Raises UnknownGroup, and InputError for the name of a task that no installed package brings."""
    match spec:
        case WordTask():
            return WordProblem(spec)
        case TextTask():
            return Text(spec)
        case ParityTask():
            return Parity(spec)
        case IncrementTask():
            return Increment(spec)
        case PrefixSumTask():
            return PrefixSums(spec)
        case MazeTask():
            return Mazes(spec)
        case ChessTask():
            return Chess(spec)
        case InstalledTask():
            return _installed(spec)


def _installed(spec: InstalledTask) -> Task:
    found = entry_points(group=ENTRY_POINTS)
    if spec.name not in found.names:
        brought = ", ".join(sorted(found.names - set(BUILT_IN))) or "none"
        raise InputError(
            f"no installed package brings a task {spec.name!r}; expected one of {brought} "
            f"(entry points of the group {ENTRY_POINTS}): install the package that has it"
        )
    return found[spec.name].load()(spec)
