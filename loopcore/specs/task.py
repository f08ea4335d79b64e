"""What a model is trained on."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from loopcore.specs.base import Spec

__all__ = ["LARGEST_GROUP", "InstalledTask", "TaskSpec", "TextTask", "WordTask", "group_order"]

LARGEST_GROUP = 5040  # elements: S7; a multiplication table of this size takes 200 MB

_GROUP = re.compile(r"[ZDSA][1-9][0-9]{0,2}(?:x[ZDSA][1-9][0-9]{0,2}){0,7}")


def group_order(name: str) -> int:
    """Number of elements of the group called `name`. Raises ValueError for a name that is none, and above LARGEST_GROUP."""
    if not _GROUP.fullmatch(name):
        raise ValueError(f"expected a group such as Z60, D4, S3, A5 or a product such as A4xZ5, got {name!r}")
    order = 1
    for part in name.split("x"):
        m = int(part[1:])
        match part[0]:
            case "Z":
                order *= m
            case "D":
                order *= 2 * m
            case "S":
                order *= math.factorial(m)
            case "A":
                order *= max(1, math.factorial(m) // 2)
    if order > LARGEST_GROUP:
        raise ValueError(f"expected a group of at most {LARGEST_GROUP} elements, {name} has more; choose a smaller one")
    return order


class WordTask(Spec):
    """Word problem of a finite group: tokens g_1..g_n, the target at position i is the product g_1...g_i (arXiv 2607.20594)."""

    kind: Literal["word"] = "word"
    group: str = "S3"
    """Z_m, D_m, S_m or A_m, or a product of them: `Z60`, `S3`, `A5`, `A4xZ5`."""

    @field_validator("group")
    @classmethod
    def _is_a_group_name(cls, name: str) -> str:
        group_order(name)
        return name


class TextTask(Spec):
    """Next-byte prediction on a text corpus."""

    kind: Literal["text"] = "text"
    source: str = "stdlib"
    """`stdlib`: the source of the Python standard library, which every machine has. Otherwise the path of a text file."""
    held_out: float = Field(default=0.1, gt=0.0, lt=0.5)
    """Share of the corpus, at its end, that is kept for evaluation."""


class InstalledTask(Spec):
    """A task that an installed package brings, by an entry point of the group `loopcore.tasks`."""

    kind: Literal["installed"] = "installed"
    name: str
    """Name of the entry point."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What the package's task takes; it checks them itself."""


TaskSpec = Annotated[WordTask | TextTask | InstalledTask, Field(discriminator="kind")]
