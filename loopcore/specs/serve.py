"""Publishing a trained run as a model version, and serving it."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from loopcore.specs.base import PositiveInt, Spec

__all__ = ["MODEL_NAME", "ModelName", "RegisterSpec", "ServeSpec"]

MODEL_NAME = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,62})@(?P<alias>[a-z0-9][a-z0-9_-]{0,62})")


class ModelName(Spec):
    """`name@alias`: a registered model and the alias that points at one of its versions."""

    name: str
    alias: str

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Raises ValueError where `text` is not of the form name@alias."""
        found = MODEL_NAME.fullmatch(text)
        if not found:
            raise ValueError(f"expected a model as name@alias, for example s3@champion, got {text!r}")
        return cls(name=found["name"], alias=found["alias"])

    def __str__(self) -> str:
        return f"{self.name}@{self.alias}"


def _checked(text: str) -> str:
    return str(ModelName.parse(text))


class RegisterSpec(Spec):
    """Publish the run of a `train` job, with what a `probe` job measured on it, as a model version under an alias."""

    job: int = Field(ge=1)
    """The `train` job whose run is published."""
    probe: int | None = Field(default=None, ge=1)
    """The `probe` job whose v_hat and burn-in the version carries. Empty: the newest one that measured this run."""
    model: str
    """`name@alias`, for example `s3@champion`."""

    _model = field_validator("model")(_checked)


class ServeSpec(Spec):
    """Serve a model version over HTTP."""

    model: str
    """`name@alias`; the service follows the alias."""
    replicas: PositiveInt = 1

    _model = field_validator("model")(_checked)
