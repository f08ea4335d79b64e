"""Every finding of Inside the Loop (arXiv 2607.20594), 1a to 6, sharing the cells that its studies have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from loopcore.studies.architecture_prior import ARCHITECTURE_PRIOR
from loopcore.studies.base import Ask, Cell, Finding, Study
from loopcore.studies.budget_law import BUDGET_LAW
from loopcore.studies.easy_to_hard import EASY_TO_HARD
from loopcore.studies.halting import HALTING
from loopcore.studies.input_schedule import INPUT_SCHEDULE
from loopcore.studies.instruments import INSTRUMENTS
from loopcore.studies.measured import Measured
from loopcore.studies.portability import PORTABILITY
from loopcore.studies.walls import WALLS

__all__ = ["INSIDE_THE_LOOP", "PARTS"]

PARTS = (BUDGET_LAW, HALTING, ARCHITECTURE_PRIOR, WALLS, PORTABILITY, INPUT_SCHEDULE, INSTRUMENTS, EASY_TO_HARD)


def work(ask: Ask) -> Iterator[Cell]:
    """The cells of all parts; groups of the user's choice go to the parts that take them."""
    for part in PARTS:
        yield from part.work(ask if part.takes_groups else replace(ask, groups=None))


def summary(measured: Measured) -> list[Finding]:
    # A part reads the cells of its own role, so that what others asked for changes nothing in its figures.
    return [finding for part in PARTS for finding in part.summarize(measured)]


INSIDE_THE_LOOP = Study(
    "inside-the-loop",
    "Inside the Loop, every finding",
    tuple(claim for part in PARTS for claim in part.claims),
    work,
    summary,
)
