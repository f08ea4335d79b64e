"""One readable line for each thing that is wrong with what a user typed, made from pydantic's errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

__all__ = ["Problem", "explain", "explain_errors", "join_lines"]

_CONSEQUENCE = "default_factory_not_called"  # a default that follows from a field which is wrong itself
_SHOWN = 60  # characters of a wrong value that are shown

# What was expected, by pydantic's error type; filled in from the error's context.
_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping of fields",
    "enum": "{expected}",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of at most 18 digits",
    "int_type": "a whole number",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a mapping of fields",
    "model_type": "a mapping of fields",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_unicode": "text in UTF-8",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "text",
    "too_long": "at most {max_length} values",
    "too_short": "at least {min_length} values",
    "tuple_type": "a list",
    "union_tag_invalid": "{expected_tags}",
}


@dataclass(frozen=True)
class Problem:
    """What was wrong, what was expected, what to do."""

    error: str
    expected: str | None = None
    hint: str | None = None
    field: str | None = None
    """Dotted path of the field that was wrong."""

    def line(self) -> str:
        """All of it on one line."""
        text = f"{self.field}: {self.error}" if self.field else self.error
        if self.expected:
            text += f"; expected {self.expected}"
        if self.hint:
            text += f"; {self.hint}"
        return " ".join(text.split())

    def as_dict(self) -> dict[str, str | None]:
        return asdict(self)


def join_lines(problems: Iterable[Problem]) -> str:
    """Every problem's line, one below the other."""
    return "\n".join(problem.line() for problem in problems)


def explain(error: ValidationError, model: Any, *, hide: frozenset[str] = frozenset()) -> list[Problem]:
    """What `error`, raised by validating against `model` (a model class or a union of them), says to a person.

    Values of the top-level fields named in `hide` are never shown: they may hold a password.
    """
    return explain_errors(error.errors(include_url=False), model, hide=hide)


def explain_errors(errors: Iterable[Any], model: Any, *, hide: frozenset[str] = frozenset()) -> list[Problem]:
    """The same for pydantic's errors as a list of dictionaries."""
    return [_problem(one, model, hide) for one in errors if one["type"] != _CONSEQUENCE]


def _problem(one: Any, model: Any, hide: frozenset[str]) -> Problem:
    kind, context = one["type"], one.get("ctx") or {}
    path, siblings = _place(model, one["loc"])
    field = path or None
    if kind == "extra_forbidden":
        name = str(one["loc"][-1])
        close = difflib.get_close_matches(name, siblings, n=1)
        known = f"one of {', '.join(siblings)}" if siblings else None
        return Problem("unknown field", known, f"did you mean {close[0]}?" if close else "leave it out", field)
    if kind == "missing":
        return Problem("this field is missing", "a value", "add it", field)
    if kind == "union_tag_not_found":
        tag = str(context.get("discriminator", "'kind'")).strip("'")
        where = f"{path}.{tag}" if path else tag
        return Problem("this field is missing", f"one of {', '.join(_tags(model, one['loc']))}", "add it", where)
    if kind == "value_error":
        return Problem(one["msg"].removeprefix("Value error, "), field=field)
    if kind == "union_tag_invalid":
        tag = str(context.get("discriminator", "'kind'")).strip("'")
        where = f"{path}.{tag}" if path else tag
        return Problem(f"got {context.get('tag', '')!r}", f"one of {context['expected_tags']}", None, where)
    try:
        expected = _EXPECTED[kind].format(**context)
    except (KeyError, ValueError):
        return Problem(one["msg"], field=field)
    hidden = bool(one["loc"]) and str(one["loc"][0]) in hide
    return Problem("got a value that is not shown" if hidden else f"got {_shown(one['input'])}", expected, None, field)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Every model class that stands in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models(part)]


def _tag(model: type[BaseModel]) -> str | None:
    kind = model.model_fields.get("kind")
    options = get_args(kind.annotation) if kind is not None else ()
    return str(options[0]) if len(options) == 1 else None


def _place(annotation: Any, loc: tuple[int | str, ...]) -> tuple[str, list[str]]:
    """The dotted path of `loc` without the tags that pydantic puts in for unions, and the fields known where it ends."""
    path: list[str] = []
    models = _models(annotation)
    siblings: list[str] = []
    for part in loc:
        chosen = [model for model in models if _tag(model) == part]
        if len(models) > 1 and chosen:  # where several are possible, pydantic puts the tag of the one meant first
            models = chosen
            continue
        siblings = sorted({name for model in models for name in model.model_fields})
        path.append(str(part))
        if isinstance(part, str):
            inner = [model.model_fields[part].annotation for model in models if part in model.model_fields]
            models = [found for one in inner for found in _models(one)]
    return ".".join(path), siblings


def _tags(annotation: Any, loc: tuple[int | str, ...]) -> list[str]:
    models = _models(annotation)
    for part in loc:
        inner = [model.model_fields[part].annotation for model in models if isinstance(part, str) and part in model.model_fields]
        models = [found for one in inner for found in _models(one)] or models
    return [tag for model in models if (tag := _tag(model))]
