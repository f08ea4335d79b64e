"""Ends in MLflow what jobs left open there: their processes are gone, or MLflow was away when they ended."""

from __future__ import annotations

import logging

from services.registry import JobNotFound, Registry, RunNotFound, RunState
from services.settings import Settings
from services.tracking import Tracking, TrackingError
from workers.feed import STATUS, copy_key

__all__ = ["close"]

_log = logging.getLogger(__name__)


def close(settings_json: str) -> int:
    """Ends every MLflow run that copies a run of this registry whose job has ended; gives how many there were.

    It begins with what MLflow calls running, so that a job whose end nobody saw is found as well.
    """
    settings = Settings.model_validate_json(settings_json)
    tracking = Tracking(settings)
    ended = 0
    try:
        with Registry.open(settings.registry_url) as registry:
            for mlflow_run, key in tracking.running().items():
                status = _status(registry, key)
                if status is not None:
                    tracking.end_run(mlflow_run, status)
                    ended += 1
    except TrackingError as error:
        _log.warning("%s", error)
    return ended


def _status(registry: Registry, key: str) -> str | None:
    """How the MLflow run of this key ended; None where it goes on, or copies a run of another registry."""
    number = key.partition("@")[0]
    if not number.isdecimal():
        return None
    try:
        run = registry.records.run(int(number))
        if copy_key(run) != key or run.state is RunState.RUNNING or not registry.queue.job(run.job).ended:
            return None
    except (RunNotFound, JobNotFound):
        return None
    return STATUS[run.state]
