"""Ends in MLflow what a job left open there: its process was killed after a cancel, or lost for good, and could not do so."""

from __future__ import annotations

import logging

from services.registry import JobState, Registry
from services.settings import Settings
from services.tracking import Tracking, TrackingError

__all__ = ["close"]

_log = logging.getLogger(__name__)


def close(settings_json: str, job: int) -> int:
    """Ends the MLflow runs of an ended job that its registry runs do not call complete; gives how many there are."""
    settings = Settings.model_validate_json(settings_json)
    tracking = Tracking(settings)
    with Registry.open(settings.registry_url) as registry:
        row = registry.queue.job(job)
        if not row.ended or row.state is JobState.SUCCEEDED:
            return 0
        status = "KILLED" if row.state is JobState.CANCELLED else "FAILED"
        open_still = [run.mlflow_run for run in registry.records.runs(job) if run.finished_at is None and run.mlflow_run]
    for mlflow_run in open_still:
        try:
            tracking.end_run(mlflow_run, status)
        except TrackingError as error:
            _log.warning("%s", error)
    return len(open_still)
