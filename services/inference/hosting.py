"""The service on Ray Serve: one application of one deployment, whose replicas each serve every model.

Which models that are stands in the registry, and replicas follow it by themselves; so an application is deployed again only
when the program, its settings or the number of replicas change.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import httpx

from loopcore.errors import LoopcoreError
from services.settings import Settings

__all__ = ["APPLICATION", "address", "ensure", "installation", "shut_down"]

APPLICATION = "loop-inference"
DEPLOYMENT = "replica"
MOST_ONGOING = 1024  # requests in one replica: above what its line takes, so that it refuses the rest itself, with reasons
DRAIN_S = 20.0  # seconds that a replica has to answer what it holds before it is ended
UP_WITHIN_S = 120.0  # seconds that Serve and its replicas have to come up
POLL_S = 0.2
# What stands before every replica; a proxy inherits the environment of the controller that starts it.
PROXY = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "services.inference.proxy.middleware"}


def address(settings: Settings) -> str:
    """Where the service listens."""
    host = settings.inference_host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.inference_port}"


def installation(settings: Settings) -> str:
    """Tells this program with these settings from any other; a replica answers with it."""
    return hashlib.sha256(f"{version('loopcore')} {settings.model_dump_json()}".encode()).hexdigest()[:16]


def ensure(settings: Settings, *, replicas: int, check: Callable[[], None]) -> str:
    """Brings the service up with so many replicas, or finds it so; gives its address. The process is connected to Ray.

    `check` is called while it waits and may raise. Raises LoopcoreError where the service does not come up.
    """
    with _one_at_a_time(settings, check):
        _start_serve(settings)
        if _running(settings) != replicas:
            _deploy(settings, replicas)
            _until(lambda: _running(settings) == replicas, check, "the inference service")
    return address(settings)


def shut_down() -> None:
    """Ends the service, and Serve with it if it hosts nothing else. The process is connected to Ray."""
    from ray import serve

    applications = serve.status().applications
    if APPLICATION in applications:
        serve.delete(APPLICATION)
    if not set(applications) - {APPLICATION}:
        serve.shutdown()


def _start_serve(settings: Settings) -> None:
    from ray import serve

    host, port = settings.inference_host, settings.inference_port
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": port},
            controller_options={"runtime_env": {"env_vars": PROXY}},
        )
    except (OSError, RuntimeError, TimeoutError) as error:
        raise LoopcoreError(
            f"Ray Serve cannot listen on {host}:{port}: {_first_line(error)}; free that port, or set another LOOP_INFERENCE_PORT"
        ) from error


def _deploy(settings: Settings, replicas: int) -> None:
    """Starts the application, or replaces it replica by replica; returns before it is up."""
    from ray import serve

    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "num_replicas": replicas,
        # Requests wait for most of their time, and a replica has a thread that computes: Ray's CPUs are left to jobs.
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": MOST_ONGOING,
        "max_queued_requests": MOST_ONGOING,
        "backpressure_config": {"retry_after_s": 1},
        "graceful_shutdown_timeout_s": DRAIN_S,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 20.0,
        "logging_config": {"enable_access_log": False},
    }
    deployment: Any = serve.deployment(serve.ingress(_builder(settings))(), **options)
    target = serve.RunTarget(target=deployment.bind(), name=APPLICATION, route_prefix="/")
    try:
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    except Exception as error:
        raise LoopcoreError(f"Ray Serve did not take the inference service: {_first_line(error)}") from error


def _builder(settings: Settings) -> Callable[[], Any]:
    """What a replica calls to make its application."""
    text, name = settings.model_dump_json(), installation(settings)

    def build() -> Any:
        import torch

        from services.inference.app import create_app
        from services.inference.limits import Limits
        from services.inference.service import Service
        from services.inference.sources import RegistryModels
        from services.settings import Settings

        settings = Settings.model_validate_json(text)
        torch.set_num_threads(settings.inference_threads)
        service = Service(RegistryModels(settings), Limits.of(settings))
        return create_app(service, hosts=(settings.inference_host,), installation=name)

    return build


def _running(settings: Settings) -> int | None:
    """Replicas of this very program that are up; None where there are none, or where old ones still answer."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return None
    if application.status == ApplicationStatus.DEPLOY_FAILED:
        raise LoopcoreError(f"the inference service could not be deployed: {application.message}")
    if application.status != ApplicationStatus.RUNNING or DEPLOYMENT not in application.deployments:
        return None
    states: dict[Any, int] = dict(application.deployments[DEPLOYMENT].replica_states)
    up = states.get("RUNNING", 0)
    if up != sum(states.values()):
        return None
    try:
        answer = httpx.get(f"{address(settings)}/v2", timeout=5.0, trust_env=False)
        ours = answer.json().get("installation") == installation(settings)
    except (httpx.HTTPError, ValueError):
        return None
    return up if ours else None


def _until(condition: Callable[[], bool], check: Callable[[], None], what: str) -> None:
    ends = time.monotonic() + UP_WITHIN_S
    while not condition():
        check()
        if time.monotonic() > ends:
            raise LoopcoreError(f"{what} did not come up within {UP_WITHIN_S:g} s; see Ray's logs of Serve")
        time.sleep(POLL_S)


@contextlib.contextmanager
def _one_at_a_time(settings: Settings, check: Callable[[], None]) -> Iterator[None]:
    """Two jobs that start Serve at once would take the same names."""
    settings.home.mkdir(parents=True, exist_ok=True)
    with (settings.home / "serve.lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                check()
                time.sleep(POLL_S)
        yield


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
