"""What a report says, before it is a page: its facts, and a section a finding. Pages and Markdown are made from it, and agree.

A report is JSON data; any field of it may be missing or null where a study has nothing yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopcore.reports.series import describe
from loopcore.reports.values import (
    DASH,
    Table,
    Value,
    duration,
    estimate_of,
    heading,
    is_flat,
    is_number,
    moment,
    pairs_of,
    spoken,
    table_of,
    tables_of,
    text_of,
    value_of,
)
from loopcore.studies.base import plain

__all__ = ["MARKS", "Content", "Picture", "Section", "content_of"]

RUNS = "Every run"

MARKS = (
    ("A", "said in the abstract"),
    ("N", "from second-hand notes"),
    ("R", "measured by a public reproduction"),
    ("M", "measured before on two CPU cores"),
    ("?", "our own proposal"),
)
"""What the letters behind published figures mean (PAPERS.md)."""

# Told in their own place, not among the further figures.
TOLD = ("statement", "rule", "rows", "plots")


@dataclass(frozen=True)
class Picture:
    """A plot of a finding."""

    name: str
    """Unique in its report, and the name of its file: `1a-1`."""
    title: str
    note: str
    words: str
    """The plot described for those who do not see it."""
    plot: Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """One finding."""

    id: str
    anchor: str
    title: str
    verdict: str
    statement: str
    rule: str
    reason: str
    published: str
    measured: Value
    unit: str
    seeds: Value
    seconds: Value
    pictures: tuple[Picture, ...]
    rows: Table | None
    details: tuple[Table, ...]

    @property
    def basis(self) -> str:
        """What the figure rests on."""
        parts = []
        if self.seeds.exact is not None:
            parts.append(f"{self.seeds.text} {'seed' if self.seeds.exact == 1 else 'seeds'}")
        if self.seconds.exact is not None:
            parts.append(f"{self.seconds.text} of jobs")
        return ", ".join(parts)


@dataclass(frozen=True)
class Content:
    """A report as a reader meets it."""

    title: str
    study: str
    facts: tuple[tuple[str, str], ...]
    """What was asked, when, and what it cost."""
    tally: tuple[tuple[str, int], ...]
    """Verdict to the number of findings that came to it."""
    command: str
    provenance: tuple[tuple[str, str], ...]
    packages: Table | None
    sections: tuple[Section, ...]

    @property
    def pictures(self) -> list[Picture]:
        """Of all findings, in their order."""
        return [picture for section in self.sections for picture in section.pictures]


def content_of(report: Mapping[str, Any]) -> Content:
    """Reads a report; see the module."""
    report = plain(report)
    provenance = _mapping(report.get("provenance"))
    sections = _sections([one for one in report.get("findings") or () if isinstance(one, dict)])
    verdicts = [section.verdict for section in sections]
    known = ("shown", "not shown", "undecided")
    order = [*known, *sorted(set(verdicts) - set(known))]
    return Content(
        title=text_of(report.get("title")) or text_of(report.get("study")) or "Report",
        study=text_of(report.get("study")),
        facts=_facts(report),
        tally=tuple((verdict, verdicts.count(verdict)) for verdict in order if verdict in verdicts),
        command=text_of(report.get("command")),
        provenance=_provenance(report, provenance),
        packages=_packages(provenance.get("packages")),
        sections=sections,
    )


# --- the head of a report


def _facts(report: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    cost = _mapping(report.get("cost"))
    begun = moment(report.get("created_at"))
    again = moment(report.get("started_at"))
    facts = [
        ("Study", " ".join(filter(None, (text_of(report.get("study")), _hash(report.get("id")))))),
        ("Scale", text_of(report.get("scale"))),
        ("Asked for", _asked(_mapping(report.get("asked")))),
        ("Started", begun),
        ("Started again", again if again != begun else ""),
        ("Cancelled", moment(report.get("cancelled_at"))),
        ("Finished", "not yet: this is what there is so far" if _unfinished(report) else moment(report.get("finished_at"))),
        ("Jobs", _jobs(cost)),
        ("Job time", "" if cost.get("seconds") is None else duration(cost["seconds"])),
        ("Machine", value_of(report.get("machine")).text),
    ]
    return tuple((name, text) for name, text in facts if text and text != DASH)


def _unfinished(report: Mapping[str, Any]) -> bool:
    return "finished_at" in report and report["finished_at"] is None and report.get("cancelled_at") is None


def _hash(number: Any) -> str:
    return "" if number is None else f"(no. {text_of(number)})"


def _asked(asked: Mapping[str, Any]) -> str:
    parts = []
    for name, value in asked.items():
        if value is not None and value != []:
            parts.append(f"{spoken(name)}: {value_of(value).text}")
    return "; ".join(parts) or "the study's own seeds, groups and demands"


def _jobs(cost: Mapping[str, Any]) -> str:
    """How many there are, and how many of them are in which state."""
    states = [f"{text_of(count)} {spoken(state)}" for state, count in cost.items() if state not in ("jobs", "seconds") and count]
    if not is_number(cost.get("jobs")):
        return ", ".join(states)
    return f"{text_of(cost['jobs'])} ({', '.join(states)})" if states else text_of(cost["jobs"])


def _provenance(report: Mapping[str, Any], provenance: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    found = [
        (spoken(name), value_of(value).text) for name, value in provenance.items() if name != "packages" and value is not None
    ]
    return tuple((name, text) for name, text in found if text != DASH)


def _packages(packages: Any) -> Table | None:
    if isinstance(packages, dict) and packages:
        return Table(
            "Packages",
            ("package", "version"),
            tuple((Value(text_of(name)), value_of(packages[name])) for name in packages),
            (False, False),
        )
    if isinstance(packages, list) and packages:
        return Table("Packages", ("package",), tuple((value_of(one),) for one in packages), (False,))
    return None


# --- findings


def _sections(findings: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
    anchors: set[str] = set()
    return tuple(_section(finding, _anchor(finding, anchors)) for finding in findings)


def _anchor(finding: Mapping[str, Any], taken: set[str]) -> str:
    """The finding's id as a part of file names and links."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", text_of(finding.get("id"))).strip("-")[:40] or "finding"
    anchor, number = stem, 2
    while anchor in taken:
        anchor, number = f"{stem}-{number}x", number + 1
    taken.add(anchor)
    return anchor


