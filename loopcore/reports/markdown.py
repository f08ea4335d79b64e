"""A report in Markdown (GitHub's tables), with its plots as files beside it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loopcore.reports.content import MARKS, Content, Picture, Section, content_of
from loopcore.reports.values import DASH, Table, Value

__all__ = ["to_markdown"]

# Underscores inside words and brackets that no link follows are text already, and figures read better without the strokes.
_SPECIAL = r"[\\`*|~$#]|(?<![^\W_])_|_(?![^\W_])"
_IN_TEXT = re.compile(_SPECIAL + r"|\](?=[(\[:])")
_IN_LINK = re.compile(_SPECIAL + r"|[\[\]]")
_AT_THE_START = re.compile(r"^(?P<number>\d+)(?P<end>[.)])(?=\s|$)|^(?P<sign>[-+=])")


def to_markdown(report: Mapping[str, Any], plots: Mapping[str, str] | None = None) -> str:
    """The report (JSON data; see `loopcore.reports`). `plots` names the image of each plot (`{"1a-1": "plots/1a-1.svg"}`), as a
    path from where the text will lie; plots without one are told in words."""
    content = content_of(report)
    blocks = [*_head(content), *_summary(content.sections), *_again(content)]
    for section in content.sections:
        blocks += _section(section, plots or {})
    return "\n\n".join(block for block in blocks if block) + "\n"


def escaped(text: str, *, link: bool = False) -> str:
    """Text that Markdown shows as it stands, inside a line; `link` for the text of a link or an image."""
    text = (_IN_LINK if link else _IN_TEXT).sub(lambda found: f"\\{found[0]}", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _paragraph(text: str) -> str:
    """Text that begins a line: no list, no heading."""
    return _AT_THE_START.sub(r"\g<number>\\\g<end>\g<sign>", escaped(text))


def _head(content: Content) -> list[str]:
    tally = ", ".join(f"**{count} {escaped(verdict)}**" for verdict, count in content.tally)
    facts = [f"- {escaped(name)}: {escaped(text)}" for name, text in content.facts]
    return [f"# {escaped(content.title)}", tally, "\n".join(facts)]


def _summary(sections: Sequence[Section]) -> list[str]:
    if not sections:
        return ["## Findings", "This study has no findings yet."]
    head = ("Id", "Finding", "Published", "Measured", "Unit", "Verdict", "Seeds", "Job time")
    rows = [
        (
            escaped(section.id),
            f"[{escaped(section.title, link=True)}](#finding-{section.anchor})",
            escaped(section.published),
            escaped(section.measured.text),
            escaped(section.unit) or DASH,
            f"**{escaped(section.verdict)}**",
            section.seeds.text,
            section.seconds.text,
        )
        for section in sections
    ]
    marks = "; ".join(f"[{letter}] {meaning}" for letter, meaning in MARKS)
    return [
        "## Findings",
        _lines(head, rows, (False,) * 6 + (True, True)),
        "Intervals are at 95 % where there are any. Job time counts what studies share in each finding that rests on it. "
        f"Marks of published figures: {marks}.",
    ]


def _again(content: Content) -> list[str]:
    found = ["## Run it again", _code(content.command) if content.command else ""]
    found.append("\n".join(f"- {escaped(name)}: {escaped(text)}" for name, text in content.provenance))
    if not content.command and not content.provenance:
        found.append("Neither command nor provenance was recorded.")
    if content.packages:
        found += _collapsed(f"{len(content.packages.rows)} packages", content.packages)
    return found


def _code(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _section(section: Section, plots: Mapping[str, str]) -> list[str]:
    measured = escaped(section.measured.text) + (f" ({escaped(section.unit)})" if section.unit else "")
    told = [
        ("Verdict", escaped(section.verdict)),
        ("Shown when (written down before anything ran)", escaped(section.rule)),
        ("What was seen", escaped(section.reason)),
        ("Measured", measured),
        ("Published", escaped(section.published)),
        ("Rests on", section.basis),
    ]
    blocks = [
        f'<a id="finding-{section.anchor}"></a>',
        f"## {escaped(section.id)} {escaped(section.title)}",
        _paragraph(section.statement),
        "\n".join(f"- **{name}:** {text}" for name, text in told if text),
        *_pictures(section.pictures, plots),
    ]
    if section.rows:
        count = len(section.rows.rows)
        blocks += _collapsed(f"{count} {'run' if count == 1 else 'runs'}", section.rows)
    for table in section.details:
        blocks += [f"**{escaped(table.caption)}**", _table(table)]
    return blocks


def _pictures(pictures: Sequence[Picture], plots: Mapping[str, str]) -> Iterable[str]:
    """One plot as wide as the text, several in two columns."""
    drawn = [picture for picture in pictures if picture.name in plots]
    if len(drawn) == 1:
        yield f"![{escaped(drawn[0].words, link=True)}]({_href(plots[drawn[0].name])})"
    elif drawn:
        yield "\n".join(
            f'<img src="{html.escape(_href(plots[picture.name]))}" width="49%" alt="{html.escape(picture.words)}">'
            for picture in drawn
        )
    told = [picture for picture in pictures if picture.name not in plots]
    if told:
        yield "\n".join(f"- Plot: {escaped(picture.words)}" for picture in told)


def _href(path: str) -> str:
    return re.sub(r"[ ()<>\"]", lambda found: f"%{ord(found[0]):02X}", path)


def _collapsed(summary: str, table: Table) -> list[str]:
    return [f"<details><summary>{summary}</summary>", _table(table), "</details>"]


def _table(table: Table) -> str:
    rows = [tuple(_cell(value) for value in row) for row in table.rows]
    return _lines(tuple(escaped(name) or " " for name in table.head), rows, table.numeric)


def _cell(value: Value) -> str:
    return escaped(value.text)


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[bool]) -> str:
    rule = ["---:" if right else "---" for right in numeric]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))
