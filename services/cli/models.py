"""`loop models`, `promote`, `serve`, `unserve`, `predict`: from a run to an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from services.cli.client import Client

__all__ = ["register"]

AS_JSON = typer.Option(False, "--json", help="Print JSON.")
MODEL = typer.Argument(..., metavar="NAME@ALIAS", help="A model, such as s3@champion.", show_default=False)
WAIT = typer.Option(True, "--wait/--no-wait", help="Follow the job to its end.")


def register(app: typer.Typer) -> None:
    app.command("models")(list_models)
    app.command("promote")(promote)
    app.command("serve")(serve)
    app.command("unserve")(unserve)
    app.command("predict")(predict)


def list_models(as_json: bool = AS_JSON) -> None:
    """List registered models with their aliases."""
    from services.cli.client import open_client
    from services.cli.output import age, emit_json, table

    found = open_client().get("/v1/models")
    if as_json:
        emit_json(found)
        return
    table(
        ("model", "aliases", "versions", "changed"),
        [
            (
                model["name"],
                ", ".join(f"@{alias} = {version}" for alias, version in sorted(model["aliases"].items())),
                model["latest"],
                age(model["updated_at"]),
            )
            for model in found["models"]
        ],
        empty="no models; register one with `loop promote JOB NAME@ALIAS`",
    )


def _model(text: str) -> str:
    """Raises UserError where it is not of the form name@alias."""
    from loopcore.specs.serve import ModelName
    from services.cli.errors import UserError

    try:
        return str(ModelName.parse(text))
    except ValueError as error:
        raise UserError(str(error)) from None


def promote(
    source: str = typer.Argument(
        ..., metavar="JOB", help="The train job whose run is published, or run:N for a run.", show_default=False
    ),
    model: str = MODEL,
    probe: int = typer.Option(
        None, min=1, metavar="JOB", help="The probe job whose v_hat goes with it; by default the newest.", show_default=False
    ),
    key: str = typer.Option(None, metavar="NAME", help="Submit once.", show_default=False),
    wait: bool = WAIT,
    as_json: bool = AS_JSON,
) -> None:
    """Publish a run as a model version under an alias."""
    from services.cli.client import open_client
    from services.cli.jobs import finish, who_and_where

    name = _model(model)
    client = open_client()
    job = _job_of(client, source)
    body = {"job": job, "probe": probe, "model": name, "key": key, **who_and_where()}
    finish(client, client.post("/v1/models", body), wait=wait, as_json=as_json)


def _job_of(client: Client, source: str) -> int:
    from services.cli.errors import UserError

    kind, _, text = source.rpartition(":")
    if kind not in ("", "run", "job") or not text.isdecimal() or int(text) < 1:
        raise UserError(f"cannot read {source!r}; expected the number of a train job, such as 12, or run:N for a run")
    return client.get(f"/v1/runs/{int(text)}")["job"] if kind == "run" else int(text)


def serve(
    model: str = MODEL,
    replicas: int = typer.Option(1, min=1, help="Processes that answer."),
    wait: bool = WAIT,
    as_json: bool = AS_JSON,
) -> None:
    """Bring a model up on the inference service."""
    from services.cli.client import open_client
    from services.cli.jobs import finish, who_and_where

    name = _model(model)
    client = open_client()
    answer = client.post("/v1/served", {"model": name, "replicas": replicas, **who_and_where()})
    finish(client, answer, wait=wait, as_json=as_json)


def unserve(model: str = MODEL, as_json: bool = AS_JSON) -> None:
    """Take a model off the inference service."""
    from services.cli.client import open_client
    from services.cli.output import emit_json

    name = _model(model)
    open_client().delete(f"/v1/served/{name}")
    if as_json:
        emit_json({"model": name, "served": False})
    else:
        print(f"{name} is taken down")


def predict(
    model: str = MODEL,
    word: str = typer.Argument(..., help="The input, its symbols apart by spaces, such as '3 1 4 1 5'.", show_default=False),
    halt: str = typer.Option(
        None,
        metavar="RULE",
        help="rule, converged, converged:0.05, fixed:12, calibrated:0.01, ...; by default the model's own.",
        show_default=False,
    ),
    trace: bool = typer.Option(False, "--trace", help="Print the prediction after every loop, as it comes."),
    as_json: bool = AS_JSON,
) -> None:
    """Ask a served model for its answer, and how many loops that took."""
    from services.cli.client import open_inference
    from services.cli.output import emit_json

    name = _model(model)
    body: dict[str, Any] = {"inputs": word}
    if halt is not None:
        body["halt"] = _checked_halt(halt)
    client, path = open_inference(), f"/v1/models/{name}/predict"
    if trace:
        _trace(client, path, body, as_json)
        return
    answer = client.post(path, body)
    if as_json:
        emit_json(answer)
    else:
        _print_answer(answer)


def _checked_halt(text: str) -> str:
    """Raises UserError for a rule that there is not, before anybody is asked."""
    from pydantic import ValidationError

    from loopcore.specs import HaltingSpec, parse_halting
    from services.cli.errors import UserError
    from services.problems import explain

    try:
        parse_halting(text)
    except ValidationError as error:
        lines = [problem.line() for problem in explain(error, HaltingSpec)]
        raise UserError("\n".join(f"--halt {text}: {line}" for line in lines)) from None
    return text


def _print_answer(answer: dict[str, Any]) -> None:
    from services.cli.output import fields, number

    print(answer["outputs"])
    shown = (
        "loops_used",
        "loops_planned",
        "loops_budget",
        "exit_reason",
        "expected_accuracy",
        "queue_ms",
        "compute_ms",
        "model_version",
    )
    fields({name.replace("_", " "): number(answer.get(name)) for name in shown})


def _trace(client: Client, path: str, body: dict[str, Any], as_json: bool) -> None:
    import json
    import sys

    from services.cli.client import refusal
    from services.cli.errors import Failure

    answer: dict[str, Any] | None = None
    rows = _Rows()
    for name, data in client.events(path, body):
        if name == "error":
            raise refusal(data, data.get("status", 500))
        if as_json:
            print(json.dumps({"event": name, **data}))
        elif name == "loop":
            rows.show(data)
        sys.stdout.flush()
        if name == "answer":
            answer = data
    if answer is None:
        raise Failure("the inference service ended the stream without an answer; try again")
    if not as_json:
        print()
        _print_answer(answer)


class _Rows:
    """The loop-by-position table, a row a loop as it comes: positions that this loop did not change are settled."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, news: dict[str, Any]) -> None:
        from services.cli.output import number

        symbols = news["prediction"].split()
        if not self._width:
            print("loop  settled  residual  prediction")
        self._width = max(self._width, *(len(symbol) for symbol in symbols))
        cells = " ".join(symbol.ljust(self._width) for symbol in symbols).rstrip()
        print(f"{news['loop']:>4}  {news['frontier']:>7}  {number(news['residual']):>8}  {cells}")
