"""Every error that the tracking adapter raises on purpose.

TrackingError
├── TrackingUnavailable  the store cannot be reached or does not answer; nothing of the job depends on it
└── ModelNotFound        no model, version or alias of this name (also a LookupError)
"""

from __future__ import annotations

__all__ = ["ModelNotFound", "TrackingError", "TrackingUnavailable"]


class TrackingError(Exception):
    """Base of all of them; the message says what was wrong, what was expected and what to do."""


class TrackingUnavailable(TrackingError):
    """The store cannot be reached or does not answer."""


class ModelNotFound(TrackingError, LookupError):
    """No model, version or alias of this name."""
