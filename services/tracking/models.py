"""Registered models in MLflow: versions made once, found by alias, their files on this machine."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from loopcore.specs import ModelName
from services.tracking.errors import TrackingError
from services.tracking.store import Store

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

__all__ = ["ModelInfo", "ModelVersion", "Models"]

JOB_TAG = "loop.job"  # says which job made a version


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model, its files on this machine."""

    name: str
    version: str
    path: Path
    """Folder with `MLmodel`; its `artifacts/` holds `checkpoint/` and `profile.json`."""
    aliases: tuple[str, ...] = ()
    mlflow_run: str | None = None
    created_at: float = 0.0
    """Seconds since 1970."""
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def source_dir(self) -> Path:
        """The same as `path`."""
        return self.path

    @property
    def checkpoint(self) -> Path:
        return self.path / "artifacts" / "checkpoint"

    @property
    def profile(self) -> Path:
        return self.path / "artifacts" / "profile.json"


@dataclass(frozen=True)
class ModelInfo:
    """One registered model."""

    name: str
    aliases: dict[str, str]
    """Version by alias."""
    latest: str | None
    """Newest version."""
    updated_at: float
    """Seconds since 1970."""
    tags: dict[str, str]
    """Tags of the newest version."""


class Models(Store):
    """The part of the adapter that publishes and finds model versions."""

    def register(self, name: str, *, files: Path, mlflow_run: str, tags: dict[str, str], key: str) -> str:
        """The version of model `name` tagged with `key`, made from the folder `files` if it is not there. Gives its number.

        `files` is a model folder as `mlflow.pyfunc.save_model` writes it; it is copied to the run's artifacts.
        """
        from mlflow.exceptions import MlflowException

        def work(client: MlflowClient) -> str:
            found = client.search_model_versions(f"name = '{name}' and tags.`{JOB_TAG}` = '{key}'")
            if found:
                return str(found[0].version)
            try:
                client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            folder = f"model-{key}"
            client.log_artifacts(mlflow_run, str(files), folder)
            source = f"{client.get_run(mlflow_run).info.artifact_uri}/{folder}"
            made = client.create_model_version(name, source, mlflow_run, tags=tags | {JOB_TAG: key})
            return str(made.version)

        return self.call(f"register {name}", work)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Points `name@alias` at a version."""
        self.call(f"set {name}@{alias}", lambda client: client.set_registered_model_alias(name, alias, version))

    def models(self) -> list[ModelInfo]:
        """All registered models, by name."""

        def work(client: MlflowClient) -> list[ModelInfo]:
            found: list[ModelInfo] = []
            token: str | None = None
            while True:
                page = client.search_registered_models(order_by=["name ASC"], page_token=token)
                found.extend(self._info(client, model) for model in page)
                token = page.token
                if not token:
                    return found

        return self.call("list models", work)

    def resolve(self, model: str) -> ModelVersion:
        """The version that `name@alias` points at, with its files on this machine. Raises ModelNotFound, TrackingUnavailable.

        Raises ValueError where `model` is not of that form.
        """
        asked = ModelName.parse(model)

        def work(client: MlflowClient) -> Any:
            return client.get_model_version_by_alias(asked.name, asked.alias)

        return self._version(self.call(f"find {model}", work, missing=self._missing(asked)))

    def version(self, name: str, number: str) -> ModelVersion:
        """One version by its number. Raises ModelNotFound, TrackingUnavailable."""
        missing = f"there is no version {number} of model {name}; expected one of those that `loop models` lists"
        return self._version(self.call("find a version", lambda client: client.get_model_version(name, number), missing=missing))

    def _info(self, client: MlflowClient, model: Any) -> ModelInfo:
        versions = client.search_model_versions(f"name = '{model.name}'", max_results=1, order_by=["version_number DESC"])
        newest = versions[0] if versions else None
        return ModelInfo(
            name=model.name,
            aliases={alias: str(version) for alias, version in model.aliases.items()},
            latest=str(newest.version) if newest else None,
            updated_at=(model.last_updated_timestamp or 0) / 1000,
            tags=dict(newest.tags) if newest else {},
        )

    def _version(self, found: Any) -> ModelVersion:
        return ModelVersion(
            name=found.name,
            version=str(found.version),
            path=self._local(found.source),
            aliases=tuple(found.aliases),
            mlflow_run=found.run_id,
            created_at=(found.creation_timestamp or 0) / 1000,
            tags=dict(found.tags),
        )

    def _local(self, source: str) -> Path:
        """The files at an artifact URI: where they are if this machine sees them, else a copy below HOME."""
        parts = urlsplit(source)
        if parts.scheme in ("", "file"):
            return Path(url2pathname(parts.path))
        from mlflow.artifacts import download_artifacts

        kept = self.settings.home / "cache" / "models" / parts.netloc / parts.path.strip("/").replace("/", "-")
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
                self.call("fetch a model", lambda _: download_artifacts(artifact_uri=source, dst_path=folder))
                fetched = next(Path(folder).rglob("MLmodel")).parent
                try:
                    fetched.rename(kept)
                except OSError:
                    if not kept.exists():  # otherwise another process fetched it meanwhile
                        raise
        return kept

    def _missing(self, asked: ModelName) -> str:
        try:
            known = {model.name: model for model in self.models()}
        except TrackingError:
            known = {}
        if asked.name in known:
            aliases = ", ".join(f"{asked.name}@{alias}" for alias in sorted(known[asked.name].aliases)) or "none yet"
            return f"model {asked.name} has no alias {asked.alias!r}; expected one that exists: {aliases}"
        names = ", ".join(sorted(known)) or "none yet: register one with `loop promote`"
        return f"there is no model {asked}; expected one that was registered: {names}"
