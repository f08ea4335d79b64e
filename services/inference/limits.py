"""What one replica of the inference service takes at most."""

from __future__ import annotations

from dataclasses import dataclass

from services.settings import Settings

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Bounds of one replica; each is a setting `inference_*`, or follows from those."""

    rows: int = 64
    """Words that a model loops at once."""
    queue: int = 256
    """Words that may wait for a model."""
    models: int = 8
    """Models in memory."""
    length_factor: int = 4
    """Longest word taken, as a multiple of the longest trained one."""
    loops_factor: int = 4
    """Most loops that may be asked for, as a multiple of the trained budget of a word of that length."""
    symbol_characters: int = 200
    """Characters of text read for each position a model has; longer text is too long without being parsed."""

    @property
    def words(self) -> int:
        """Words of one request: no more than could ever wait at once, and than are encoded in the blink of an eye."""
        return min(self.queue, 256)

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        return cls(
            rows=settings.inference_rows,
            queue=settings.inference_queue,
            models=settings.inference_models,
            length_factor=settings.inference_length_factor,
        )
