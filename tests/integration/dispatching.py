"""A dispatcher process of the tests' own, with small jobs beside the real kinds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.registry import Job, Registry, Submission
from services.settings import Settings
from tests.integration.ray_cluster import ROOT, RayCluster

# Short, so that what waits for a lease to run out does not wait for long; the heartbeat is still many times faster.
LEASE_S = 6.0

_CODE = (
    "import sys; from services.dispatcher.kinds import ENTRIES;"
    "ENTRIES.update({name: f'tests.integration.entries:{name}' for name in ('work', 'mirrored')});"
    "from services.dispatcher.__main__ import main; sys.exit(main())"
)


def settings_for(home: Path, cluster: RayCluster, **given: Any) -> Settings:
    """Settings of an installation of this test's own on the shared cluster, in a namespace of its own."""
    fresh = {"lease_s": LEASE_S, "heartbeat_s": 1.0, "poll_s": 0.1, "cancel_grace_s": 5.0, "ray_namespace": home.name}
    return Settings(home=home, ray_address=cluster.address, **(fresh | given))


class DispatcherProcess:
    """`python -m services.dispatcher` under the tests' control."""

    def __init__(self, settings: Settings, cluster: RayCluster) -> None:
        self.settings = settings
        self.environment = os.environ | cluster.environment | _variables(settings)
        self.log = settings.home / "dispatcher.log"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen([sys.executable, "-c", _CODE], env=self.environment, cwd=ROOT, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def restart(self) -> None:
        self.process = self._start()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def __enter__(self) -> DispatcherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()

    def said(self) -> str:
        return self.log.read_text()


def _variables(settings: Settings) -> dict[str, str]:
    names = (
        "home",
        "registry_url",
        "mlflow_url",
        "ray_address",
        "ray_namespace",
        "lease_s",
        "heartbeat_s",
        "poll_s",
        "cancel_grace_s",
    )
    return {f"LOOP_{name.upper()}": str(getattr(settings, name)) for name in names}


@contextlib.contextmanager
def dispatching(settings: Settings, cluster: RayCluster) -> Iterator[DispatcherProcess]:
    """A dispatcher for as long as the block lasts, and its jobs' processes with it."""
    with DispatcherProcess(settings, cluster) as running:
        try:
            yield running
        finally:
            with Registry(settings.registry_url) as registry:
                for job in registry.queue.live():
                    registry.queue.lose(job.fence, "the test is over")  # its process sees that and ends itself


def submit(registry: Registry, kind: str = "work", *, cpus: float = 1.0, **given: Any) -> Job:
    """Queues a job; what is no field of a submission goes into its spec."""
    fields = {name: given.pop(name) for name in list(given) if name in Submission.__dataclass_fields__}
    spec = fields.pop("spec", given)
    return registry.queue.submit(Submission(kind=kind, spec=spec, digest=str(spec), cpus=cpus, **fields)).job
