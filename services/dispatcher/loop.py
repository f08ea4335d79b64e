"""The dispatcher's loop: brings back what was lost, gives out what fits, says why the rest waits."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

import stamina
import structlog

from services.dispatcher.actors import Actors, News, Phase, Unfit
from services.dispatcher.cluster import Ledger, NoCluster, connect, knock, look, snapshot
from services.dispatcher.kinds import ENTRIES
from services.dispatcher.packs import claim_alike
from services.registry import (
    Fence,
    Job,
    JobNotFound,
    JobState,
    LeaseLost,
    Registry,
    RegistryUnavailable,
    SchemaTooNew,
    SchemaTooOld,
)
from services.settings import Settings
from services.stack import state

__all__ = ["Dispatcher"]

ANNOUNCE_S = 2.0  # seconds between two announcements, and between two looks at why jobs wait
ADOPT_S = 2.0  # seconds between two looks for attempts that nobody here watches
AGAIN_S = 1.0  # seconds between the loss of a cluster and this process's new beginning
RECONNECT_S = 2.0  # seconds between two tries to join the cluster
KNOCK_S = 1.0  # seconds between two knocks at the cluster's door
SLOW_S = 2.0  # seconds after which an answer is so late that somebody knocks
PATIENCE_S = 30.0  # seconds that Ray may take for one turn; it would end this process after 60
STALE_S = 15.0  # seconds that a process which no longer holds its job has to end itself
PRUNE_S = 3600.0  # seconds between two prunings
TIDY_S = 3600.0  # seconds between two looks for what jobs left open, where nothing calls for one
TIDY_FIRST_S = 300.0  # seconds until the first, which finds what was left while no dispatcher was up
BEGINS_WITHIN_S = 300.0  # seconds that Ray has to find room for a claimed job's process and to start it
GIVE_BACK_EVERY_S = 0.1  # seconds between two looks at who has given back its job
STARTS_A_TURN = 16  # actors created before the loop looks elsewhere
WAITING_SHOWN = 50  # jobs whose reason is kept fresh

Answer = TypeVar("Answer")

log = structlog.get_logger("dispatcher")


class Dispatcher:
    """One dispatcher. Several may work on one registry and cluster: every decision is a fenced write."""

    def __init__(self, settings: Settings, *, name: str | None = None, start_anew: Callable[[], None]) -> None:
        """`start_anew` replaces this process by a fresh one.

        Ray ends a driver that lost its cluster, a minute after; nothing of this process is worth keeping, so it goes first.
        """
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._settings = settings
        self._start_anew = start_anew
        self._registry = Registry(settings.registry_url)
        self._queue = self._registry.queue
        self._actors = Actors(settings)
        self._stopped = threading.Event()
        self._address: str | None = None
        self._problem = "this dispatcher has just begun"
        self._reasons: dict[int, str] = {}
        self._due: dict[str, float] = {}
        self._in_ray_since: float | None = None
        self._lost: set[int] = set()  # jobs that were lost and wait for another attempt
        self._tidy_at = time.monotonic() + TIDY_FIRST_S

    def stop(self) -> None:
        """Ends `run` soon: no more claims; running jobs go on by themselves, unless their cluster is shut down too."""
        self._stopped.set()

    @property
    def cluster_ends(self) -> bool:
        """Whether the cluster is the one of a stack that is being taken down, by what that says of itself."""
        return self._address is not None and state.takes_down(self._settings, self._address)

    def run(self) -> None:
        """Works until `stop`.

        Raises SchemaTooNew and SchemaTooOld at the start; an unreachable registry or cluster is waited for.
        """
        self._patiently(lambda: Registry.open(self._settings.registry_url).close())
        log.info("up", dispatcher=self.name)
        threading.Thread(target=self._watch_ray, name="watchdog", daemon=True).start()
        with suppress(NoCluster):  # it was told to stop while it was without one
            while not self._stopped.is_set():
                self._connect()
                self._patiently(self.turn)
                self._stopped.wait(self._settings.poll_s)
        if self.cluster_ends:
            self._give_back()
        self._registry.close()
        log.info("down", dispatcher=self.name, left_running=len(self._actors.watched))

    def turn(self) -> None:
        """One round of all that a dispatcher does. Raises RegistryUnavailable."""
        for news in self._on_cluster(lambda: list(self._actors.poll())) or ():
            self._hear(news)
        for job in self._queue.rescue():
            log.warning("rescued", job=job.id, attempt=job.attempt, state=job.state, why=job.reason)
            self._without_process(job)
        self._end_overdue()
        self._keep_pending()
        live, nodes = self._queue.live(), self._on_cluster(look)
        ledger = None
        if nodes is not None:
            self._look_after(live)
            placed = {fence: watch.node for fence, watch in self._actors.watched.items() if watch.node}
            ledger = Ledger.count(nodes, live, placed, self._actors.riding({job.fence for job in live}))
            if not self._stopped.is_set():
                self._claim(ledger)
        if self._every("announce", ANNOUNCE_S):
            self._explain(ledger)
            cluster = snapshot(ledger, self._reasons, address=self._address, problem=self._problem or None)
            self._queue.announce(self.name, socket.gethostname(), os.getpid(), cluster)
            self._tidy()
        if self._every("prune", PRUNE_S):
            self._queue.prune(self._settings.retention_s)

    def _patiently(self, work: Callable[[], None]) -> None:
        """Runs `work`, again while the registry is away."""
        tries = stamina.retry_context(
            on=self._is_away, attempts=None, timeout=None, wait_initial=0.5, wait_max=5.0, wait_jitter=0.5
        )
        for attempt in tries:
            with attempt:
                if self._stopped.is_set():
                    return
                work()

    def _is_away(self, error: Exception) -> bool:
        away = isinstance(error, RegistryUnavailable) and not isinstance(error, SchemaTooNew | SchemaTooOld)
        if away:
            log.warning("the registry is away", error=str(error))
        return away and not self._stopped.is_set()

    def _connect(self) -> None:
        if self._address is not None or not self._every("connect", RECONNECT_S):
            return
        try:
            self._address = connect(self._settings)
        except NoCluster as error:
            if str(error) != self._problem:
                log.warning("no cluster", problem=str(error))
            self._problem = str(error)
            return
        self._problem = ""
        log.info("joined", cluster=self._address)

    def _on_cluster(self, ask: Callable[[], Answer]) -> Answer | None:
        """Asks the cluster something, if there is one, and starts anew where it no longer answers. Only Ray is asked in it."""
        if self._address is None:
            return None
        self._in_ray_since = time.monotonic()
        try:
            if self._every("knock", KNOCK_S):
                knock(self._address)
            return ask()
        except Unfit:
            raise
        except NoCluster as error:
            self._leave(str(error))
        except Exception as error:  # Ray raises what it pleases
            self._leave(f"{type(error).__name__}: {error}"[:500])
        finally:
            self._in_ray_since = None

    def _watch_ray(self) -> None:
        """Ends the wait for an answer that will not come; Ray itself would take a minute."""
        while not self._stopped.wait(1.0):
            since, address = self._in_ray_since, self._address
            if since is None or address is None or time.monotonic() - since < SLOW_S:
                continue
            with suppress(NoCluster):  # this process is about to end
                try:
                    knock(address)
                except NoCluster as error:
                    self._leave(str(error))
                if time.monotonic() - since > PATIENCE_S:
                    self._leave(f"no answer within {PATIENCE_S:g} s")

    def _leave(self, why: str) -> NoReturn:
        """Starts anew; raises NoCluster where this process is to stop instead."""
        log.warning("the cluster is away", cluster=self._address, why=why)
        if not self._stopped.wait(AGAIN_S):
            self._start_anew()
        raise NoCluster(why)

    def _hear(self, news: News) -> None:
        if news.kind == "began":
            log.info("began", actor=news.watch.name)
        elif news.kind == "silent":
            # It may be alive: only its own silence past the lease counts.
            log.warning("not reached", actor=news.watch.name, why=news.why)
        else:
            for fence in news.watch.fences:
                self._lose(fence, news.why)

    def _lose(self, fence: Fence, why: str) -> None:
        try:
            job = self._queue.lose(fence, why)
        except LeaseLost:
            log.info("ended", job=fence.job, attempt=fence.attempt)  # it wrote its end itself
        else:
            log.warning("lost", job=fence.job, attempt=fence.attempt, state=job.state, why=why)
            self._without_process(job)

    def _without_process(self, job: Job) -> None:
        """Sees to it that what an attempt left open is closed, now or once its job is cancelled instead of tried again."""
        if job.ended:
            self._tidy_at = 0.0
        else:
            self._lost.add(job.id)

    def _tidy(self) -> None:
        """Has closed, where that is due, what jobs left open that ended without their processes."""
        for number in sorted(self._lost):
            with suppress(JobNotFound):  # pruned, and long over
                job = self._queue.job(number)
                if job.state is JobState.QUEUED:
                    continue
                if job.ended:
                    self._tidy_at = 0.0
            self._lost.discard(number)
        if time.monotonic() >= self._tidy_at and self._on_cluster(self._actors.close):
            self._tidy_at = time.monotonic() + TIDY_S

    def _end_overdue(self) -> None:
        """Ends those that were asked to stop and did not within the grace, or ran past their time limit."""
        told: list[Job] = []
        for job in self._queue.overdue(self._settings.cancel_grace_s):
            asked = job.cancel_requested_at is not None
            try:
                # First the word, then the deed: if this process dies in between, the attempt sees that it is over and stops.
                # All words first: jobs that share a process end with it, and are lost where nothing is said of them.
                if asked:
                    ended = self._queue.cancelled(job.fence)
                else:
                    limit = f"not done within its time limit of {job.time_limit_s or 0:g} s, and did not stop when told"
                    ended = self._queue.fail(job.fence, limit, retry=False)
            except LeaseLost:
                continue
            log.warning("killed", job=job.id, attempt=job.attempt, why="cancelled" if asked else "time limit")
            self._without_process(ended)
            told.append(job)
        for job in told:
            self._kill(job.fence)

    def _keep_pending(self) -> None:
        """Renews the leases of actors whose process has not begun: until it does it cannot do so itself."""
        every = min(self._settings.heartbeat_s, self._settings.lease_s / 4)
        for watch in self._actors.watches:
            now = time.monotonic()
            if watch.phase is Phase.PENDING and now - watch.since > BEGINS_WITHIN_S:
                self._kill(watch.fences[0], f"Ray did not start its process within {BEGINS_WITHIN_S:g} s")
            elif watch.phase is Phase.PENDING and now - watch.renewed_at >= every:
                watch.renewed_at = now
                renewed = [self._renew(fence) for fence in watch.fences]
                if not any(renewed):
                    self._kill(watch.fences[0])

    def _renew(self, fence: Fence) -> bool:
        """Renews a lease for a process that has not begun; gives whether the attempt goes on."""
        try:
            if not self._queue.beat(fence, lease_s=self._settings.lease_s).cancel_requested:
                return True
            self._without_process(self._queue.cancelled(fence))
        except LeaseLost:
            pass
        return False

    def _kill(self, fence: Fence, why: str | None = None) -> None:
        """Ends the process of an attempt; those in it that are not over are lost."""
        for one in self._on_cluster(lambda: self._actors.kill(fence)) or ():
            self._lose(one, why or f"its process was ended with that of job {fence.job}, which it shared")

    def _look_after(self, live: list[Job]) -> None:
        """Adopts running attempts that are not watched here; ends processes whose attempt is over."""
        running = {job.fence for job in live}
        if self._every("adopt", ADOPT_S):
            for fence in running - self._actors.watched.keys():
                if self._on_cluster(lambda fence=fence: self._actors.adopt(fence)) is not None:
                    log.info("adopted", job=fence.job, attempt=fence.attempt)
        now = time.monotonic()
        for watch in self._actors.watches:
            if not running.isdisjoint(watch.fences):
                watch.stale_since = None
            elif watch.stale_since is None:
                watch.stale_since = now
            elif now - watch.stale_since > STALE_S:
                log.warning("killed", actor=watch.name, why="its attempt is over and it did not end")
                self._kill(watch.fences[0])

    def _give_back(self) -> None:
        """Has the attempts on a cluster that is shut down write a last checkpoint and end; no budget is spent by that.

        What has not begun is given back from here, and so is what does not react in time: its process ends with the cluster,
        and the job goes on from its newest checkpoint without a lease to wait for.
        """
        ends = time.monotonic() + min(self._settings.cancel_grace_s, state.GIVE_BACK_S)
        with suppress(NoCluster):
            self._while_time_is_left(ends, self._ask_for_release)
        self._while_time_is_left(ends, lambda: self._see_released(ends))

    def _ask_for_release(self) -> None:
        self._due.pop("adopt", None)
        self._look_after(self._queue.live())
        self._on_cluster(self._actors.release)

    def _see_released(self, ends: float) -> None:
        while waited := [job for job in self._queue.live() if job.fence in self._actors.watched]:
            late = time.monotonic() >= ends
            for job in waited:
                if job.node is None:  # its process has not begun, and no longer may
                    self._release(job.fence, "its cluster is shut down, and its process had not begun")
                elif late:
                    self._release(job.fence, "its cluster is shut down, and it wrote no last checkpoint in time")
            if late:
                return
            time.sleep(GIVE_BACK_EVERY_S)

    def _while_time_is_left(self, ends: float, work: Callable[[], None]) -> None:
        """Runs `work`, again while the registry is away: jobs are about to write their ends to it."""
        while True:
            try:
                work()
                return
            except RegistryUnavailable as error:
                if time.monotonic() >= ends:
                    log.warning("the registry is away: what runs is tried again when its lease is over", error=str(error))
                    return
                time.sleep(GIVE_BACK_EVERY_S)

    def _release(self, fence: Fence, why: str) -> None:
        with suppress(LeaseLost):  # it began and did so itself, or ended
            job = self._queue.release(fence, why)
            log.info("released", job=fence.job, attempt=fence.attempt, state=job.state, why=why)

    def _claim(self, ledger: Ledger) -> None:
        started = 0
        for node in ledger.roomiest():
            while started < STARTS_A_TURN:
                free = ledger.free[node.id].floor()
                job = self._queue.claim(
                    self.name,
                    cpus=free.cpus + 1e-6,
                    gpus=free.gpus + 1e-6,
                    memory_gb=free.memory_gb,
                    lease_s=self._settings.lease_s,
                    kinds=list(ENTRIES),
                )
                if job is None:
                    break
                started += 1
                riding = claim_alike(self._queue, job, self.name, lease_s=self._settings.lease_s)
                ledger.take(node.id, job, *riding)
                self._start([job, *riding], node.id)

    def _start(self, jobs: list[Job], node: str) -> None:
        for job in jobs:
            log.info("claimed", job=job.id, attempt=job.attempt, kind=job.kind, node=node[:12], with_job=jobs[0].id)
        try:
            self._on_cluster(lambda: self._actors.start(jobs, node))
        except Unfit as error:
            for job in jobs:
                log.warning("refused", job=job.id, attempt=job.attempt, why=str(error))
                self._without_process(self._queue.fail(job.fence, str(error), retry=False))

    def _explain(self, ledger: Ledger | None) -> None:
        self._reasons = {}
        for job in self._queue.waiting(WAITING_SHOWN):
            reason = f"waiting: {self._problem}" if ledger is None else ledger.why(job)
            if job.kind not in ENTRIES:
                reason = f"waiting: no dispatcher that is up knows jobs of kind {job.kind!r}"
            self._reasons[job.id] = reason
            self._queue.set_reason(job.id, reason)

    def _every(self, what: str, seconds: float) -> bool:
        """Whether `what` is due, at most once in `seconds`."""
        now = time.monotonic()
        if now < self._due.get(what, now):
            return False
        self._due[what] = now + seconds
        return True
