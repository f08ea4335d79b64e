"""`loop studies`, `study`, `report`: published findings, and what was measured here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from services.cli.client import Client

__all__ = ["register"]

AS_JSON = typer.Option(False, "--json", help="Print JSON.")
STUDY = typer.Argument(..., metavar="ID", min=1, help="Number of a study that was started.", show_default=False)


def register(app: typer.Typer) -> None:
    app.command("studies")(list_studies)
    app.command("study")(start)
    app.command("report")(report)


def list_studies(
    limit: int = typer.Option(20, "--limit", "-n", min=1, max=200, help="At most so many of those that were started."),
    as_json: bool = AS_JSON,
) -> None:
    """List published findings with their state, and the studies that were started."""
    from services.cli.client import open_client
    from services.cli.output import age, emit_json, table

    client = open_client()
    findings = client.get("/v1/findings")["findings"]
    started = client.get("/v1/studies", limit=limit)["studies"]
    if as_json:
        emit_json({"findings": findings, "studies": started})
        return
    table(
        ("id", "finding", "study", "verdict", "measured", "unit", "seeds", "from"),
        [
            (
                one["id"],
                one["title"],
                one["study"],
                one["verdict"] or "not started",
                _measured(one),
                one["unit"] if one["measured"] is not None else "",
                one["seeds"],
                f"study {one['started']}, {one['scale']}" if one["started"] else "",
            )
            for one in findings
        ],
    )
    print()
    table(
        ("study", "name", "scale", "jobs", "started", "asked"),
        [
            (
                one["id"],
                one["name"],
                one["scale"],
                _jobs(one["jobs"]) + (", cancelled" if one["cancelled_at"] else ""),
                age(one["started_at"]),
                " ".join(f"{name}={_asked(value)}" for name, value in one["asked"].items() if value is not None),
            )
            for one in started
        ],
        empty="no study was started",
    )


def start(
    study: str = typer.Argument(..., metavar="NAME", help="Such as budget-law: see `loop studies`.", show_default=False),
    scale: str = typer.Option("smoke", "--scale", metavar="SCALE", help="smoke (minutes), cpu (an afternoon) or gpu."),
    seeds: int = typer.Option(None, min=1, metavar="K", help="Seeds of every cell.", show_default=False),
    groups: str = typer.Option(None, metavar="S3,S4", help="Groups instead of its own.", show_default=False),
    demands: str = typer.Option(None, metavar="0.5,1,2", help="Demands n/T instead of its own.", show_default=False),
    priority: int = typer.Option(0, help="Higher goes first."),
    cancel: bool = typer.Option(False, "--cancel", help="Cancel what is unfinished of it instead; starting it again goes on."),
    wait: bool = typer.Option(
        False, "--wait", "-w", help="Follow it to its end, print its report; an interrupt leaves it running."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Start a study, or go on with it. Work that was done before, by any study, is not done again."""
    from services.cli.client import open_client
    from services.cli.jobs import who_and_where
    from services.cli.output import emit_json, say

    body = {
        "study": study,
        "scale": scale,
        "seeds": seeds,
        "groups": None if groups is None else _listed(groups),
        "demands": None if demands is None else _numbers(demands),
    }
    client = open_client()
    if cancel:
        _cancel(client, body, as_json=as_json)
        return
    answer = client.post("/v1/studies", {**body, "priority": priority, **who_and_where()})
    found = answer["study"]
    counts = ", ".join(
        f"{answer[kind]} {words}"
        for kind, words in (
            ("created", "new"),
            ("retried", "tried again"),
            ("shared", "of other studies"),
            ("kept", "from before"),
        )
        if answer[kind]
    )
    line = f"study {found['id']}: {sum(found['jobs'].values())} jobs ({counts})"
    if not wait:
        if as_json:
            emit_json(answer)
        else:
            print(f"{line}; see `loop report {found['id']}`")
        return
    say(line)
    _follow(client, found["id"])
    _print_report(client.get(f"/v1/studies/{found['id']}/report"), as_json=as_json)
    _all_ended_well(client, found["id"])


