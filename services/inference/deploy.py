"""A `serve` job: a model version up on the inference service, which follows its alias from then on."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from loopcore.errors import InputError, LoopcoreError
from loopcore.specs import ServeJob
from services.inference.hosting import UP_WITHIN_S, ensure
from services.registry import LeaseLost, RegistryError, Served
from services.tracking import ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from services.registry import Job, Registry
    from services.settings import Settings
    from services.tracking import Tracking

    class Held(Protocol):
        """As much of a held job as is needed here: what the worker's lease gives."""

        job: Job
        settings: Settings
        registry: Registry
        tracking: Tracking
        spec: Any

        def check(self) -> None: ...
        def write(self, call: Callable[[], Any]) -> Any: ...
        def progress(self, done: float, total: float | None = None, note: str = "", *, unit: str = "steps") -> None: ...


__all__ = ["run"]

POLL_S = 0.2


def run(held: Held) -> dict[str, Any]:
    """Has the service serve `spec.model`, and waits until it answers with the version that the alias points at.

    Raises InputError for a model that is not registered, LoopcoreError for one that cannot be brought up; the service is then
    asked for what it was asked for before. Done again, it finds everything as it is to be.
    """
    spec: ServeJob = held.spec
    queue = held.registry.queue
    _version(held, spec.model)  # before anything is started
    before = next((row for row in held.write(queue.served) if row.model == spec.model), None)
    held.write(lambda: queue.serve(spec.model, spec.replicas, job=held.job.id))
    try:
        held.progress(0, 2, "brings up the service", unit="parts")
        replicas = max((row.replicas for row in held.write(queue.served)), default=spec.replicas)
        url = ensure(held.settings, replicas=replicas, check=held.check)
        held.progress(1, 2, f"brings up {spec.model}", unit="parts")
        version = _wait(held, url, spec.model)
    except LeaseLost:
        raise  # another attempt at this job may be at work on the same model
    except BaseException:
        _put_back(held, spec.model, before)
        raise
    held.progress(2, 2, unit="parts")
    return {"url": url, "model": spec.model, "version": version, "replicas": replicas}


def _version(held: Held, model: str) -> str:
    try:
        return held.tracking.resolve(model).version
    except ModelNotFound as missing:
        raise InputError(str(missing)) from None


def _wait(held: Held, url: str, model: str) -> str:
    """Waits until the service answers for the model with the version that its alias points at; gives that."""
    ends = time.monotonic() + UP_WITHIN_S
    card: dict[str, Any] = {}
    while True:
        held.check()
        wanted = _version(held, model)
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{url}/v1/models/{quote(model)}", timeout=10.0, trust_env=False)
            card = answer.json() if answer.status_code == 200 else {}
        if card.get("version") == wanted and card.get("state") in ("ready", "asleep"):
            return wanted
        if card.get("problem"):
            raise LoopcoreError(str(card["problem"]))
        if time.monotonic() > ends:
            raise LoopcoreError(f"{model} version {wanted} did not come up within {UP_WITHIN_S:g} s; see the service's log")
        time.sleep(POLL_S)


def _put_back(held: Held, model: str, before: Served | None) -> None:
    """Asks for what was asked for before this job; a later request for the same model stands."""
    queue = held.registry.queue
    with contextlib.suppress(RegistryError):
        now = next((row for row in queue.served() if row.model == model), None)
        if now is None or now.job != held.job.id:
            return
        if before is None:
            queue.unserve(model)
        else:
            queue.serve(before.model, before.replicas, job=before.job)
