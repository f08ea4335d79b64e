"""Where the parts of one installation are, and how they behave: from `LOOP_*` variables and `loop.toml`."""

from __future__ import annotations

import ipaddress
import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.problems import explain

__all__ = ["Settings", "SettingsError", "without_password"]

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0.0, le=1e9)]

_SECRET = frozenset({"registry_url", "mlflow_url", "token"})
_CONFIG = "LOOP_CONFIG"  # names a settings file elsewhere than HOME/loop.toml


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it, one line a setting."""


def without_password(url: str) -> str:
    """`url` as it may be shown or logged."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))


def _sqlite(name: str) -> Any:
    return lambda data: f"sqlite:///{data['home'] / name}" if "home" in data else ""


def _below_home(name: str) -> Any:
    return lambda data: data["home"] / name if "home" in data else Path(name)


class Settings(BaseModel):
    """All settings, resolved. `Settings.load()` reads the environment and the file; `Settings(...)` takes values as given."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    home: Path = Path(".loop")
    """Folder of everything a local installation writes. Relative: from the working directory."""
    registry_url: str = Field(default_factory=_sqlite("registry.db"), repr=False)
    """Registry and queue: `sqlite:///PATH` or `postgresql://USER:PASSWORD@HOST/NAME`. Empty: HOME/registry.db."""
    mlflow_url: str = Field(default_factory=_sqlite("mlflow.db"), repr=False)
    """MLflow's tracking and model store: `sqlite:///PATH`, a database URL or `http(s)://`. Empty: HOME/mlflow.db."""
    artifacts: Path = Field(default_factory=_below_home("artifacts"))
    """Artifacts of runs and model versions. Relative: below HOME. A cluster needs a folder that every node sees."""
    checkpoints: Path = Field(default_factory=_below_home("checkpoints"))
    """Checkpoints of running jobs. Relative: below HOME. A cluster needs a folder that every node sees."""

    api_host: str = "127.0.0.1"
    """Address the API listens on. Only loopback until tokens exist."""
    api_port: Port = 8700
    """Port the API listens on."""
    api_url: str | None = None
    """Where the command line finds the API. Empty: the stack of HOME."""
    token: SecretStr | None = Field(default=None, exclude=True)
    """Token the command line sends to the API."""

    inference_host: str = "127.0.0.1"
    """Address the inference service listens on. Only loopback until tokens exist."""
    inference_port: Port = 8701
    """Port the inference service listens on."""
    inference_url: str | None = None
    """Where the command line finds the inference service. Empty: the stack's own."""

    inference_rows: int = Field(default=64, ge=1, le=4096)
    """Words that a served model loops at once."""
    inference_queue: int = Field(default=256, ge=1, le=65536)
    """Words that may wait for a served model; a request that finds no room is answered with 503."""
    inference_models: int = Field(default=8, ge=1, le=1024)
    """Models a replica keeps in memory. The one unused longest leaves first, and comes back when it is asked for."""
    inference_length_factor: int = Field(default=4, ge=1, le=64)
    """Longest word a served model takes, as a multiple of the longest it was trained on."""
    inference_threads: int = Field(default=1, ge=1, le=256)
    """Threads a replica of the inference service computes with."""

    ray_address: str | None = None
    """`HOST:PORT` of a Ray cluster to join. Empty: `loop up` starts one of its own."""
    ray_namespace: str = Field(default="loop", min_length=1)
    """Ray namespace of the jobs' actors; one installation a namespace."""
    ray_cpus: int | None = Field(default=None, ge=1)
    """CPUs the stack's own Ray offers to jobs. Empty: all that this machine has."""
    ray_gpus: int | None = Field(default=None, ge=0)
    """GPUs the stack's own Ray offers. Empty: all that this machine has."""
    ray_object_store_mb: int = Field(default=256, ge=80)
    """Shared memory of the stack's own Ray, MiB; jobs pass only small values through it."""

    lease_s: Seconds = 90.0
    """Seconds without a heartbeat after which a job's attempt counts as lost."""
    heartbeat_s: Seconds = 10.0
    """Seconds between heartbeats; at most a third of the lease."""
    poll_s: Seconds = 0.5
    """Seconds between two looks of the dispatcher at the queue."""
    cancel_grace_s: Seconds = 10.0
    """Seconds a cancelled job has to write its last checkpoint before it is ended."""
    retention_s: Seconds = 90 * 86400.0
    """Seconds that finished jobs' logs and rows are kept before they are pruned."""

    @classmethod
    def load(cls, **given: Any) -> Settings:
        """From `given`, then the environment (`LOOP_HOME`, ...), then `loop.toml`. Raises SettingsError.

        The file is HOME/loop.toml, or the one that `LOOP_CONFIG` names.
        """
        try:
            return cls.model_validate(dict(_Sources(**given)))
        except ValidationError as error:
            lines = [_named(problem.field, problem.line()) for problem in explain(error, cls, hide=_SECRET)]
            raise SettingsError("\n".join(lines)) from None

    @property
    def stack_file(self) -> Path:
        """What the local stack writes about itself once it is up: process ids, ports, addresses."""
        return self.home / "stack.json"

    def cluster_address(self) -> str | None:
        """`HOST:PORT` of the Ray cluster: the setting, or the running stack's own."""
        if self.ray_address:
            return self.ray_address
        try:
            return json.loads(self.stack_file.read_text())["ray"]["address"]
        except (OSError, ValueError, KeyError):
            return None

    def token_file(self) -> Path:
        """Where the token of the stack's own Ray is kept, readable by its owner only."""
        return self.home / "ray-token"

    @field_validator("home")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()  # not resolve(): a link to a data disk stays a link

    @field_validator("artifacts", "checkpoints")
    @classmethod
    def _under_home(cls, value: Path, info: Any) -> Path:
        value = value.expanduser()
        return value if value.is_absolute() or "home" not in info.data else info.data["home"] / value

    @field_validator("registry_url")
    @classmethod
    def _a_registry(cls, value: str) -> str:
        scheme = value.partition("://")[0].partition("+")[0]
        if scheme not in ("sqlite", "postgresql"):
            raise ValueError(f"expected sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME, got the scheme {scheme!r}")
        return _absolute_sqlite(value)

    @field_validator("mlflow_url")
    @classmethod
    def _a_tracking_store(cls, value: str) -> str:
        scheme = value.partition("://")[0].partition("+")[0]
        if scheme not in ("sqlite", "postgresql", "mysql", "mssql", "http", "https"):
            raise ValueError(f"expected sqlite:///PATH, a database URL or http(s)://HOST, got the scheme {scheme!r}")
        return _absolute_sqlite(value)

    @field_validator("api_host", "inference_host")
    @classmethod
    def _loopback(cls, value: str) -> str:
        try:
            loopback = value == "localhost" or ipaddress.ip_address(value).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise ValueError(f"expected a loopback address such as 127.0.0.1, got {value!r}: nothing asks for a token yet")
        return value

    @field_validator("api_url", "inference_url")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).scheme not in ("http", "https"):
            raise ValueError(f"expected http://HOST:PORT or https://HOST, got {without_password(value)!r}")
        return value.rstrip("/") if value else None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if 3 * self.heartbeat_s > self.lease_s:
            raise ValueError(f"heartbeat_s: expected at most a third of lease_s ({self.lease_s / 3:g}), got {self.heartbeat_s:g}")
        if (self.api_host, self.api_port) == (self.inference_host, self.inference_port):
            raise ValueError(f"inference_port: expected another port than the API's {self.api_port}")
        return self


