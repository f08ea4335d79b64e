"""Where the service learns which models it is to have up, and where their files are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.registry import Registry
from services.settings import Settings
from services.tracking import ModelNotFound, Tracking

__all__ = ["FixedModels", "Found", "Models", "RegistryModels"]

PATIENCE_S = 3.0  # seconds that one look waits for MLflow


@dataclass(frozen=True)
class Found:
    """A model version with its files on this machine."""

    model: str
    """`name@alias`."""
    version: str
    checkpoint: Path
    """Folder of a checkpoint, or one that holds checkpoints, of which the newest counts."""
    profile: Path | None = None
    """File of what was measured about the model."""


class Models(Protocol):
    """What is to be up. Looked at again and again, from a thread of its own."""

    def wanted(self) -> Mapping[str, Found | str]:
        """By `name@alias`: the version it points at now, or why there is none. Raises where that cannot be told now."""
        ...


class FixedModels:
    """Models named by hand, for notebooks and tests; `models` may be changed while the service runs."""

    def __init__(self, *models: Found) -> None:
        self.models: dict[str, Found | str] = {found.model: found for found in models}

    def wanted(self) -> Mapping[str, Found | str]:
        return dict(self.models)


class RegistryModels:
    """What the registry says is to be served, each at the version its alias points at in MLflow."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tracking = Tracking(settings, patience_s=PATIENCE_S)
        self._registry: Registry | None = None

    def wanted(self) -> Mapping[str, Found | str]:
        """Raises RegistryUnavailable and TrackingUnavailable."""
        if self._registry is None:
            self._registry = Registry.open(self._settings.registry_url)
        return {row.model: self._find(row.model) for row in self._registry.queue.served()}

    def _find(self, model: str) -> Found | str:
        try:
            version = self._tracking.resolve(model)
        except ModelNotFound as missing:
            return str(missing)
        profile = version.profile
        return Found(model, version.version, version.checkpoint, profile if profile.exists() else None)
