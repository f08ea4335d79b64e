"""What every spec shares: frozen, closed to unknown fields, and identified by a digest of its content."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["PositiveInt", "Probability", "Spec", "UnitInterval"]

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
Probability = Annotated[float, Field(gt=0.0, lt=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]


class Spec(BaseModel):
    """Base of everything a user may ask for.

    A spec is data, never code. Unknown fields are refused, values are not changed after validation, and two specs
    that ask for the same thing have the same `digest`.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def resolved(self) -> dict[str, Any]:
        """The whole spec with every default written out, as JSON-compatible data."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """SHA-256 (hex) of the resolved spec: independent of field order and of which defaults were spelled out."""
        text = json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()
