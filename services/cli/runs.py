"""`loop runs` and `loop run`: recorded runs, their curves and measurements."""

from __future__ import annotations

from typing import Any

import typer

__all__ = ["register"]

FIGURES_SHOWN = 8  # a row; `loop run` shows all

AS_JSON = typer.Option(False, "--json", help="Print JSON.")


def register(app: typer.Typer) -> None:
    app.command("runs")(list_runs)
    app.command("run")(show_run)


def list_runs(
    job: int = typer.Option(None, min=1, metavar="JOB", help="Only those of this job.", show_default=False),
    kind: str = typer.Option(None, metavar="KIND", help="Only those of this kind.", show_default=False),
    limit: int = typer.Option(20, "--limit", "-n", min=1, max=1000, help="At most so many."),
    before: int = typer.Option(None, min=1, metavar="RUN", help="Only runs before this one.", show_default=False),
    as_json: bool = AS_JSON,
) -> None:
    """List runs, newest first."""
    from services.cli.client import open_client
    from services.cli.output import age, emit_json, table

    found = open_client().get("/v1/runs", job=job, kind=kind, limit=limit, before=before)
    if as_json:
        emit_json(found)
        return
    table(
        ("run", "job", "key", "kind", "state", "started", "figures"),
        [
            (run["id"], run["job"], run["key"], run["kind"], run["state"], age(run["started_at"]), _figures(run["figures"]))
            for run in found["runs"]
        ],
        empty="no runs",
    )


def _figures(figures: dict[str, Any] | None) -> str:
    from services.cli.output import number

    plain = [(name, value) for name, value in (figures or {}).items() if value is not None and not isinstance(value, dict | list)]
    return ", ".join(f"{name} {number(value)}" for name, value in plain[:FIGURES_SHOWN])


def show_run(
    run: int = typer.Argument(..., min=1, help="Number of the run.", show_default=False),
    curve: bool = typer.Option(False, "--curve", help="Its curves instead of the run: step, name, value."),
    name: str = typer.Option(None, metavar="CURVE", help="With --curve: this curve only, such as loss.", show_default=False),
    measurements: bool = typer.Option(False, "--measurements", help="What instruments measured on it instead of the run."),
    csv: bool = typer.Option(False, "--csv", help="Print CSV (with --curve or --measurements)."),
    as_json: bool = AS_JSON,
) -> None:
    """Show one run, or export its curves or measurements."""
    from services.cli.client import open_client
    from services.cli.errors import UserError
    from services.cli.output import age, emit_json, fields, number

    if csv and not (curve or measurements):
        raise UserError("--csv prints curves or measurements; expected --curve or --measurements beside it")
    client = open_client()
    if curve:
        points = client.get(f"/v1/runs/{run}/curve", name=name)["points"]
        _export(("step", "name", "value"), points, csv=csv, as_json=as_json)
        return
    if measurements:
        found = client.get(f"/v1/runs/{run}/measurements")["measurements"]
        _export(("instrument", "axes", "value", "low", "high"), found, csv=csv, as_json=as_json)
        return
    found = client.get(f"/v1/runs/{run}")
    if as_json:
        emit_json(found)
        return
    fields(
        {
            "run": found["id"],
            "job": found["job"],
            "key": found["key"],
            "kind": found["kind"],
            "state": found["state"],
            "started": age(found["started_at"]),
            "checkpoint": f"step {found['checkpoint_step']}: {found['checkpoint']}" if found["checkpoint"] else "",
            "mlflow": found["mlflow_run"],
            "commit": (found["provenance"] or {}).get("commit"),
            **{key: number(value) for key, value in (found["figures"] or {}).items() if not isinstance(value, dict | list)},
        }
    )


def _export(columns: tuple[str, ...], rows: list[dict[str, Any]], *, csv: bool, as_json: bool) -> None:
    from services.cli.output import emit_json, number, table

    if as_json:
        emit_json(rows)
    elif csv:
        import csv as writer
        import json
        import sys

        out = writer.writer(sys.stdout, lineterminator="\n")
        out.writerow(columns)
        for row in rows:
            values = [row[column] for column in columns]
            out.writerow([json.dumps(value) if isinstance(value, dict) else value for value in values])
    else:
        table(columns, [[_axes(row[column]) if column == "axes" else number(row[column]) for column in columns] for row in rows])


def _axes(axes: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in axes.items())
