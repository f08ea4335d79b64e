"""The registry and the tracking store as the routes reach them: opened on first use, once."""

from __future__ import annotations

import threading
from typing import Annotated, cast

from fastapi import Depends, Request

from services.registry import Registry
from services.settings import Settings
from services.tracking import Tracking

__all__ = ["Doors", "Open"]

TRACKING_PATIENCE_S = 3.0  # seconds that a request waits for MLflow


class Doors:
    """What one application holds open. The API comes up before its databases do, and says 503 until they answer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tracking = Tracking(settings, patience_s=TRACKING_PATIENCE_S)
        self._lock = threading.Lock()
        self._registry: Registry | None = None

    @property
    def registry(self) -> Registry:
        """Raises RegistryUnavailable, also where its tables are of another version."""
        with self._lock:
            if self._registry is None:
                self._registry = Registry.open(self.settings.registry_url)
            return self._registry

    def close(self) -> None:
        with self._lock:
            if self._registry is not None:
                self._registry.close()
                self._registry = None


def _doors(request: Request) -> Doors:
    return cast("Doors", request.app.state.doors)


Open = Annotated[Doors, Depends(_doors)]
