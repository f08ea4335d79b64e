"""Reports: what a page and a Markdown file say is what the report says, and nothing else."""

from __future__ import annotations

from pathlib import Path

from loopcore.reports import write
from tests.unit.made_up_report import report


def test_the_files_of_a_report(tmp_path: Path) -> None:
    written = write(report("budget-law", "smoke", seeds=2), tmp_path)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in written) == [
        *(f"plots/{name}.svg" for name in ("1a-1", "1a-2", "1a-3", "1a-4", "1b-1")),
        "report.html",
        "report.json",
        "report.md",
    ]
    assert all(path.stat().st_size > 0 for path in written)
