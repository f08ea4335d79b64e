"""`/health` and `/v1/cluster`: whether this process lives, whether work gets done, and on what."""

from __future__ import annotations

from fastapi import APIRouter

from services.api.bodies import Cluster, Health
from services.api.doors import Open
from services.api.errors import Refused, may_answer
from services.problems import Problem
from services.registry import DispatcherRow

__all__ = ["FRESH_S", "router"]

router = APIRouter()

FRESH_S = 20.0  # seconds since its last word after which a dispatcher counts as gone; it speaks every 2


@router.get("/health/live", tags=["health"])
def live() -> Health:
    """This process answers."""
    return Health()


@router.get("/health/ready", tags=["health"], responses=may_answer(503, "Jobs do not get done now."))
def ready(doors: Open) -> Health:
    """The registry answers, and a dispatcher with a cluster works for it."""
    fresh = _fresh(doors)
    if not fresh:
        raise Refused(503, Problem("no dispatcher is up", f"one that spoke within {FRESH_S:g} s", "see `loop doctor`"))
    if not any(row.cluster.get("ray") == "up" for row in fresh):
        why = next((str(row.cluster["problem"]) for row in fresh if row.cluster.get("problem")), "it does not say why")
        raise Refused(503, Problem(f"the dispatcher has no cluster: {why}", "a Ray cluster that answers", "see `loop doctor`"))
    return Health()


@router.get("/v1/cluster", tags=["cluster"])
def read_cluster(doors: Open) -> Cluster:
    """Dispatchers that are up, what their clusters have and what is free, why jobs wait, and how many are in each state."""
    registry = doors.registry
    counts = {str(state.value): number for state, number in registry.queue.counts().items()}
    return Cluster(_fresh(doors), counts, registry.ping())


def _fresh(doors: Open) -> list[DispatcherRow]:
    return [row for row in doors.registry.queue.dispatchers() if row.age_s <= FRESH_S]