def report(
    study: int = STUDY,
    out: Path = typer.Option(
        None, "--out", "-o", metavar="FOLDER", help="Write the page, Markdown, JSON and plots there.", show_default=False
    ),
    name: str = typer.Option("report", "--name", metavar="NAME", help="Of the files that --out writes."),
    as_json: bool = AS_JSON,
) -> None:
    """Show what a study says about each finding, from what has been measured so far."""
    from services.cli.client import open_client
    from services.cli.errors import Failure
    from services.cli.output import emit_json

    found = open_client().get(f"/v1/studies/{study}/report")
    if out is None:
        if as_json:
            emit_json(found)
        else:
            _print_report(found, as_json=False)
            print(f"\nwith plots: loop report {study} --out FOLDER")
        return
    from loopcore.reports import write

    try:
        written = write(found, out, stem=name)
    except OSError as error:
        raise Failure(
            f"the report could not be written to {out}: {error.strerror or error}; expected a folder with room"
        ) from None
    if as_json:
        emit_json({"files": [str(path) for path in written]})
        return
    for path in written:
        if path.parent == out:
            print(path)


def _listed(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _numbers(text: str) -> list[float]:
    from services.cli.errors import UserError

    try:
        return [float(one) for one in _listed(text)]
    except ValueError:
        raise UserError(f"--demands {text!r} is not a list of numbers; expected such as 0.5,1,2") from None


def _cancel(client: Client, body: dict[str, Any], *, as_json: bool) -> None:
    from services.cli.errors import UserError
    from services.cli.output import emit_json

    asked = {name: body[name] for name in ("seeds", "groups", "demands")}
    for one in client.get("/v1/studies", study=body["study"], limit=200)["studies"]:
        if (one["scale"], one["asked"]) == (body["scale"], asked):
            found = client.post(f"/v1/studies/{one['id']}/cancel")
            if as_json:
                emit_json(found)
            else:
                print(f"study {found['id']}: {_jobs(found['jobs'])}")
            return
    raise UserError(f"no study {body['study']} was started with this scale and these choices; see `loop studies`")


UNFINISHED = ("queued", "running")


def _follow(client: Client, study: int) -> None:
    from services.cli.output import say

    try:
        _watch(client, study)
    except KeyboardInterrupt:
        say(f"study {study} goes on; see it with `loop report {study}`")
        raise


def _watch(client: Client, study: int) -> None:
    """Shows how many jobs have ended until all have, or cannot begin."""
    import sys
    import time

    from services.cli.client import Unreachable
    from services.cli.waiting import PATIENCE_S, StudyBar, StudyLines

    away_since: float | None = None
    with StudyBar() if sys.stderr.isatty() else StudyLines() as show:
        while True:
            try:
                found = client.get(f"/v1/studies/{study}")
                away_since = None
            except Unreachable:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > PATIENCE_S:
                    raise
                time.sleep(2.0)
                continue
            show.show(found)
            if not any(found["jobs"].get(state) for state in UNFINISHED):
                return
            time.sleep(2.0)


def _all_ended_well(client: Client, study: int) -> None:
    from services.cli.errors import Failure

    works = client.get(f"/v1/studies/{study}")["works"]
    bad = {one["job"]: one for one in works if one["state"] in ("failed", "cancelled", "blocked")}
    if bad:
        first = next(iter(bad.values()))
        what = f"{first['cell']} {first['probe']}".strip()
        raise Failure(
            f"{len(bad)} of the jobs of study {study} did not succeed, first job {first['job']} ({what}): {first['state']}"
            f"{': ' + first['reason'] if first['reason'] else ''}; see `loop logs {first['job']}`, then start the study again"
        )


def _print_report(found: dict[str, Any], *, as_json: bool) -> None:
    from services.cli.output import emit_json, fields, span, table

    if as_json:
        emit_json(found)
        return
    cost = found["cost"]
    states = {name: count for name, count in cost.items() if name not in ("jobs", "seconds")}
    fields(
        {
            "study": f"{found['id']} {found['study']}: {found['title']}",
            "again": found["command"],
            "jobs": f"{_jobs(states)} of {cost['jobs']}",
            "cost": span(cost["seconds"]),
            "commit": found["provenance"].get("commit"),
        }
    )
    print()
    table(
        ("id", "finding", "verdict", "measured", "published", "seeds", "cost", "unit"),
        [
            (
                one["id"],
                one["title"],
                one["verdict"],
                _measured(one),
                one["published"],
                one["seeds"],
                span(one["seconds"]),
                one["unit"],
            )
            for one in found["findings"]
        ],
    )
    print()
    for one in found["findings"]:
        print(f"{one['id']}  {one['reason']}")


def _jobs(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _measured(finding: dict[str, Any]) -> str:
    if finding["measured"] is None:
        return "-"
    ends = "" if finding["low"] is None or finding["high"] is None else f" [{finding['low']:.3g}, {finding['high']:.3g}]"
    return f"{finding['measured']:.3g}{ends}"


def _asked(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
