"""`loop up`, `down`, `status`: the local stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from services.settings import Settings

__all__ = ["register"]

AS_JSON = typer.Option(False, "--json", help="Print JSON.")


def register(app: typer.Typer) -> None:
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)


def up(
    detach: bool = typer.Option(False, "--detach", "-d", help="Return once the stack is ready and leave it running."),
    as_json: bool = AS_JSON,
) -> None:
    """Start the stack: Ray, dispatcher, API. Ctrl-C ends all of it, unless it is detached."""
    import signal

    from services.cli.output import say
    from services.settings import Settings

    settings = Settings.load()
    if detach:
        from services.stack.control import up_detached

        # A terminal that closes or a plain kill must not leave a half-started stack either.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _tell(up_detached(settings, note=say), as_json)
        return
    from services.stack.supervisor import Supervisor

    def ready(state: dict[str, Any]) -> None:
        _tell(state, as_json)
        say("Ctrl-C ends it")

    Supervisor(settings, note=say).run(ready)


def _tell(state: dict[str, Any], as_json: bool) -> None:
    from services.cli.output import emit_json, fields

    if as_json:
        emit_json(_public(state))
        return
    fields(
        {
            "API": state["api"]["url"],
            "inference": f"{state['inference']['url']} (once a model is served)",
            "Ray": state["ray"]["address"],
            "registry": state["registry"],
            "MLflow": state["mlflow"],
            "logs": state["logs"],
        }
    )


def _public(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "mark"}


def down(as_json: bool = AS_JSON) -> None:
    """End the stack. Waits until everything it started is gone."""
    from services.cli.output import emit_json
    from services.settings import Settings
    from services.stack import control

    settings = Settings.load()
    ended = control.down(settings)
    if as_json:
        emit_json({"home": str(settings.home), "ended": ended})
    else:
        print(f"the stack of {settings.home} is down" if ended else f"no stack of {settings.home} was up")


def status(as_json: bool = AS_JSON) -> None:
    """Show the stack, its cluster and its jobs. Exit code 1 if it is not ready."""
    from services.cli.output import emit_json
    from services.settings import Settings

    found = _status(Settings.load())
    if as_json:
        emit_json(found)
    else:
        _print_status(found)
    if not found["ready"]:
        raise typer.Exit(1)


def _status(settings: Settings) -> dict[str, Any]:
    from services.cli.client import Client, open_client
    from services.cli.errors import CliError
    from services.stack import state

    stack = state.read(settings)
    holder = state.StackLock(settings.home).holder()
    found: dict[str, Any] = {
        "home": str(settings.home),
        "up": holder is not None,
        "ready": False,
        "problem": None,
        "stack": _public(stack) if stack is not None else None,
        "cluster": None,
        "served": None,
    }
    try:
        client: Client = open_client(settings)
        found["cluster"] = client.get("/v1/cluster")
        found["served"] = client.get("/v1/served")["served"]
        client.get("/health/ready")
        found["ready"] = True
    except CliError as error:
        found["problem"] = str(error)
    return found


def _print_status(found: dict[str, Any]) -> None:
    from services.cli.output import fields, say, table

    stack = found["stack"]
    print(f"{found['home']}: {'ready' if found['ready'] else 'up, not ready' if found['up'] else 'down'}")
    if stack is not None and found["up"]:
        rows = []
        for name in ("api", "ray", "dispatcher"):
            part = stack[name]
            where = part.get("url") or part.get("address")
            rows.append((name, part.get("pid", "joined" if name == "ray" else "-"), where, part.get("restarts") or ""))
        table(("part", "pid", "address", "restarts"), rows)
    cluster = found["cluster"]
    if cluster is not None:
        for dispatcher in cluster["dispatchers"]:
            for node in dispatcher["cluster"].get("nodes", []):
                print(
                    f"node {node['name']}: {node['free_cpus']:g} of {node['cpus']:g} CPUs free, "
                    f"{node['free_gpus']:g} of {node['gpus']:g} GPUs, {node['free_memory_gb']:.3g} of {node['memory_gb']:.3g} GiB"
                )
        fields({"jobs": ", ".join(f"{number} {state}" for state, number in cluster["counts"].items() if number) or "none"})
    if found["served"]:
        fields({"served": ", ".join(f"{one['model']} x{one['replicas']}" for one in found["served"])})
    if found["problem"]:
        say(found["problem"])
