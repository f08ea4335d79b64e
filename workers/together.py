"""The trainings of several `train` jobs as one population: each job has its own thread, and all wait for each other at a step.

A job's thread does all that a job alone does: lease, curve, checkpoints, what people asked for. Only the steps are common: one
thread, the conductor, makes them when every training that goes on is waiting for its next one. A job that is over, for whatever
reason, leaves; while somebody is between two steps, all of its population is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

from loopcore.population import Member, Population
from loopcore.specs import TrainSpec
from loopcore.training import Progress, Training
from workers.lease import HeldJob
from workers.train import Seat

__all__ = ["Together", "TogetherSeat"]

LOOK_S = 0.2  # seconds between two looks of one that waits for the others at what was asked of its own job


class _Phase(Enum):
    COMING = "coming"
    """Its job has not got to its training yet."""
    WAITING = "waiting"
    """For the population to be made, or for its next step."""
    BUSY = "busy"
    """With the work of its own job between two steps."""
    GONE = "gone"
    """It takes no more steps."""


class Together:
    """`seats` for the trainings of as many jobs, of one shape, and their conductor, with `threads` CPU threads."""

    def __init__(self, jobs: int, threads: int) -> None:
        self._threads = threads
        lock = threading.Lock()
        self._all_wait = threading.Condition(lock)
        self._turned = threading.Condition(lock)
        self._at_work = False
        self._problem: Exception | None = None
        self.seats = tuple(TogetherSeat(self) for _ in range(jobs))

    def conduct(self) -> None:
        """Makes the population once every job has come to its training or is over, then steps until none of them goes on.

        What goes wrong in that is raised in the jobs, by `take` and `advance`.
        """
        try:
            seats = self._waiting()
            if not seats:
                return
            population = Population([seat.spec for seat in seats], device=seats[0].device, threads=self._threads)
            for seat, member in zip(seats, population.members, strict=True):
                seat.training = member
            self._turn(seats)
            while waiting := self._waiting():
                for number, seat in enumerate(seats):
                    if seat not in waiting:
                        population.stop(number)
                for number, progress in population.advance().items():
                    seats[number].progress = progress
                self._turn(waiting)
        except Exception as problem:
            with self._turned:
                self._problem = problem
                self._turned.notify_all()

    def _waiting(self) -> list[TogetherSeat]:
        """Those that wait, once all do that are not gone."""
        with self._all_wait:
            self._all_wait.wait_for(lambda: all(seat.phase in (_Phase.WAITING, _Phase.GONE) for seat in self.seats))
            self._at_work = True
            return [seat for seat in self.seats if seat.phase is _Phase.WAITING]

    def _turn(self, seats: list[TogetherSeat]) -> None:
        with self._turned:
            self._at_work = False
            for seat in seats:
                seat.phase = _Phase.BUSY
            self._turned.notify_all()

    def wait(self, seat: TogetherSeat, check: Callable[[], None]) -> None:
        """Waits for the conductor's next turn; `check` may call it off while the conductor waits too."""
        with self._turned:
            seat.phase = _Phase.WAITING
            self._all_wait.notify()
            try:
                # A step that was made is taken, whatever is asked meanwhile: its loss is a point of the curve.
                while not self._turned.wait_for(lambda: seat.phase is not _Phase.WAITING, LOOK_S):
                    if self._problem is not None:
                        raise self._problem
                    if not self._at_work:
                        check()
            except BaseException:
                seat.phase = _Phase.BUSY  # and soon gone
                raise

    def leave(self, seat: TogetherSeat) -> None:
        """Goes on without this one; twice does no harm."""
        with self._all_wait:
            seat.phase = _Phase.GONE
            self._all_wait.notify()


class TogetherSeat(Seat):
    """The seat of one job's training."""

    spec: TrainSpec
    device: str
    progress: Progress
    """Of the newest step."""

    def __init__(self, together: Together) -> None:
        self._together = together
        self._check: Callable[[], None]
        self.phase = _Phase.COMING

    def take(self, held: HeldJob, spec: TrainSpec, device: str) -> Training:
        """Waits until all of the population is there. Raises what `Population` does, and what `held.check` does."""
        self.spec, self.device, self._check = spec, device, held.check
        self._together.wait(self, self._check)
        assert isinstance(self.training, Member)
        return self.training

    def advance(self) -> Progress:
        """Waits until all of the population is here, and for the step. Raises what `held.check` does."""
        self._together.wait(self, self._check)
        return self.progress

    def __exit__(self, *_: object) -> None:
        self._together.leave(self)
