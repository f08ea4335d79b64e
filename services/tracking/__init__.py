"""MLflow, spoken to in batches: runs with their curves, artifacts, and model versions under aliases.

The registry is the truth and MLflow a mirror that people look at with the tools of their field: whatever is written here
can be written again without a second copy appearing. MLflow is imported on first use only, for it takes seconds.
"""

from services.tracking.errors import ModelNotFound, TrackingError, TrackingUnavailable
from services.tracking.models import ModelInfo, Models, ModelVersion
from services.tracking.runs import METRICS_A_CALL, Runs
from services.tracking.store import EXPERIMENT

__all__ = [
    "EXPERIMENT",
    "METRICS_A_CALL",
    "ModelInfo",
    "ModelNotFound",
    "ModelVersion",
    "Tracking",
    "TrackingError",
    "TrackingUnavailable",
]


class Tracking(Runs, Models):
    """The MLflow store of one installation: its runs and its models."""
