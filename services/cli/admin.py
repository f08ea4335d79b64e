"""`loop doctor` and `loop db`: what touches the machine and the registry themselves."""

from __future__ import annotations

import typer

__all__ = ["register"]

AS_JSON = typer.Option(False, "--json", help="Print JSON.")


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)
    database = typer.Typer(help="The registry's database.", no_args_is_help=True, rich_markup_mode=None)
    database.command("upgrade")(upgrade)
    database.callback()(_database)
    app.add_typer(database, name="db")


def _database() -> None:
    """The registry's database."""


def doctor(as_json: bool = AS_JSON) -> None:
    """Check what the stack stands on. Says what to do; exit code 1 if something is wrong."""
    from dataclasses import asdict

    from services.cli.output import emit_json
    from services.settings import Settings
    from services.stack.doctor import examine

    findings = examine(Settings.load())
    bad = [finding for finding in findings if finding.level == "problem"]
    if as_json:
        emit_json({"healthy": not bad, "findings": [asdict(finding) for finding in findings]})
    else:
        signs = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
        for finding in findings:
            print(f"{signs[finding.level]}  {finding.what}: {finding.found}")
            if finding.advice:
                print(f"{'':9}{finding.advice}")
    if bad:
        raise typer.Exit(1)


def upgrade(
    revision: str = typer.Option(
        "head", help="Where to: head, base or a revision's number. Going down drops what later tables held."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Make or upgrade the registry's tables."""
    from services.cli.errors import UserError
    from services.cli.output import emit_json
    from services.registry import SchemaTooNew, migrate
    from services.settings import Settings, without_password

    settings = Settings.load()
    try:
        now = migrate(settings.registry_url, revision)
    except SchemaTooNew as error:
        raise UserError(str(error)) from None
    place = without_password(settings.registry_url)
    if as_json:
        emit_json({"registry": place, "schema": now})
    else:
        print(f"the registry at {place} has schema {now or 'none'}")
