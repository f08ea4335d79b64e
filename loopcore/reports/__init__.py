"""Reports of studies: a page that stands alone, Markdown with plots beside it, and the data both are made from.

A report is JSON data:

    study, id, scale, title          the study, its number, `smoke`, `cpu` or `gpu`, and a heading
    asked                            seeds, groups, demands: what a user asked for, null for the study's own choice
    created_at, started_at           when it was started first and last: seconds since 1970, or ISO 8601
    cancelled_at, finished_at        likewise; a `finished_at` of null means that it still goes on
    command, machine                 how to start it again, where it ran
    provenance                       commit, platform, python, packages ({name: version})
    cost                             jobs, how many of them are in which state (`succeeded`, ...), seconds of all of them
    findings                         `Finding.to_json()` of each claim, with its rows and plots

Any field may be missing or null. Loads matplotlib and Jinja2, no torch.
"""

from __future__ import annotations

from loopcore.reports.drawing import draw, to_png, to_svg
from loopcore.reports.files import write
from loopcore.reports.markdown import to_markdown
from loopcore.reports.page import to_html

__all__ = ["draw", "to_html", "to_markdown", "to_png", "to_svg", "write"]
