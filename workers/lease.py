"""One attempt at a job, from its beginning to its final state, under a lease that this process keeps by itself.

What ends an attempt from outside, raised by `HeldJob.check`:

    Stop
    ├── CancelRequested  somebody asked the job to stop; it writes a last checkpoint and ends as cancelled
    └── DeadlinePassed   the job's time limit is over; it ends as failed
    Released             its cluster is shut down: it writes a last checkpoint, and another attempt goes on from there
    and LeaseLost        (services.registry) another attempt may hold the job: this one stops and says nothing any more
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import stamina
from pydantic import ValidationError

from loopcore.errors import InputError, LoopcoreError
from loopcore.specs import JobSpec, parse_job
from services.registry import Fence, Job, LeaseLost, Registry, RegistryUnavailable, SchemaTooNew, SchemaTooOld
from services.settings import Settings
from services.tracking import Tracking
from workers.capture import Captured
from workers.keeper import Keeper, seconds

__all__ = [
    "CancelRequested",
    "DeadlinePassed",
    "HeldJob",
    "Released",
    "Stop",
    "attend",
    "keep_quiet",
    "load",
    "open_registry",
    "run_attempt",
]

SHUT_DOWN = "its cluster is shut down"
RATE_OVER_S = 20.0  # seconds that a progress rate looks back

Answer = TypeVar("Answer")
Work = Callable[["HeldJob"], dict[str, Any]]

_log = logging.getLogger(__name__)


class Stop(Exception):
    """The attempt is to end, for a reason that is not in the work itself."""


class CancelRequested(Stop):
    """Somebody asked the job to stop."""


class DeadlinePassed(Stop):
    """The job's time limit is over."""


class Released(Exception):
    """The attempt is to end soon and the job is not: its runs stay open for the attempt that goes on with them."""


class HeldJob:
    """What a job's code is given: its spec, where to write, and whether to go on."""

    def __init__(
        self, job: Job, settings: Settings, registry: Registry, keeper: Keeper, *, release: threading.Event | None = None
    ) -> None:
        """`release` is set from outside when the attempt is to give the job back."""
        self.job = job
        self.fence = job.fence
        self.settings = settings
        self.registry = registry
        self.result: dict[str, Any] | None = None
        """What a cancelled job has to show; kept with it."""
        self._keeper = keeper
        self._release = release or threading.Event()
        self._seen: deque[tuple[float, float]] = deque()

    @cached_property
    def spec(self) -> JobSpec:
        return parse_job(self.job.spec)

    @cached_property
    def tracking(self) -> Tracking:
        return Tracking(self.settings)

    @property
    def threads(self) -> int:
        """Threads this process may compute with: its granted CPUs, at least one."""
        return max(1, int(self.job.cpus))

    @property
    def granted_gpu(self) -> bool:
        return self.job.gpus > 0

    def check(self) -> None:
        """Call it often. Raises CancelRequested, DeadlinePassed, Released, LeaseLost."""
        if self._keeper.failing():
            raise self._keeper.lost or LeaseLost(self.fence.job, self.fence.attempt, "the lease could not be renewed in time")
        if self._keeper.cancel_requested:
            raise CancelRequested
        if self._keeper.deadline_passed:
            limit = self.job.time_limit_s or 0.0
            raise DeadlinePassed(f"not done within its time limit of {limit:g} s; raise time_limit_s, or ask for less")
        if self._release.is_set():
            raise Released

    @property
    def stopping(self) -> bool:
        """Whether `check` would raise."""
        told = self._keeper.cancel_requested or self._keeper.deadline_passed or self._release.is_set()
        return told or self._keeper.failing()

    def progress(self, done: float, total: float | None = None, note: str = "", *, unit: str = "steps") -> None:
        """Tells how far the job is; people see it within about a second. `rate` is in units a second."""
        now = seconds()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > RATE_OVER_S:
            self._seen.popleft()
        began, before = self._seen[0]
        rate = (done - before) / (now - began) if now > began else None
        left_s = (total - done) / rate if rate and total is not None else None
        self._keeper.tell({"done": done, "total": total, "unit": unit, "rate": rate, "left_s": left_s, "note": note})

    def write(self, call: Callable[[], Answer]) -> Answer:
        """Runs a write to the registry, again while the registry is away and the lease lasts. Raises LeaseLost."""
        while True:
            try:
                return call()
            except RegistryUnavailable as error:
                if self._keeper.failing():
                    raise LeaseLost(self.fence.job, self.fence.attempt, f"the registry is away: {error}") from error
                time.sleep(0.5)