def _absolute_sqlite(url: str) -> str:
    """A relative SQLite path would name another file in every process that has another working directory."""
    scheme, _, rest = url.partition(":///")
    if not scheme.startswith("sqlite"):
        return url
    path = rest.partition("?")[0]
    if path in ("", ":memory:"):
        raise ValueError("expected sqlite:///PATH: several processes share this database, so it must be a file")
    return f"{scheme}:///{Path(path).expanduser().absolute()}{rest[len(path) :]}"


def _named(field: str | None, line: str) -> str:
    if field is None:
        return f"settings: {line}"
    return f"setting {field.split('.')[0]} (LOOP_{field.split('.')[0].upper()}): {line.removeprefix(field + ': ')}"


class _Sources(Settings, BaseSettings):
    """Settings as the environment and the file give them."""

    model_config = SettingsConfigDict(env_prefix="LOOP_", env_ignore_empty=True, enable_decoding=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[Any, ...]:
        return init_settings, env_settings, lambda: _file_settings(init_settings().get("home"))


def _file_settings(home: Any) -> dict[str, Any]:
    named = os.environ.get(_CONFIG)
    path = Path(named) if named else Path(home or os.environ.get("LOOP_HOME") or ".loop").expanduser() / "loop.toml"
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        if named:
            raise SettingsError(f"{_CONFIG} names {path}, which does not exist; write it or unset {_CONFIG}") from None
        return {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read {path}: {error}; expected TOML lines such as api_port = 8700") from None
