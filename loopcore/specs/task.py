"""What a model is trained on."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from loopcore.specs.base import Spec

__all__ = ["GROUP_PATTERN", "TaskSpec", "TextTask", "WordTask"]

GROUP_PATTERN = re.compile(r"(?:[ZDSA]\d{1,3})(?:x[ZDSA]\d{1,3})*")


class WordTask(Spec):
    """Word problem of a finite group: tokens g_1..g_n, the target at position i is the product g_1...g_i (arXiv 2607.20594)."""

    kind: Literal["word"] = "word"
    group: str = "S3"
    """Z_m, D_m, S_m or A_m, or a product of them: `Z60`, `S3`, `A5`, `A4xZ5`."""

    @field_validator("group")
    @classmethod
    def _is_a_group_name(cls, name: str) -> str:
        if not GROUP_PATTERN.fullmatch(name):
            raise ValueError(f"expected a group such as Z60, D4, S3, A5 or a product such as A4xZ5, got {name!r}")
        return name


class TextTask(Spec):
    """Next-byte prediction on a text corpus."""

    kind: Literal["text"] = "text"
    source: str = "stdlib"
    """`stdlib`: the source of the Python standard library, which every machine has. Otherwise the path of a text file."""
    held_out: float = Field(default=0.1, gt=0.0, lt=0.5)
    """Share of the corpus, at its end, that is kept for evaluation."""


TaskSpec = Annotated[WordTask | TextTask, Field(discriminator="kind")]
