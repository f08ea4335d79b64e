"""`loop bench`: how fast this code is on this machine, against what one would do without it."""

from __future__ import annotations

import typer

__all__ = ["BENCHES", "register"]

# By name, the module that times it: its `run(BenchAsk, tell)` gives the machine and the figures.
BENCHES = {name: f"loopcore.benches.{name}" for name in ("train", "population", "serve")}


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    name: str = typer.Argument(..., metavar="NAME", help=f"What to time: {', '.join(BENCHES)}."),
    scale: str = typer.Option(
        "full", "--scale", metavar="SCALE", help="full (minutes), or smoke: seconds, its figures say nothing."
    ),
    widths: list[int] = typer.Option(
        [], "--width", metavar="D", help="Model width; may be given several times. Empty: the bench's own."
    ),
    rounds: int | None = typer.Option(None, "--rounds", metavar="N", help="Pairs behind each ratio. Empty: the bench's own."),
    device: str = typer.Option("auto", "--device", metavar="DEVICE", help="auto, cpu or cuda."),
    threads: int | None = typer.Option(
        None, "--threads", metavar="N", help="CPU threads, or processes of one thread. Empty: the bench's own."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Time this code on this machine, against what one would do without it.

    Both sides do equal work in turns within one run; figures are medians with the smallest and the largest.
    """
    from services.cli.errors import UserError

    if name not in BENCHES:
        raise UserError(f"there is no bench {name!r}; expected one of {', '.join(BENCHES)}")
    if scale not in ("smoke", "full"):
        raise UserError(f"expected the scale smoke or full, got {scale!r}")

    from importlib import import_module

    from loopcore.benches import BenchAsk
    from loopcore.errors import InputError
    from services.cli.output import emit_json, say

    try:
        ask = BenchAsk(scale=scale, widths=tuple(widths), rounds=rounds, device=device, threads=threads)  # type: ignore[arg-type]
        where, figures = import_module(BENCHES[name]).run(ask, say)
    except InputError as problem:
        raise UserError(str(problem)) from None
    if as_json:
        emit_json({"bench": name, "machine": where, "figures": [figure.to_json() for figure in figures]})
        return
    _show(where, figures)


def _show(where: dict, figures: list) -> None:
    from services.cli.output import number, table

    print(", ".join(f"{name} {value}" for name, value in where.items() if value is not None))
    shown = ("name", "value", "low", "high", "unit", "against")
    table(shown, [[number(getattr(figure, column)) for column in shown] for figure in figures])
