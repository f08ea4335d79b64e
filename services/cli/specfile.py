"""A job spec from a YAML file and `dotted.path=value` on the command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from services.cli.errors import UserError

__all__ = ["override", "read_spec"]


class _Loader(yaml.SafeLoader):
    """Plain data only: no dates, no field twice, and `1e-3` is a number as it is everywhere else."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the field {key!r} stands twice", key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
_Loader.yaml_implicit_resolvers = {
    first: [one for one in resolvers if one[0] not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+0123456789."))


def read_spec(source: str, changes: Iterable[str], *, kind: str | None = None) -> dict[str, Any]:
    """The content of a YAML file (`-` is standard input) with `changes` applied; `kind` is put in where it has none.

    Raises UserError where there is no such file, it is no YAML, or it holds no mapping.
    """
    name = "standard input" if source == "-" else source
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except FileNotFoundError:
        raise UserError(f"there is no file {name}; expected the path of a YAML file such as examples/train_s3.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UserError(f"cannot read {name}: {why}; expected the path of a YAML file") from None
    content = _parse(text, name)
    if not isinstance(content, dict):
        kinds = {type(None): "nothing", list: "a list", str: "text"}
        found = kinds.get(type(content), "a single value")
        raise UserError(f"{name} holds {found}; expected a mapping of fields, such as `kind: train`")
    if kind is not None:
        content.setdefault("kind", kind)
        if content["kind"] != kind:
            raise UserError(f"{name} is of kind {content['kind']!r}; expected {kind!r}: use `loop submit` for it")
    for change in changes:
        override(content, change)
    return content


def override(content: dict[str, Any], change: str) -> None:
    """Applies one `dotted.path=value`; the value is YAML. Raises UserError."""
    path, found, text = change.partition("=")
    parts = path.split(".")
    if not found or not all(parts):
        raise UserError(f"cannot read {change!r}; expected a change of the form field=value, such as optimizer.lr=1e-3")
    place: Any = content
    for at, part in enumerate(parts[:-1]):
        if part not in place or place[part] is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise UserError(f"cannot set {path}: {'.'.join(parts[: at + 1])} holds {place!r}; expected a mapping of fields there")
    place[parts[-1]] = _parse(text, f"the value of {path}")


def _parse(text: str, name: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None and "\n" in text.strip() else ""
        why = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise UserError(f"{name} is no YAML{where}: {why}; expected lines such as `kind: train`") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is no YAML: {str(error).splitlines()[0]}; expected lines such as `kind: train`") from None
