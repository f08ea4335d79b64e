"""`loop docs`: writes the reference pages that are made from the code (see `services.cli.reference`)."""

from __future__ import annotations

from pathlib import Path

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("docs", hidden=True)(docs)


def docs(
    to: Path = typer.Option(Path("docs"), "--to", metavar="FOLDER", help="Where they go."),
    check: bool = typer.Option(False, "--check", help="Write nothing; exit with 1 if a page is not what it should be."),
) -> None:
    """Write the pages that are made from the code: commands, specs, settings, OpenAPI."""
    from services.cli.errors import Failure
    from services.cli.reference import pages

    stale = []
    for name, text in pages().items():
        path = to / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path}")
    if check and stale:
        raise Failure(f"{', '.join(stale)} in {to} is not what the code says; run `loop docs`")
