"""What a report says, before it is a page: figures as text, tables, pictures. Pages and Markdown are made from it, and agree.

A report is JSON data; any field of it may be missing or null where a study has nothing yet. What is no figure reads as a dash.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from loopcore.reports.drawing import describe
from loopcore.studies.base import plain
from loopcore.studies.verdicts import Estimate

__all__ = ["DASH", "MARKS", "Content", "Picture", "Section", "Table", "Value", "content_of"]

DASH = "\N{EN DASH}"
RUNS = "Every run"
KEYED = ("", "value")

MARKS = (
    ("A", "said in the abstract"),
    ("N", "from second-hand notes"),
    ("R", "measured by a public reproduction"),
    ("M", "measured before on two CPU cores"),
    ("?", "our own proposal"),
)
"""What the letters behind published figures mean (PAPERS.md)."""

SPOKEN = {"dirty": "changed since (SHA-256)", "T_star": "T*", "T_train": "T_train", "r2": "R2", "rows": "runs"}
# Told in their own place, not among the further figures.
TOLD = ("statement", "rule", "rows", "plots")
# What an interval belongs to, where a row has its ends under `low` and `high`; else the figure just before them.
HAVE_ENDS = ("value", "measured", "exponent", "v", "lost", "ratio", "share")


@dataclass(frozen=True)
class Value:
    """A figure or a text, as it is read."""

    text: str
    exact: float | int | None = None
    """The figure behind the text; None for text."""


@dataclass(frozen=True)
class Table:
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    """The first value of each row names it."""
    numeric: tuple[bool, ...]
    """Columns of figures alone."""

    @property
    def keyed(self) -> bool:
        """Whether each row is a name and its value, which need no heading."""
        return self.head == KEYED


@dataclass(frozen=True)
class Picture:
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
        title=_text(report.get("title")) or _text(report.get("study")) or "Report",
        study=_text(report.get("study")),
        facts=_facts(report),
        tally=tuple((verdict, verdicts.count(verdict)) for verdict in order if verdict in verdicts),
        command=_text(report.get("command")),
        provenance=_provenance(report, provenance),
        packages=_packages(provenance.get("packages")),
        sections=sections,
    )


# --- text


def _text(value: Any) -> str:
    """Text in one line, without characters that HTML and XML do not have; empty for null."""
    if value is None:
        return ""
    return "".join(one if one.isprintable() else " " for one in str(value)).strip()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def number(value: Any) -> str:
    """A figure as a reader wants it: four digits, whole numbers whole."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: Any) -> str:
    """Seconds in words: 0.4 s, 47 s, 12 min, 3 h 24 min."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return DASH
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def spoken(name: str) -> str:
    """A key as a heading."""
    return SPOKEN.get(name) or _text(name).replace("_", " ")


def _heading(name: str) -> str:
    text = spoken(name)
    return text[:1].upper() + text[1:]


def _value(value: Any) -> Value:
    """One cell of a table."""
    if isinstance(value, bool):
        return Value(number(value))
    if value is None or isinstance(value, int | float):
        return Value(number(value), value)
    if isinstance(value, str):
        return Value(_text(value) or DASH)
    if _is_estimate(value):
        return _estimate(value["value"], value.get("low"), value.get("high"))
    if isinstance(value, list) and all(_is_scalar(one) for one in value):
        return Value(", ".join(number(one) if not isinstance(one, str) else _text(one) for one in value) or DASH)
    entries = value.items() if isinstance(value, dict) else enumerate(value, 1)
    return Value("; ".join(f"{spoken(str(name))}: {_value(entry).text}" for name, entry in entries) or DASH)


def _estimate(value: Any, low: Any, high: Any) -> Value:
    """A figure with its interval, as the studies write it in their sentences."""
    if not _is_number(value):
        return Value(DASH)
    if _is_number(low) and _is_number(high):
        return Value(str(Estimate(value, low, high)), value)
    return Value(str(Estimate(value)), value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _is_estimate(value: Any) -> bool:
    return isinstance(value, dict) and "value" in value and set(value) <= {"value", "low", "high"} and _is_scalar(value["value"])


def _is_flat(value: Any) -> bool:
    return _is_scalar(value) or _is_estimate(value) or (isinstance(value, list) and all(_is_scalar(one) for one in value))


# --- the head of a report


def _facts(report: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    cost = _mapping(report.get("cost"))
    begun = moment(report.get("created_at"))
    again = moment(report.get("started_at"))
    facts = [
        ("Study", " ".join(filter(None, (_text(report.get("study")), _hash(report.get("id")))))),
        ("Scale", _text(report.get("scale"))),
        ("Asked for", _asked(_mapping(report.get("asked")))),
        ("Started", begun),
        ("Started again", again if again != begun else ""),
        ("Cancelled", moment(report.get("cancelled_at"))),
        ("Finished", "not yet: this is what there is so far" if _unfinished(report) else moment(report.get("finished_at"))),
        ("Jobs", _jobs(cost)),
        ("Job time", "" if cost.get("seconds") is None else duration(cost["seconds"])),
        ("Machine", _value(report.get("machine")).text),
    ]
    return tuple((name, text) for name, text in facts if text and text != DASH)


def _unfinished(report: Mapping[str, Any]) -> bool:
    return "finished_at" in report and report["finished_at"] is None and report.get("cancelled_at") is None


def moment(value: Any) -> str:
    """A time in UTC to the minute, of seconds since 1970 or of ISO 8601; text that is neither stays as it is."""
    try:
        if _is_number(value):
            return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M} UTC"
        found = datetime.fromisoformat(_text(value))
    except (ValueError, OverflowError, OSError):
        return _text(value)
    return f"{found.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if found.tzinfo else f"{found:%Y-%m-%d %H:%M}"


def _hash(number: Any) -> str:
    return "" if number is None else f"(no. {_text(number)})"


def _asked(asked: Mapping[str, Any]) -> str:
    parts = []
    for name, value in asked.items():
        if value is not None and value != []:
            parts.append(f"{spoken(name)}: {_value(value).text}")
    return "; ".join(parts) or "the study's own seeds, groups and demands"


def _jobs(cost: Mapping[str, Any]) -> str:
    """How many there are, and how many of them are in which state."""
    states = [f"{_text(count)} {spoken(state)}" for state, count in cost.items() if state not in ("jobs", "seconds") and count]
    if not _is_number(cost.get("jobs")):
        return ", ".join(states)
    return f"{_text(cost['jobs'])} ({', '.join(states)})" if states else _text(cost["jobs"])


def _provenance(report: Mapping[str, Any], provenance: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    found = [(spoken(name), _value(value).text) for name, value in provenance.items() if name != "packages" and value is not None]
    return tuple((name, text) for name, text in found if text != DASH)


def _packages(packages: Any) -> Table | None:
    if isinstance(packages, dict) and packages:
        return Table(
            "Packages",
            ("package", "version"),
            tuple((Value(_text(name)), _value(packages[name])) for name in packages),
            (False, False),
        )
    if isinstance(packages, list) and packages:
        return Table("Packages", ("package",), tuple((_value(one),) for one in packages), (False,))
    return None


# --- findings


def _sections(findings: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
    anchors: set[str] = set()
    return tuple(_section(finding, _anchor(finding, anchors)) for finding in findings)


def _anchor(finding: Mapping[str, Any], taken: set[str]) -> str:
    """The finding's id as a part of file names and links."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", _text(finding.get("id"))).strip("-")[:40] or "finding"
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
        id=_text(finding.get("id")) or DASH,
        anchor=anchor,
        title=_text(finding.get("title")) or "Untitled",
        verdict=_text(finding.get("verdict")) or "undecided",
        statement=_text(detail.get("statement")),
        rule=_text(detail.get("rule")),
        reason=_text(finding.get("reason")),
        published=_text(finding.get("published")) or DASH,
        measured=_estimate(finding.get("measured"), finding.get("low"), finding.get("high")),
        unit=_text(finding.get("unit")),
        seeds=_value(seeds),
        seconds=Value(duration(seconds), seconds if _is_number(seconds) else None),
        pictures=tuple(_pictures(detail.get("plots"), anchor)),
        rows=table_of(RUNS, rows) if rows else None,
        details=tuple(_details(detail)),
    )


