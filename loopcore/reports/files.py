"""Writes a report as files: its data, a page, and Markdown with the plots beside it."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopcore.reports.content import content_of
from loopcore.reports.drawing import to_svg
from loopcore.reports.markdown import to_markdown
from loopcore.reports.page import to_html
from loopcore.studies.base import plain

__all__ = ["write"]


def write(
    report: Mapping[str, Any], folder: Path | str, *, stem: str = "report", plots: str | None = None, page: bool = True
) -> list[Path]:
    """Writes `<stem>.json`, `<stem>.md`, `<stem>.html` (with `page`) and `<plots>/*.svg` under `folder`, and returns their paths.
    `plots` is by itself `plots` beside `report.md`, and the stem where that is another one.

    Each file is there as a whole or not at all, and the same report gives the same bytes. Plots of an earlier report that this
    one no longer has go away. Raises OSError where a file cannot be written.
    """
    folder = Path(folder)
    plots = plots or ("plots" if stem == "report" else stem)
    pictures = {picture.name: picture for picture in content_of(report).pictures}
    texts = {folder / plots / f"{name}.svg": to_svg(picture.plot) for name, picture in pictures.items()}
    texts[folder / f"{stem}.json"] = json.dumps(plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    texts[folder / f"{stem}.md"] = to_markdown(report, {name: f"{plots}/{name}.svg" for name in pictures})
    if page:
        texts[folder / f"{stem}.html"] = to_html(report)
    for path, text in texts.items():
        _put(path, text)
    _clear(folder / plots, {f"{name}.svg" for name in pictures})
    return list(texts)


def _put(path: Path, text: str) -> None:
    """The file as a whole: written beside its place, then moved there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="\n", dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(text)
            file.close()
            Path(file.name).chmod(0o644)
            os.replace(file.name, path)  # noqa: PTH105
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _clear(folder: Path, kept: set[str]) -> None:
    """Removes plots that have the name of a plot of a report, and are not among those kept."""
    if folder.is_dir():
        for path in folder.iterdir():
            if re.fullmatch(r"[A-Za-z0-9-]+-\d+\.svg", path.name) and path.name not in kept:
                path.unlink()
