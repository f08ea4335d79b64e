"""What the service counts, for Prometheus. Every name is described in docs/serving.md; a test compares.

Counters of requests and answers belong to the replica. Those of engines are read from them when somebody looks, and end with
the version they count for.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from loopcore.batching import Finished

__all__ = ["PREFIX", "Metrics"]

PREFIX = "loop_inference"
LOOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
BY_VERSION = ("model", "version")

# Counters of the engine (`loopcore.batching.Stats`) by their names here, with what they count.
COUNTERS = {
    "submitted": ("words_submitted", "Words taken into the line."),
    "rejected": ("words_rejected", "Words refused because the line was full."),
    "admitted": ("words_admitted", "Words that began to loop."),
    "refills": ("refills", "Words that joined a batch already under way."),
    "ticks": ("ticks", "Ticks of the engine: one loop for every live word."),
    "tick_s": ("tick_seconds", "Seconds spent in ticks."),
    "passes": ("passes", "Passes of the block, one a tick and word length."),
    "useful_token_loops": ("useful_token_loops", "Positions times loops that counted."),
    "padded_token_loops": ("padded_token_loops", "Positions times loops spent on padding."),
    "readout_rows": ("readouts", "Words whose prediction was read."),
    "check_rows": ("checks", "Looks of a halting rule at a word."),
}
GAUGES = {"live": "Words looping now.", "waiting": "Words waiting now."}


class Metrics:
    """One replica's counters."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._seen: dict[tuple[str, str], dict[str, Any]] = {}

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", what, ("model",), buckets=buckets, registry=self._registry)

        self._requests = Counter(
            f"{PREFIX}_requests", "Requests by route and status.", ("route", "status"), registry=self._registry
        )
        self._loops = histogram("exit_loops", "Loops of answered words.", LOOPS)
        self._queue = histogram("queue_seconds", "Seconds from a word's arrival to its first loop.", SECONDS)
        self._compute = histogram("compute_seconds", "Seconds from a word's first loop to its answer.", SECONDS)
        self._registry.register(self)

    def request(self, route: str, status: int) -> None:
        """Counts a request; `route` is its pattern, so that there are only so many."""
        self._requests.labels(route, str(status)).inc()

    def answered(self, model: str, event: Finished) -> None:
        """Counts a word that got its answer."""
        self._loops.labels(model).observe(event.loops_used)
        self._queue.labels(model).observe(event.queue_s)
        self._compute.labels(model).observe(event.compute_s)

    def observe(self, model: str, version: str, stats: dict[str, Any], live: int, waiting: int) -> None:
        """Takes what an engine has counted."""
        self._seen[model, version] = stats | {"live": live, "waiting": waiting}

    def text(self, up: Set[tuple[str, str]]) -> bytes:
        """All of it in Prometheus' text format; engines of models that are not `up` are left out."""
        self._seen = {key: seen for key, seen in self._seen.items() if key in up}
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What the engines have counted (called by prometheus_client)."""
        for field, (name, what) in COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}_{name}", what, labels=BY_VERSION)
            for key, seen in self._seen.items():
                counter.add_metric(key, seen[field])
            yield counter
        reasons = CounterMetricFamily(
            f"{PREFIX}_words_finished", "Words by what ended them.", labels=(*BY_VERSION, "exit_reason")
        )
        for key, seen in self._seen.items():
            for reason, count in seen["reasons"].items():
                reasons.add_metric((*key, reason), count)
        yield reasons
        for name, what in GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}_{name}_words", what, labels=BY_VERSION)
            for key, seen in self._seen.items():
                gauge.add_metric(key, seen[name])
            yield gauge
