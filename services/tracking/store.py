"""The connection to MLflow: opened on first use, tried again where it does not answer, its errors told as ours."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import stamina

from services.settings import Settings, without_password
from services.tracking.errors import ModelNotFound, TrackingError, TrackingUnavailable

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

__all__ = ["EXPERIMENT", "Store", "experiment"]

EXPERIMENT = "loop"  # all runs of an installation; their tags tell them apart

Answer = TypeVar("Answer")


class Store:
    """The MLflow store of one installation. Safe to share between threads; connects on first use."""

    def __init__(self, settings: Settings, *, patience_s: float = 10.0) -> None:
        """`patience_s`: how long a call is tried again before TrackingUnavailable."""
        self.settings = settings
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._opened: MlflowClient | None = None

    @property
    def place(self) -> str:
        """The store's URL without its password, for people."""
        return without_password(self.settings.mlflow_url)

    def prepare(self) -> None:
        """Makes the store's tables and the experiment if they are not there. Raises TrackingUnavailable."""
        self.call("open", lambda client: None)

    def call(self, what: str, work: Callable[[MlflowClient], Answer], *, missing: str | None = None) -> Answer:
        """Runs `work`, again for `patience_s` seconds where the store does not answer."""
        tries = stamina.retry_context(
            on=TrackingUnavailable, attempts=None, timeout=self._patience_s, wait_initial=0.2, wait_max=2.0, wait_jitter=0.2
        )
        for attempt in tries:
            with attempt, self._translated(what, missing):
                return work(self._client())
        raise AssertionError("stamina either returns or raises")

    @contextmanager
    def _translated(self, what: str, missing: str | None) -> Iterator[None]:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE") and missing is not None:
                raise ModelNotFound(missing) from None
            if error.get_http_status_code() < 500:
                raise TrackingError(f"MLflow at {self.place} refused to {what}: {error.message}") from error
            raise self._unavailable(what, error) from error
        except (OSError, SQLAlchemyError) as error:  # requests' errors are OSErrors
            raise self._unavailable(what, error) from error

    def _unavailable(self, what: str, error: Exception) -> TrackingUnavailable:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        first = first.replace(self.settings.mlflow_url, self.place)  # it may hold a password
        return TrackingUnavailable(f"MLflow at {self.place} did not {what}: {first[:300]}; see that it is up (LOOP_MLFLOW_URL)")

    def _client(self) -> MlflowClient:
        with self._lock:
            if self._opened is None:
                with self._one_at_a_time():
                    self._opened = self._open()
            return self._opened

    def _open(self) -> MlflowClient:
        url = self.settings.mlflow_url
        # A server that is down is met by our own patience, not by MLflow's seven tries of two minutes each.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        for noisy in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=url, registry_uri=url)
        experiment(client, self.settings)
        return client

    def _one_at_a_time(self) -> AbstractContextManager[None]:
        """MLflow makes its tables on first contact, and two processes that do so at once break each other."""
        return _file_lock(self.settings.home / "mlflow.lock") if _is_database(self.settings) else nullcontext()


def _is_database(settings: Settings) -> bool:
    return not settings.mlflow_url.startswith("http")


def experiment(client: MlflowClient, settings: Settings) -> str:
    """The experiment's number; it is made if it is not there, with its artifacts below the settings' folder."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return found.experiment_id
    place = (settings.artifacts / "mlflow").as_uri() if _is_database(settings) else None
    try:
        return client.create_experiment(EXPERIMENT, artifact_location=place)
    except MlflowException as error:
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is None or error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return found.experiment_id


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
