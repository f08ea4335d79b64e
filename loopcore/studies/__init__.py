"""One file a published finding: which jobs it needs, and how what they measured becomes one verdict. Imports no torch.

cells = find_study("budget-law").cells("smoke")
find_study("budget-law").summarize(Measured(cells, {cell.name: CellResult(...) for cell in cells}))
"""

from __future__ import annotations

from importlib.metadata import entry_points

from loopcore.errors import InputError
from loopcore.studies.base import SCALES, Ask, Cell, Claim, Finding, ProbeRequest, Study, cell_keys
from loopcore.studies.deeploop import DEEPLOOP
from loopcore.studies.inside_the_loop import INSIDE_THE_LOOP, PARTS
from loopcore.studies.measured import CellResult, Measured, Row
from loopcore.studies.transfer_study import TRANSFER
from loopcore.studies.verdicts import Estimate, Verdict

__all__ = [
    "INSIDE_THE_LOOP",
    "SCALES",
    "STUDIES",
    "Ask",
    "Cell",
    "CellResult",
    "Claim",
    "Estimate",
    "Finding",
    "Measured",
    "ProbeRequest",
    "Row",
    "Study",
    "Verdict",
    "cell_keys",
    "find_study",
    "study_names",
]

ENTRY_POINTS = "loopcore.studies"

STUDIES: dict[str, Study] = {study.name: study for study in (*PARTS, INSIDE_THE_LOOP, DEEPLOOP, TRANSFER)}
"""The studies that come with Loopcore, by the name a user types."""


def study_names() -> list[str]:
    """Names of all studies: Loopcore's own, then those that installed packages bring."""
    return [*STUDIES, *sorted(entry_points(group=ENTRY_POINTS).names - STUDIES.keys())]


def find_study(name: str) -> Study:
    """The study of that name; entry points of the group `loopcore.studies` name a `Study`. Raises InputError for unknown ones."""
    if name in STUDIES:
        return STUDIES[name]
    found = entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        raise InputError(
            f"no study is called {name!r}; expected one of {', '.join(study_names())} (installed packages bring more by entry "
            f"points of the group {ENTRY_POINTS})"
        )
    study = found[name].load()
    if not isinstance(study, Study):
        raise InputError(f"the entry point {name!r} of the group {ENTRY_POINTS} is a {type(study).__name__}, expected a Study")
    return study
