"""The thread that keeps an attempt's lease, and the one that ends the process if that could not be done.

A lease is renewed for `lease_s` seconds by the database's clock. The process counts from the moment it *asked*, by a clock
that also runs while the machine sleeps, so its own idea of the end is never later than the database's: when it says that
the lease is over, it is, or will be before anybody else may take the job.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from services.registry import Fence, LeaseLost, Registry, RegistryUnavailable
from services.settings import Settings
from workers.capture import Captured

__all__ = ["LEASE_OVER", "Keeper", "seconds"]

LEASE_OVER = 75  # exit status of a process that ended itself because its lease was over
TICK_S = 0.1  # seconds between two looks of either thread
NEWS_S = 1.0  # seconds between heartbeats while there is progress to tell, and between pieces of log
STOP_S = 10.0  # seconds a job that lost its lease has to stop by itself
MARGIN = 0.1  # share of the lease before its end at which the job is told to stop

_log = logging.getLogger(__name__)


def seconds() -> float:
    """A clock that never goes back and also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _end_process(why: str) -> None:
    stream = sys.__stderr__
    if stream is not None:
        stream.write(f"loop: {why}; this process ends now\n")
        stream.flush()
    os._exit(LEASE_OVER)


class Keeper:
    """Renews the lease of one attempt, carries progress and output to the registry, and brings back what people asked for.

    `end` is what ends the process when the lease is over (tests put something gentler there).
    """

    def __init__(
        self,
        registry: Registry,
        fence: Fence,
        settings: Settings,
        captured: Captured,
        *,
        end: Callable[[str], None] = _end_process,
    ) -> None:
        self._registry = registry
        self._fence = fence
        self._lease_s = settings.lease_s
        # Seen well before the grace of a cancel request is over, however rare heartbeats are.
        self._every_s = min(settings.heartbeat_s, settings.cancel_grace_s / 5)
        self._again_s = min(NEWS_S, MARGIN * settings.lease_s)  # after a heartbeat that failed
        self._captured = captured
        self._end = end
        self._over = threading.Event()
        self._beating = threading.Lock()
        self._news: dict[str, Any] | None = None
        self._asked_at = self._beat_at = self._logged_at = seconds()
        self._ends_at = self._asked_at + self._lease_s
        self.cancel_requested = False
        self.deadline_passed = False
        self.lost: LeaseLost | None = None
        self._threads = [
            threading.Thread(target=copy_context().run, args=[target], name=f"lease-{name}", daemon=True)
            for name, target in (("keeper", self._keep), ("watchdog", self._watch))
        ]

    def __enter__(self) -> Keeper:
        """Renews the lease once and starts the threads. Raises LeaseLost, RegistryUnavailable."""
        self.beat()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def tell(self, progress: dict[str, Any]) -> None:
        """Progress for the next heartbeat."""
        self._news = progress

    def failing(self) -> bool:
        """Whether the lease is lost, or so near its end that the job must stop."""
        return self.lost is not None or seconds() >= self._ends_at - MARGIN * self._lease_s

    def beat(self) -> None:
        """Renews the lease now. Raises LeaseLost, RegistryUnavailable."""
        with self._beating:
            asked_at, news = seconds(), self._news
            self._beat_at = asked_at
            try:
                answer = self._registry.queue.beat(self._fence, lease_s=self._lease_s, progress=news)
            except LeaseLost as lost:
                self.lost = lost
                self._ends_at = min(self._ends_at, seconds() + STOP_S)
                raise
            self._ends_at = asked_at + self._lease_s
            if self._news is news:
                self._news = None
            self.cancel_requested |= answer.cancel_requested
            self.deadline_passed |= answer.deadline_passed

    def flush(self) -> None:
        """Carries the output so far to the registry; what cannot be kept now is kept for later. Raises LeaseLost."""
        text = self._captured.take()
        self._logged_at = seconds()
        if not text:
            return
        try:
            self._registry.queue.log(self._fence, text)
        except RegistryUnavailable:
            self._captured.put_back(text)

    def deliver(self) -> None:
        """Carries all that is left to tell, for the last time. Raises LeaseLost, RegistryUnavailable."""
        if self._news is not None:
            self.beat()
        self.flush()

    def _keep(self) -> None:
        silent = False
        while not self._over.wait(TICK_S):
            now = seconds()
            try:
                if now - self._beat_at >= self._every_s or (self._news is not None and now - self._beat_at >= NEWS_S):
                    self.beat()
                    if silent:
                        _log.warning("the registry answers again")
                    silent = False
                if now - self._logged_at >= NEWS_S:
                    self.flush()
            except LeaseLost:
                return  # the job learns it from `lost`, and the watchdog ends the process if it does not
            except RegistryUnavailable as error:
                self._beat_at = seconds() - self._every_s + self._again_s
                if not silent:
                    left = self._ends_at - seconds()
                    _log.warning("heartbeat not delivered, the lease lasts %.0f s more: %s", left, error)
                silent = True
            except Exception:
                _log.exception("heartbeat failed")

    def _watch(self) -> None:
        # Apart from the keeper, which may be waiting for a database that does not answer.
        while not self._over.wait(TICK_S):
            if seconds() >= self._ends_at:
                self._end(f"the lease of attempt {self._fence.attempt} at job {self._fence.job} is over")
                return