def _section(finding: Mapping[str, Any], anchor: str) -> Section:
    detail = _mapping(finding.get("detail"))
    rows = [row for row in detail.get("rows") or () if isinstance(row, dict)]
    seconds, seeds = finding.get("seconds"), finding.get("seeds")
    return Section(
        id=text_of(finding.get("id")) or DASH,
        anchor=anchor,
        title=text_of(finding.get("title")) or "Untitled",
        verdict=text_of(finding.get("verdict")) or "undecided",
        statement=text_of(detail.get("statement")),
        rule=text_of(detail.get("rule")),
        reason=text_of(finding.get("reason")),
        published=text_of(finding.get("published")) or DASH,
        measured=estimate_of(finding.get("measured"), finding.get("low"), finding.get("high")),
        unit=text_of(finding.get("unit")),
        seeds=value_of(seeds),
        seconds=Value(duration(seconds), seconds if is_number(seconds) else None),
        pictures=tuple(_pictures(detail.get("plots"), anchor)),
        rows=table_of(RUNS, rows) if rows else None,
        details=tuple(_details(detail)),
    )


def _pictures(plots: Any, anchor: str) -> Iterable[Picture]:
    known = [plot for plot in plots or () if isinstance(plot, dict) and plot.get("kind") in ("xy", "heat")]
    for number, plot in enumerate(known, 1):
        yield Picture(f"{anchor}-{number}", text_of(plot.get("title")), text_of(plot.get("note")), text_of(describe(plot)), plot)


def _details(detail: Mapping[str, Any]) -> Iterable[Table]:
    further = {key: value for key, value in detail.items() if key not in TOLD}
    figures = {key: value for key, value in further.items() if is_flat(value)}
    if figures:
        yield pairs_of("Further figures", figures)
    for key, value in further.items():
        if key not in figures:
            yield from tables_of(heading(key), value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
