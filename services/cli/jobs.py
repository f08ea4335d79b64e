"""`loop submit`, `tune`, `jobs`, `job`, `logs`, `cancel`, `retry`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from services.cli.client import Client

__all__ = ["finish", "register", "who_and_where"]

AS_JSON = typer.Option(False, "--json", help="Print JSON.")
JOB = typer.Argument(..., help="Number of the job.", min=1, show_default=False)
FILE = typer.Argument(..., metavar="FILE", help="YAML file with the job's spec; - is standard input.", show_default=False)
CHANGES = typer.Argument(None, metavar="FIELD=VALUE", help="Changes to the spec, such as optimizer.lr=2e-3.", show_default=False)
SET = typer.Option(None, "--set", metavar="FIELD=VALUE", help="Another way to write a change.", show_default=False)
WAIT = typer.Option(False, "--wait", "-w", help="Follow the job to its end; an interrupt leaves it running.")
PRIORITY = typer.Option(0, help="Higher goes first.")
AFTER = typer.Option(None, metavar="JOB", min=1, help="A job that must succeed first; may be given again.", show_default=False)
KEY = typer.Option(None, metavar="NAME", help="Submit once: gives the unfinished job that has this key.", show_default=False)
DELAY = typer.Option(0.0, "--delay", metavar="SECONDS", min=0.0, help="Do not start it before.")


def register(app: typer.Typer) -> None:
    app.command("submit")(submit)
    app.command("tune")(tune)
    app.command("jobs")(list_jobs)
    app.command("job")(show_job)
    app.command("logs")(show_logs)
    app.command("cancel")(cancel)
    app.command("retry")(retry)


def submit(
    file: str = FILE,
    changes: list[str] = CHANGES,
    sets: list[str] = SET,
    wait: bool = WAIT,
    priority: int = PRIORITY,
    after: list[int] = AFTER,
    key: str = KEY,
    delay: float = DELAY,
    as_json: bool = AS_JSON,
) -> None:
    """Submit a job. FILE holds its spec; FIELD=VALUE changes it."""
    _submit(file, changes, sets, wait, priority, after, key, delay, as_json)


def tune(
    file: str = FILE,
    changes: list[str] = CHANGES,
    sets: list[str] = SET,
    wait: bool = WAIT,
    priority: int = PRIORITY,
    after: list[int] = AFTER,
    key: str = KEY,
    delay: float = DELAY,
    as_json: bool = AS_JSON,
) -> None:
    """Submit a learning-rate transfer study. With --wait it ends with the table of optimum, drift and regret."""
    _submit(file, changes, sets, wait, priority, after, key, delay, as_json, kind="tune")


def _submit(
    file: str,
    changes: list[str] | None,
    sets: list[str] | None,
    wait: bool,
    priority: int,
    after: list[int] | None,
    key: str | None,
    delay: float,
    as_json: bool,
    *,
    kind: str | None = None,
) -> None:
    from services.cli.client import open_client
    from services.cli.specfile import read_spec

    spec = read_spec(file, [*(changes or ()), *(sets or ())], kind=kind)
    body = {"spec": spec, "priority": priority, "after": after or [], "key": key, "delay_s": delay, **who_and_where()}
    client = open_client()
    finish(client, client.post("/v1/jobs", body), wait=wait, as_json=as_json)


def who_and_where() -> dict[str, Any]:
    """Who submits, and from which code."""
    import getpass

    from services.provenance import collect

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = None
    return {"user": user, "provenance": collect()}


def finish(client: Client, answer: dict[str, Any], *, wait: bool, as_json: bool) -> dict[str, Any]:
    """Tells what became of a submission; with `wait`, what became of the job. Raises Failure for one that did not succeed."""
    from services.cli.output import emit_json, say
    from services.cli.waiting import ending, wait_for

    job = answer["job"]
    known = "" if answer["created"] else f", which held the key {job['key']!r} already"
    if not wait:
        if as_json:
            emit_json(job)
        else:
            print(f"job {job['id']}{known}")
        return job
    say(f"job {job['id']}{known}")
    job = wait_for(client, job["id"])
    if as_json:
        emit_json(job)
    else:
        _outcome(job)
    failure = ending(job)
    if failure is not None:
        raise failure
    return job


def _outcome(job: dict[str, Any]) -> None:
    from services.cli.output import fields, number, span, table

    result = dict(job["result"] or {})
    if job["state"] == "succeeded":
        took = span(job["finished_at"] - job["started_at"]) if job["started_at"] and job["finished_at"] else ""
        print(f"job {job['id']} {job['kind']} succeeded{f' in {took}' if took else ''}")
    rows = result.pop("table", None)
    fields({name: number(value) for name, value in result.items() if not isinstance(value, dict | list)})
    if rows:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table([column.replace("_", " ") for column in columns], [[_cell(row.get(column)) for column in columns] for row in rows])


def _cell(value: Any) -> str:
    from services.cli.output import number

    if isinstance(value, list):
        return " ".join(number(one) for one in value)
    return "-" if value is None else number(value)


def list_jobs(
    state: str = typer.Option(
        None, help="queued, blocked, running, succeeded, failed or cancelled.", metavar="STATE", show_default=False
    ),
    kind: str = typer.Option(None, help="train, probe, tune, register or serve.", metavar="KIND", show_default=False),
    user: str = typer.Option(None, help="Who submitted them.", metavar="NAME", show_default=False),
    limit: int = typer.Option(20, "--limit", "-n", min=1, max=1000, help="At most so many."),
    before: int = typer.Option(None, min=1, metavar="JOB", help="Only jobs before this one.", show_default=False),
    as_json: bool = AS_JSON,
) -> None:
    """List jobs, newest first."""
    from services.cli.client import open_client
    from services.cli.output import age, emit_json, table

    found = open_client().get("/v1/jobs", state=state, kind=kind, user=user, limit=limit, before=before)
    if as_json:
        emit_json(found)
        return
    table(
        ("job", "kind", "state", "name", "user", "age", "progress"),
        [
            (
                job["id"],
                job["kind"],
                job["state"],
                job["name"],
                job["user"],
                age(job["created_at"]).removesuffix(" ago"),
                _brief(job),
            )
            for job in found["jobs"]
        ],
        empty="no jobs",
    )


def _brief(job: dict[str, Any]) -> str:
    from services.cli.output import span

    progress = job["progress"] or {}
    if job["state"] == "running" and progress.get("total"):
        left = progress.get("left_s")
        return f"{100 * progress['done'] / progress['total']:.0f} %{'' if left is None else f', {span(left)} left'}"
    if job["state"] == "succeeded":
        return ""
    return job["reason"] or (f"waits for {job['unmet']} job(s)" if job["state"] == "queued" and job["unmet"] else "")


def show_job(job: int = JOB, as_json: bool = AS_JSON) -> None:
    """Show one job. Its state, why it waits or how it ended, its attempts and its result."""
    from services.cli.client import open_client
    from services.cli.output import age, emit_json, fields, number, span, table

    client = open_client()
    found = client.get(f"/v1/jobs/{job}")
    if as_json:
        emit_json(found)
        return
    progress = found["progress"] or {}
    done, total, left = progress.get("done"), progress.get("total"), progress.get("left_s")
    took = (found["finished_at"] or 0) - (found["started_at"] or 0)
    fields(
        {
            "job": found["id"],
            "kind": found["kind"],
            "name": found["name"],
            "state": found["state"],
            "reason": found["reason"],
            "progress": f"{done:g}/{total:g} {progress.get('unit', '')}{f', {span(left)} left' if left else ''}" if total else "",
            "submitted": f"{age(found['created_at'])}{' by ' + found['user'] if found['user'] else ''}",
            "started": age(found["started_at"]),
            "took": span(took) if found["started_at"] and found["finished_at"] else "",
            "node": found["node"],
            "priority": found["priority"] or "",
            "key": found["key"],
            "needs": ", ".join(map(str, found["needs"])),
            "resources": f"{found['cpus']:g} CPU, {found['gpus']:g} GPU",
            "losses": f"{found['losses']} of {found['loss_budget']}" if found["losses"] else "",
            "errors": f"{found['errors']} of {found['error_budget']}" if found["errors"] else "",
            "retry of": found["retry_of"],
            "commit": (found["provenance"] or {}).get("commit"),
            "spec": found["digest"][:12],
        }
    )
    for run in client.get("/v1/runs", job=job)["runs"]:
        print(f"run {run['id']}: {run['kind']}, {run['state']}")
    attempts = client.get(f"/v1/jobs/{job}/attempts")["attempts"]
    if len(attempts) > 1:
        print()
        table(
            ("attempt", "outcome", "node", "started", "error"),
            [(one["attempt"], one["outcome"], one["node"], age(one["started_at"]), _last_line(one["error"])) for one in attempts],
        )
    if found["result"]:
        print()
        result = dict(found["result"])
        rows = result.pop("table", None)
        fields({name: number(value) for name, value in result.items() if not isinstance(value, dict | list)})
        if rows:
            columns = list(dict.fromkeys(name for row in rows for name in row))
            table(
                [column.replace("_", " ") for column in columns], [[_cell(row.get(column)) for column in columns] for row in rows]
            )
    if found["error"]:
        print()
        print(found["error"].rstrip())


def _last_line(text: str | None) -> str:
    return text.strip().splitlines()[-1] if text and text.strip() else ""


def show_logs(
    job: int = JOB,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on until the job has ended."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object a piece."),
) -> None:
    """Print what the job's attempts wrote."""
    import json
    import sys
    import time

    from services.cli.client import open_client

    client, after, attempt = open_client(), 0, 0
    while True:
        page = client.get(f"/v1/jobs/{job}/logs", after=after)
        for chunk in page["chunks"]:
            if as_json:
                print(json.dumps(chunk))
                continue
            if chunk["attempt"] != attempt and (attempt or chunk["attempt"] > 1):
                print(f"--- attempt {chunk['attempt']}")
            attempt = chunk["attempt"]
            sys.stdout.write(chunk["text"])
        sys.stdout.flush()
        after = page["next"]
        if not page["chunks"]:
            if page["ended"] or not follow:
                return
            time.sleep(0.5)


def cancel(job: int = JOB, as_json: bool = AS_JSON) -> None:
    """Cancel a job. A running one writes a checkpoint first."""
    from services.cli.client import open_client
    from services.cli.output import emit_json

    found = open_client().post(f"/v1/jobs/{job}/cancel")
    if as_json:
        emit_json(found)
    elif found["state"] == "cancelled":
        print(f"job {job} is cancelled")
    else:
        print(f"job {job} was asked to stop")


def retry(job: int = JOB, wait: bool = WAIT, as_json: bool = AS_JSON) -> None:
    """Queue a failed or cancelled job anew. It goes on from its newest checkpoint."""
    from services.cli.client import open_client

    client = open_client()
    finish(client, {"job": client.post(f"/v1/jobs/{job}/retry"), "created": True}, wait=wait, as_json=as_json)
