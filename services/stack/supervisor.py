"""The supervisor: brings the parts up in order, keeps them up, and takes all of them down."""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.registry import Registry, RegistryError, RegistryUnavailable, SchemaTooNew, migrate
from services.settings import Settings, without_password
from services.stack import state
from services.stack.keeper import adopt_orphans
from services.stack.parts import Part
from services.stack.ports import free_port_near, is_free

__all__ = ["Supervisor", "already_running"]

READY_S = 180.0  # seconds that the parts have to come up
TICK_S = 0.2  # seconds between two looks at the parts
RELEASE_S = 40.0  # seconds to take the inference service off a cluster that was joined
STOP_S = 10.0  # seconds that dispatcher and API have to end

Note = Callable[[str], None]


class Supervisor:
    """Runs the stack of one home in this process until it is told to stop."""

    def __init__(self, settings: Settings, *, note: Note = lambda text: None) -> None:
        """`note` gets a line for everything that happens."""
        self.settings = settings
        self._note = note
        self._stopped = threading.Event()
        self._lock = state.StackLock(settings.home)
        self._logs = settings.home / "logs"
        self._mark = secrets.token_hex(16)
        self._parts: dict[str, Part] = {}
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._address = settings.ray_address
        self._state = "starting"
        self._started_at = time.time()

    def stop(self) -> None:
        """Makes `run` take everything down and return. Safe in a signal handler."""
        self._stopped.set()

    def run(self, ready: Callable[[dict[str, Any]], None]) -> None:
        """Brings the stack up, calls `ready` with what stack.json says, and works until `stop`. Raises StackError."""
        self._prepare()
        try:
            self._bring_up()
            if not self._stopped.is_set():
                self._state = "ready"
                ready(self._write())
                self._resume_serving()
            while not self._stopped.wait(TICK_S):
                self._watch()
        finally:
            self._take_down()

    def _prepare(self) -> None:
        """Everything that can be wrong before a process is started, in the order in which it is cheap to find out."""
        home = self.settings.home
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise state.StackError(
                f"cannot write to {home}: {error.strerror}; set LOOP_HOME to a folder of yours", exit_code=2
            ) from None
        if not self._lock.take():
            raise already_running(self.settings)
        try:
            leftover = state.read(self.settings)
            if leftover is not None:
                state.sweep(leftover, grace_s=STOP_S)
            self._check_ports()
            try:
                migrate(self.settings.registry_url)
            except SchemaTooNew as error:
                raise state.StackError(str(error), exit_code=2) from None
            except RegistryError as error:
                raise state.StackError(str(error)) from None
        except BaseException:
            self._lock.give()
            raise

    def _check_ports(self) -> None:
        for name, what in (("api", "the API"), ("inference", "the inference service")):
            host, port = getattr(self.settings, f"{name}_host"), getattr(self.settings, f"{name}_port")
            if not is_free(host, port):
                other = free_port_near(host, port)
                raise state.StackError(
                    f"port {port} on {host}, meant for {what}, is taken by another program; expected a free one: "
                    f"set LOOP_{name.upper()}_PORT={other or 'N'} (or {name}_port in loop.toml), or stop that program",
                    exit_code=2,
                )

    def _bring_up(self) -> None:
        ends = time.monotonic() + READY_S
        self._listen()
        self._add(Part("api", [sys.executable, "-m", "services.api"], self._logs / "api.log"))
        if self._address is None:
            self._note("starting Ray")
            self._add(self._ray())
            self._until(ends, "Ray", self._ray_is_up)
        self._add(Part("dispatcher", [sys.executable, "-m", "services.dispatcher"], self._logs / "dispatcher.log"))
        self._note("starting the dispatcher and the API")
        self._until(ends, "the API", self._api_is_up)
        self._until(ends, "the dispatcher", self._dispatcher_is_up)

    def _listen(self) -> None:
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.stop())

    def _add(self, part: Part) -> None:
        part.environment |= self._environment()
        self._parts[part.name] = part
        part.start()
        self._write()

    def _environment(self) -> dict[str, str]:
        """What every process of the stack finds in its environment."""
        found = {
            "LOOP_HOME": str(self.settings.home),
            state.MARK: self._mark,
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        if self.settings.ray_address is None:
            found |= {
                # Ray would turn authentication on by itself, with a token that everybody may read.
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(self.settings.token_file()),
                # Otherwise it turns 127.0.0.1 into the machine's outward address. (The name is Ray's; it holds for any system.)
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                "RAY_START_HOOK": "services.stack.head.prepare",
            }
        return found

    def _ray(self) -> Part:
        _make_token(self.settings.token_file())
        folder = state.ray_folder(self._mark)
        _fresh_folder(folder)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            *("--node-ip-address=127.0.0.1", "--port=0", "--dashboard-agent-listen-port=0"),
            *("--min-worker-port=0", "--max-worker-port=0", "--include-dashboard=false"),
            *("--no-monitor", "--include-log-monitor=false", f"--temp-dir={folder / 'ray'}"),
            f"--object-store-memory={self.settings.ray_object_store_mb * 2**20}",
            f"--num-cpus={self.settings.ray_cpus or os.cpu_count() or 1}",
        ]
        if self.settings.ray_gpus is not None:
            command.append(f"--num-gpus={self.settings.ray_gpus}")
        return Part("ray", command, self._logs / "ray.log", kept=True)

    def _until(self, ends: float, what: str, condition: Callable[[], bool]) -> None:
        """Waits for a part; a part that ends meanwhile is the reason why it never comes."""
        while not self._stopped.is_set() and not condition():
            for part in self._parts.values():
                if not part.up:
                    raise state.StackError(f"{part.name} did not start: {part.last_words()}; see {part.log}")
            if time.monotonic() > ends:
                raise state.StackError(f"{what} did not come up within {READY_S:g} s; see {self._logs}")
            self._stopped.wait(TICK_S)

    def _ray_is_up(self) -> bool:
        """Ray writes its address once everything of it runs."""
        try:
            self._address = (state.ray_folder(self._mark) / "ray" / "ray_current_cluster").read_text().strip() or None
        except OSError:
            return False
        return self._address is not None

    def _api_is_up(self) -> bool:
        connection = http.client.HTTPConnection(self.settings.api_host, self.settings.api_port, timeout=2.0)
        try:
            connection.request("GET", "/health/live")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _dispatcher_is_up(self) -> bool:
        pid = self._parts["dispatcher"].pid
        try:
            with Registry(self.settings.registry_url) as registry:
                rows = registry.queue.dispatchers()
        except RegistryUnavailable:
            return False
        return any(row.pid == pid and row.age_s < 30.0 and row.cluster.get("ray") == "up" for row in rows)

    @property
    def _api_url(self) -> str:
        return _url(self.settings.api_host, self.settings.api_port)

    def _watch(self) -> None:
        if not self._lock.in_place():
            self._note(f"{self.settings.home} was removed")
            self.stop()
            return
        for part in self._parts.values():
            news = part.look()
            if news is None:
                continue
            if part.name == "ray" and part.up:
                self._state = "starting"  # a new Ray has a new address, which the dispatcher reads from stack.json
            self._note(news)
            self._write()
        if self._state == "starting" and self._ray_is_up():
            self._state = "ready"
            self._write()
        self._reap()

    def _reap(self) -> None:
        """Collects helpers and adopted orphans that ended; the parts' own ends are left for the parts to see."""
        self._helpers = [helper for helper in self._helpers if helper.poll() is None]
        parts = {part.pid for part in self._parts.values()} | {helper.pid for helper in self._helpers}
        try:
            while (
                ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) is not None and ended.si_pid not in parts:
                os.waitpid(ended.si_pid, 0)
        except ChildProcessError:
            return

    def _resume_serving(self) -> None:
        """Models that were served are brought up again, by jobs; a helper asks for them and ends."""
        with Registry(self.settings.registry_url) as registry:
            try:
                served = registry.queue.served()
            except RegistryError:
                return
        if served:
            self._note(f"serving again: {', '.join(row.model for row in served)}")
            self._helpers.append(self._helper("resume", self._api_url))

    def _helper(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A process for what takes a while or loads Ray; it ends by itself, and with the stack at the latest."""
        command = [sys.executable, "-m", "services.stack.serving", *arguments]
        log = os.open(self._logs / "serving.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._environment(),
                start_new_session=True,
            )
        finally:
            os.close(log)

    def _release_serving(self) -> None:
        """On a cluster that was joined the inference service would outlive this stack."""
        helper = self._helper("release")
        try:
            helper.wait(RELEASE_S)
        except subprocess.TimeoutExpired:
            helper.kill()
            helper.wait()
            self._note(f"the inference service was not taken down within {RELEASE_S:g} s; see {self._logs / 'serving.log'}")

    def _take_down(self) -> None:
        was_ready = self._state == "ready"
        self._state = "stopping"
        self._write()
        self._note("stopping")
        if was_ready and self.settings.ray_address is not None and self._lock.in_place():
            self._release_serving()
        # The dispatcher first: it has the jobs on the stack's own Ray write a checkpoint and end, and does not take the end of
        # Ray for their loss.
        for name in ("dispatcher", "api", "ray"):
            if name in self._parts:
                gives_back = name == "dispatcher" and self.settings.ray_address is None
                self._parts.pop(name).stop(STOP_S + (state.GIVE_BACK_S if gives_back else 0.0))
        state.sweep({"mark": self._mark}, grace_s=2.0)
        if self._lock.in_place():  # otherwise the home is gone, or another stack's by now
            self.settings.stack_file.unlink(missing_ok=True)
        self._lock.give()

    def _write(self) -> dict[str, Any]:
        parts = self._parts
        found: dict[str, Any] = {
            "state": self._state,
            "home": str(self.settings.home),
            "supervisor": os.getpid(),
            "mark": self._mark,
            "started_at": self._started_at,
            "registry": without_password(self.settings.registry_url),
            "mlflow": without_password(self.settings.mlflow_url),
            "api": {"url": self._api_url},
            "inference": {"url": _url(self.settings.inference_host, self.settings.inference_port)},
            "ray": {"address": self._address, "own": self.settings.ray_address is None},
            "dispatcher": {},
            "logs": str(self._logs),
        }
        for name, part in parts.items():
            found[name] |= {"pid": part.pid, "restarts": part.restarts, "log": str(part.log)}
        if self._lock.in_place():
            state.write(self.settings, found)
        return found


def already_running(settings: Settings) -> state.StackError:
    """The error of a second `loop up`."""
    found = state.read(settings) or {}
    where = found.get("api", {}).get("url", "not yet known")
    return state.StackError(
        f"a stack of {settings.home} is running already (API at {where}); use it, end it with `loop down`, "
        "or set LOOP_HOME to another folder for a second one",
        exit_code=2,
    )


def _fresh_folder(folder: Path) -> None:
    """Makes it. Raises StackError where it is there: its name is drawn anew for each stack, so somebody guessed it."""
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise state.StackError(f"cannot make {folder} for Ray's sockets: {error.strerror}; see who else uses /tmp") from None


def _make_token(path: Path) -> None:
    """The token of the stack's own Ray; one that others may read is replaced."""
    if path.exists() and stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size:
        return
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
        file.write(secrets.token_hex(32))


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