def _pictures(plots: Any, anchor: str) -> Iterable[Picture]:
    known = [plot for plot in plots or () if isinstance(plot, dict) and plot.get("kind") in ("xy", "heat")]
    for number, plot in enumerate(known, 1):
        yield Picture(f"{anchor}-{number}", _text(plot.get("title")), _text(plot.get("note")), _text(describe(plot)), plot)


def _details(detail: Mapping[str, Any]) -> Iterable[Table]:
    further = {key: value for key, value in detail.items() if key not in TOLD}
    figures = {key: value for key, value in further.items() if _is_flat(value)}
    if figures:
        yield _pairs("Further figures", figures)
    for key, value in further.items():
        if key not in figures:
            yield from _tables(_heading(key), value)


def _tables(caption: str, value: Any) -> Iterable[Table]:
    """A nested value as flat tables, each with the path to it as its caption."""
    if isinstance(value, list):
        rows = [row if isinstance(row, dict) else {"value": row} for row in value]
        yield table_of(caption, rows)
    elif isinstance(value, dict):
        flat = {key: entry for key, entry in value.items() if _is_flat(entry)}
        inner = {key: entry for key, entry in value.items() if key not in flat}
        if inner and all(_is_record(entry) for entry in inner.values()) and all(_is_remark(entry) for entry in flat.values()):
            rows = [entry if isinstance(entry, dict) and key in inner else {"remark": entry} for key, entry in value.items()]
            yield table_of(caption, [{"": spoken(key), **row} for key, row in zip(value, rows, strict=True)])
            return
        if flat:
            yield _pairs(caption, flat)
        for key, entry in inner.items():
            yield from _tables(f"{caption}: {spoken(key)}", entry)


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_flat(entry) for entry in value.values())


def _is_remark(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _pairs(caption: str, values: Mapping[str, Any]) -> Table:
    merged = _with_intervals(values)
    return Table(caption, KEYED, tuple((Value(spoken(key)), value) for key, value in merged.items()), (False, False))


def _with_intervals(row: Mapping[str, Any]) -> dict[str, Value]:
    """The row's cells; `low` and `high` join the figure they belong to."""
    keys = list(row)
    owner = None
    if "low" in row and "high" in row:
        before = [key for key in keys[: keys.index("low")] if _is_number(row[key])]
        known = [key for key in HAVE_ENDS if key in row and (row[key] is None or _is_number(row[key]))]
        owner = before[-1] if before and before[-1] in known else next(iter(known), None)
    cells = {}
    for key in keys:
        if owner is not None and key in ("low", "high"):
            continue
        cells[key] = _estimate(row[key], row["low"], row["high"]) if key == owner else _value(row[key])
    return cells


def table_of(caption: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of records; its columns are all of their keys, in the order they first come up."""
    cells = [_with_intervals(row) for row in rows]
    columns = list(dict.fromkeys(key for row in cells for key in row))
    numeric = tuple(
        all(row[column].exact is not None or row[column].text == DASH for row in cells if column in row)
        and any(column in row and row[column].exact is not None for row in cells)
        for column in columns
    )
    lines = tuple(tuple(row.get(column, Value(DASH)) for column in columns) for row in cells)
    return Table(caption, tuple(map(spoken, columns)), lines, numeric)
