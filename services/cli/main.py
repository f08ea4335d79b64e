"""The command `loop` from its parts, and how it ends."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from services.cli import admin, bench, demo, docs, jobs, models, runs, stack, studies
from services.cli.errors import CliError

__all__ = ["app", "main"]

# typer brings its own click, or uses the installed one: either way this is the class of every mistake on the command line.
UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="loop",
    help="A lab for looped transformers: submit jobs, measure what they learnt, serve models that stop when the answer is ready.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
for part in (stack, jobs, runs, studies, models, bench, admin, demo, docs):
    part.register(app)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("loopcore"))
        raise typer.Exit


@app.callback()
def _loop(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", callback=_version, is_eager=True),
) -> None:
    """Options of all commands."""


def main() -> None:
    """Runs the command line and exits: 0, 1 for a failure, 2 for a user's mistake, 130 when interrupted."""
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    try:
        code = app(args=arguments, prog_name="loop", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as done:
        return done.exit_code
    except UsageError as error:
        _say(_usage(error))
        return 2
    except CliError as error:
        _say(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _other(error)


def _usage(error: Any) -> str:
    context = error.ctx
    command = context.command_path if context is not None else "loop"
    text = str(error.format_message()).strip().rstrip(".")
    return f"{text}; see `{command} --help`"


def _other(error: Exception) -> int:
    """An error of a part below, which has said all there is to say; or one that nobody thought of."""
    from services.registry import RegistryError
    from services.settings import SettingsError
    from services.stack.state import StackError

    if isinstance(error, SettingsError):
        _say(str(error))
        return 2
    if isinstance(error, StackError):
        _say(str(error))
        return error.exit_code
    if isinstance(error, RegistryError):
        _say(str(error))
        return 1
    if os.environ.get("LOOP_DEBUG"):
        raise error
    _say(f"{type(error).__name__}: {error}; this is a fault of loop itself: set LOOP_DEBUG=1 to see where, and report it")
    return 1


def _say(text: str) -> None:
    for line in text.splitlines():
        sys.stderr.write(f"loop: {line}\n")
