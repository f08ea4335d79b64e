"""Figures, texts and nested data as a reader wants them: values and flat tables. What is no figure reads as a dash."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from loopcore.studies.verdicts import Estimate

__all__ = [
    "DASH",
    "Table",
    "Value",
    "duration",
    "estimate_of",
    "heading",
    "is_flat",
    "is_number",
    "moment",
    "number",
    "pairs_of",
    "spoken",
    "table_of",
    "tables_of",
    "text_of",
    "value_of",
]

DASH = "\N{EN DASH}"
KEYED = ("", "value")

SPOKEN = {"dirty": "changed since (SHA-256)", "T_star": "T*", "T_train": "T_train", "r2": "R2", "rows": "runs"}
# What an interval belongs to, where a row has its ends under `low` and `high`; else the figure just before them.
HAVE_ENDS = ("value", "measured", "exponent", "v", "lost", "ratio", "share")


@dataclass(frozen=True)
class Value:
    """A figure or a text, as it is read."""

    text: str
    exact: float | int | None = None
    """The figure behind the text; None for text."""


@dataclass(frozen=True)
class Table:
    """A table without nested ones."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    """The first value of each row names it."""
    numeric: tuple[bool, ...]
    """Columns of figures alone."""

    @property
    def keyed(self) -> bool:
        """Whether each row is a name and its value, which need no heading."""
        return self.head == KEYED


# --- text


def text_of(value: Any) -> str:
    """Text in one line, without characters that HTML and XML do not have; empty for null."""
    if value is None:
        return ""
    return "".join(one if one.isprintable() else " " for one in str(value)).strip()


def number(value: Any) -> str:
    """A figure as a reader wants it: four digits, whole numbers whole."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: Any) -> str:
    """Seconds in words: 0.4 s, 47 s, 12 min, 3 h 24 min."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return DASH
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def moment(value: Any) -> str:
    """A time in UTC to the minute, of seconds since 1970 or of ISO 8601; text that is neither stays as it is."""
    try:
        if is_number(value):
            return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M} UTC"
        found = datetime.fromisoformat(text_of(value))
    except (ValueError, OverflowError, OSError):
        return text_of(value)
    return f"{found.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if found.tzinfo else f"{found:%Y-%m-%d %H:%M}"


def spoken(name: str) -> str:
    """A key as a heading."""
    return SPOKEN.get(name) or text_of(name).replace("_", " ")


def heading(name: str) -> str:
    """A key as the caption of a table."""
    text = spoken(name)
    return text[:1].upper() + text[1:]


# --- values


def value_of(value: Any) -> Value:
    """One cell of a table."""
    if isinstance(value, bool):
        return Value(number(value))
    if value is None or isinstance(value, int | float):
        return Value(number(value), value)
    if isinstance(value, str):
        return Value(text_of(value) or DASH)
    if _is_estimate(value):
        return estimate_of(value["value"], value.get("low"), value.get("high"))
    if isinstance(value, list) and all(_is_scalar(one) for one in value):
        return Value(", ".join(number(one) if not isinstance(one, str) else text_of(one) for one in value) or DASH)
    entries = value.items() if isinstance(value, dict) else enumerate(value, 1)
    return Value("; ".join(f"{spoken(str(name))}: {value_of(entry).text}" for name, entry in entries) or DASH)


def estimate_of(value: Any, low: Any, high: Any) -> Value:
    """A figure with its interval, as the studies write it in their sentences."""
    if not is_number(value):
        return Value(DASH)
    if is_number(low) and is_number(high):
        return Value(str(Estimate(value, low, high)), value)
    return Value(str(Estimate(value)), value)


def is_number(value: Any) -> bool:
    """Whether it is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _is_estimate(value: Any) -> bool:
    return isinstance(value, dict) and "value" in value and set(value) <= {"value", "low", "high"} and _is_scalar(value["value"])


def is_flat(value: Any) -> bool:
    """Whether it fits into one cell of a table."""
    return _is_scalar(value) or _is_estimate(value) or (isinstance(value, list) and all(_is_scalar(one) for one in value))


# --- tables


def table_of(caption: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of records; its columns are all of their keys, in the order they first come up."""
    cells = [_with_intervals(row) for row in rows]
    columns = list(dict.fromkeys(key for row in cells for key in row))
    numeric = tuple(
        all(row[column].exact is not None or row[column].text == DASH for row in cells if column in row)
        and any(column in row and row[column].exact is not None for row in cells)
        for column in columns
    )
    lines = tuple(tuple(row.get(column, Value(DASH)) for column in columns) for row in cells)
    return Table(caption, tuple(map(spoken, columns)), lines, numeric)


def pairs_of(caption: str, values: Mapping[str, Any]) -> Table:
    """A table of names and their values."""
    merged = _with_intervals(values)
    return Table(caption, KEYED, tuple((Value(spoken(key)), value) for key, value in merged.items()), (False, False))


def tables_of(caption: str, value: Any) -> Iterable[Table]:
    """A nested value as flat tables, each with the path to it as its caption."""
    if isinstance(value, list):
        rows = [row if isinstance(row, dict) else {"value": row} for row in value]
        yield table_of(caption, rows)
    elif isinstance(value, dict):
        flat = {key: entry for key, entry in value.items() if is_flat(entry)}
        inner = {key: entry for key, entry in value.items() if key not in flat}
        if inner and all(_is_record(entry) for entry in inner.values()) and all(_is_remark(entry) for entry in flat.values()):
            rows = [entry if isinstance(entry, dict) and key in inner else {"remark": entry} for key, entry in value.items()]
            yield table_of(caption, [{"": spoken(key), **row} for key, row in zip(value, rows, strict=True)])
            return
        if flat:
            yield pairs_of(caption, flat)
        for key, entry in inner.items():
            yield from tables_of(f"{caption}: {spoken(key)}", entry)


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and all(is_flat(entry) for entry in value.values())


def _is_remark(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _with_intervals(row: Mapping[str, Any]) -> dict[str, Value]:
    """The row's cells; `low` and `high` join the figure they belong to."""
    keys = list(row)
    owner = None
    if "low" in row and "high" in row:
        before = [key for key in keys[: keys.index("low")] if is_number(row[key])]
        known = [key for key in HAVE_ENDS if key in row and (row[key] is None or is_number(row[key]))]
        owner = before[-1] if before and before[-1] in known else next(iter(known), None)
    cells = {}
    for key in keys:
        if owner is not None and key in ("low", "high"):
            continue
        cells[key] = estimate_of(row[key], row["low"], row["high"]) if key == owner else value_of(row[key])
    return cells