def run_attempt(
    entry: str,
    job: int,
    attempt: int,
    settings_json: str,
    *,
    node: str | None = None,
    release: threading.Event | None = None,
) -> str:
    """Runs `entry` ("workers.train:run") for an attempt that a dispatcher claimed, and writes its end to the registry.

    Once `release` is set, the job writes a last checkpoint and is given back.
    Gives the state the job is in then, or `lost` where it is no longer this attempt's or the registry stayed away.
    """
    settings = Settings.model_validate_json(settings_json)
    keep_quiet()
    with open_registry(settings) as registry:

        def work(held: HeldJob) -> dict[str, Any]:
            return load(entry, held.threads)(held)

        return attend(Fence(job, attempt), work, registry, settings, Captured(), node=node, release=release)


def attend(
    fence: Fence,
    work: Work,
    registry: Registry,
    settings: Settings,
    captured: Captured,
    *,
    node: str | None = None,
    release: threading.Event | None = None,
) -> str:
    """Runs `work` for an attempt under its lease; gives what `run_attempt` does. The output goes where `captured` takes it."""
    try:
        row = registry.queue.begin(fence, node or socket.gethostname(), os.getpid())
        with captured, Keeper(registry, fence, settings, captured) as keeper:
            return _work(work, HeldJob(row, settings, registry, keeper, release=release), keeper)
    except (LeaseLost, RegistryUnavailable) as lost:
        _log.warning("%s", lost)
        return "lost"


def _work(work: Work, held: HeldJob, keeper: Keeper) -> str:
    queue, fence = held.registry.queue, held.fence
    try:
        result = work(held)
    except (LeaseLost, RegistryUnavailable):
        raise  # neither is the job's own error
    except Released:
        _log.info("gives the job back: %s", SHUT_DOWN)
        return _end(held, keeper, lambda: queue.release(fence, SHUT_DOWN))
    except CancelRequested:
        _log.info("stopped on request")
        return _end(held, keeper, lambda: queue.cancelled(fence, held.result))
    except Exception as error:
        text, retry = _told(error)
        return _end(held, keeper, lambda: queue.fail(fence, text, retry=retry))
    return _end(held, keeper, lambda: queue.succeed(fence, result))


def _end(held: HeldJob, keeper: Keeper, report: Callable[[], Job]) -> str:
    # The output first: once the job has ended nothing of this attempt is taken any more.
    held.write(keeper.deliver)
    return str(held.write(report).state)


def _told(error: Exception) -> tuple[str, bool]:
    """What the registry keeps of an error, and whether another try could go otherwise."""
    # What the user asked for is wrong, not the code: where in the code that was found out helps nobody.
    _log.error("the job failed: %s", error, exc_info=None if isinstance(error, InputError | DeadlinePassed) else error)
    if isinstance(error, ValidationError):
        return f"the job's spec is not valid: {error}", False
    if isinstance(error, LoopcoreError | DeadlinePassed):  # its message is written for people
        return str(error), not isinstance(error, InputError | DeadlinePassed)
    return "".join(traceback.format_exception(error)), True


def load(entry: str, threads: int) -> Callable[..., Any]:
    """The function behind "module:name", with computing threads limited before anything large is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    module, _, function = entry.partition(":")
    loaded = importlib.import_module(module)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    return getattr(loaded, function)


def open_registry(settings: Settings) -> Registry:
    """The registry, waited for as long as the claim's lease may last."""
    away = stamina.retry_context(
        on=_is_away, attempts=None, timeout=settings.lease_s, wait_initial=0.2, wait_max=5.0, wait_jitter=0.2
    )
    for attempt in away:
        with attempt:
            return Registry.open(settings.registry_url)
    raise AssertionError("stamina either returns or raises")


def _is_away(error: Exception) -> bool:
    return isinstance(error, RegistryUnavailable) and not isinstance(error, SchemaTooNew | SchemaTooOld)


def keep_quiet() -> None:
    """Libraries' own notes that would drown the job's."""
    stamina.instrumentation.set_on_retry_hooks(())
    for name in ("alembic", "mlflow", "urllib3", "matplotlib", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
