"""The reference pages, made from what they describe: commands, specs, settings, the OpenAPI document."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

__all__ = ["cli_page", "inference_document", "openapi_document", "pages", "settings_page", "specs_page"]

WIDTH = 100  # characters a line of help
MADE = "<!-- Made by `loop docs` from the code; a test fails when it is stale. -->"

_CLI = """
Every reading command takes `--json`. Results go to standard output, everything else to standard error. Exit codes: 0, 1 for a
failure (a job that failed, a stack that is not up), 2 for what the user can set right, 130 when interrupted. Errors are one line
each: what was wrong, what was expected, what to do.

The commands are clients of the API: of `LOOP_API_URL`, or of the stack of `LOOP_HOME` (`./.loop`). Only `up`, `down`, `doctor`
and `db` touch the machine and the registry themselves.
""".strip()

_SETTINGS = """
From `LOOP_*` variables, then from the file `loop.toml` in `LOOP_HOME` (or the file that `LOOP_CONFIG` names), then the defaults.
`loop doctor` names `LOOP_*` variables that are no setting.

A password belongs into the variable or into the file, readable by you alone; it is never shown, logged or put on a command line.
""".strip()

_SPECS = """
What a job may ask for: the content of the YAML files that `loop submit` takes, and of `spec` in `POST /v1/jobs`. Unknown fields
are refused. `loop submit FILE model.width=128` changes a field from the command line.
""".strip()


def pages() -> dict[str, str]:
    """Every page by its path below docs/."""
    return {
        "cli.md": cli_page(),
        "specs.md": specs_page(),
        "settings.md": settings_page(),
        "api/openapi.json": openapi_document(),
        "api/inference-openapi.json": inference_document(),
    }


def openapi_document() -> str:
    """The API's OpenAPI document as JSON."""
    from services.api.app import create_app
    from services.settings import Settings

    return json.dumps(create_app(Settings()).openapi(), indent=1, sort_keys=True) + "\n"


def inference_document() -> str:
    """The inference service's OpenAPI document as JSON."""
    from services.inference.app import openapi_document

    return openapi_document()


def cli_page() -> str:
    """Every command with its arguments and options."""
    import typer

    from services.cli.main import app

    root = typer.main.get_command(app)
    parts = [
        MADE,
        "# The command line",
        _CLI,
        _block(_help(root, "loop", None)),
    ]
    for path, command, context in _commands(root, "loop", None):
        parts += [f"## {path}", _block(_help(command, path, context))]
    return "\n\n".join(parts) + "\n"


def _commands(group: Any, path: str, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    context = _context(group, path, parent)
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, name, context)
        else:
            yield f"{context.command_path} {name}", command, context


def _context(command: Any, path: str, parent: Any) -> Any:
    return command.context_class(command, info_name=path.rpartition(" ")[2], parent=parent, terminal_width=WIDTH)


def _help(command: Any, path: str, parent: Any) -> str:
    return "\n".join(line.rstrip() for line in command.get_help(_context(command, path, parent)).strip().splitlines())


def _block(text: str) -> str:
    return f"```\n{text}\n```"


def settings_page() -> str:
    """Every setting."""
    from services.settings import Settings

    parts = [
        MADE,
        "# Settings",
        _SETTINGS,
        "| variable | in loop.toml | type | default | |\n|---|---|---|---|---|",
    ]
    rows = [
        f"| `LOOP_{name.upper()}` | `{name}` | {_type(field)} | {_default(field)} | {_text(field.description)} |"
        for name, field in Settings.model_fields.items()
    ]
    parts[-1] += "\n" + "\n".join(rows)
    return "\n\n".join(parts) + "\n"


def specs_page() -> str:
    """Every kind of job, field by field, and the specs inside it."""
    from loopcore.specs import JobSpec

    jobs = _models(JobSpec)
    parts = [
        MADE,
        "# Specs",
        _SPECS,
    ]
    seen: list[type[BaseModel]] = []
    waiting = list(jobs)
    while waiting:
        model = waiting.pop(0)
        if model in seen:
            continue
        seen.append(model)
        waiting += [inner for field in model.model_fields.values() for inner in _models(field.annotation)]
    for model in seen:
        kind = model.model_fields.get("kind")
        title = f"`kind: {get_args(kind.annotation)[0]}`" if model in jobs and kind is not None else model.__name__
        rows = [
            f"| `{name}` | {_type(field)} | {_default(field)} | {_text(field.description)} |"
            for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] != "kind")
        ]
        head = [f'<a id="{model.__name__.lower()}"></a>', f"## {title}", _text(model.__doc__)]
        parts += [*head, "| field | type | default | |\n|---|---|---|---|\n" + "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models(part)]


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _type(field: FieldInfo) -> str:
    return _written(field.annotation, tuple(field.metadata))


def _written(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """A type as a person would say it, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _written(arguments[0], arguments[1:] + metadata)
    bounds = _bounds(metadata)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        some = [_written(part, metadata) for part in arguments if part is not type(None)]
        return " or ".join(dict.fromkeys(some)) + (", or empty" if type(None) in arguments else "")
    if origin is tuple:
        several = len(arguments) == 2 and arguments[1] is Ellipsis
        inner = _written(arguments[0]) if several else ", ".join(_written(part) for part in arguments)
        return f"list of {inner}{bounds}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    names = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`", SecretStr: "secret text"}
    return names.get(annotation, "path" if getattr(annotation, "__name__", "") == "Path" else str(annotation)) + bounds


def _bounds(metadata: tuple[Any, ...]) -> str:
    signs = {
        "ge": "≥ {}",
        "gt": "> {}",
        "le": "≤ {}",
        "lt": "< {}",
        "min_length": "at least {} long",
        "max_length": "at most {} long",
    }
    found = []
    for one in metadata:
        for part in (one, *getattr(one, "metadata", ())):
            found += [
                text.format(_number(getattr(part, name))) for name, text in signs.items() if getattr(part, name, None) is not None
            ]
    return f", {', '.join(dict.fromkeys(found))}" if found else ""


def _number(value: Any) -> str:
    if value == 2**31:
        return "2³¹"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "see text"
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None or field.default == "":
        return "empty"
    if isinstance(field.default, BaseModel):
        tag = getattr(field.default, "kind", None)
        changed = field.default.model_dump(exclude_defaults=True)
        shown = ", ".join(f"{name}: {value}" for name, value in ({"kind": tag} if tag else {} | changed).items())
        return f"`{shown}`" if shown else "its defaults"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if isinstance(field.default, tuple):
        return f"`{json.dumps(field.default)}`"
    return f"`{field.default}`"
