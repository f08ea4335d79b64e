"""A report as one HTML page that stands alone: its plots, its style and nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from loopcore.figures import COLOURS
from loopcore.reports.axes import GRID, INK, MUTED, PAPER
from loopcore.reports.content import MARKS, Picture, content_of
from loopcore.reports.drawing import to_svg

__all__ = ["to_html"]

HERE = Path(__file__).parent
TEMPLATE, STYLE = "page.html.j2", "page.css"

# What a plot is drawn in, and the variable of the page's style that takes its place.
_INKS = {INK: "--ink", MUTED: "--muted", GRID: "--line", PAPER: "--paper"} | {
    hue.lower(): f"--c{number}" for number, hue in enumerate(COLOURS[:-1])
}
_COLOUR = re.compile(r"(?P<property>fill|stroke): (?P<hue>#[0-9a-f]{6})")
_FONT = re.compile(r"font: (?P<before>[^;\"']*?)'DejaVu Sans'[^;\"]*")
_RULES = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>\s*", re.DOTALL)  # the page's style has them
_ID = re.compile(r'(?P<before>\bid="|href="#|url\(#)(?P<id>[^")]+)')


def to_html(report: Mapping[str, Any]) -> str:
    """The page of a report (JSON data; see `loopcore.reports`). The same report gives the same page."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters["chip"] = lambda verdict: verdict.replace(" ", "-") if verdict in _SIGNS else "other"
    environment.filters["sign"] = lambda verdict: _SIGNS.get(verdict, "")
    page = environment.get_template(TEMPLATE).render(
        content=content_of(report),
        style=Markup((HERE / STYLE).read_text(encoding="utf-8")),
        inline=_inline,
        marks=MARKS,
    )
    return page.rstrip() + "\n"


_SIGNS = {"shown": "\N{CHECK MARK}", "not shown": "\N{MULTIPLICATION X}", "undecided": "?"}


def _inline(picture: Picture) -> Markup:
    """The plot as a part of the page: ids of its own, the page's font and colours."""
    svg = _RULES.sub("", to_svg(picture.plot, titled=False))
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = _ID.sub(lambda found: f"{found['before']}{picture.name}-{found['id']}", svg)
    svg = _COLOUR.sub(_variable, svg)
    svg = _FONT.sub(lambda found: f"font: {found['before']}var(--sans)", svg)
    body = svg[svg.index(">") + 1 :]
    box = re.search(r'viewBox="([\d. ]+)"', svg)
    assert box is not None, "an SVG without a viewBox"
    head = f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(picture.words)}">'
    return Markup(head + body.strip())


def _variable(found: re.Match[str]) -> str:
    name = _INKS.get(found["hue"])
    return found[0] if name is None else f"{found['property']}: var({name}, {found['hue']})"
