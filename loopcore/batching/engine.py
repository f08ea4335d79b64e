"""Continuous loop batching: rows at different loops share one pass of the block.

Every loop of a tied model applies the same weights, so a batch need not start or end together: after each loop finished
rows leave and waiting ones take their places. A tick is one loop for all live rows, one pass for each word length among
them (a bucket). The readout runs for rows that leave, that are traced, or whose rule looks at predictions and is due.

An engine has one owner: it is not safe to call from two threads. It waits for nothing and knows no clock but the given one.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loopcore.batching.admission import Waiting
from loopcore.batching.requests import Event, ExitReason, Finished, Request, Ticket
from loopcore.batching.row import Row
from loopcore.batching.stats import Stats
from loopcore.batching.stepper import Reading, Stepper
from loopcore.errors import InputError, LengthError, LoopcoreError, QueueFull, UnknownSymbol
from loopcore.halting import Halting, HaltingProfile, default_max_loops

__all__ = ["LoopBatchEngine"]

SPARE_BUCKETS = 8  # empty buckets whose buffers are kept for the next row of their length


class LoopBatchEngine:
    """Rows in, events out: `submit`, then `tick` until nothing is left.

    engine = LoopBatchEngine(ModelStepper(model), profile=profile)
    ticket = engine.submit(Request(tokens=(3, 1, 4)))
    while engine.busy:
        for event in engine.tick(): ...
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        profile: HaltingProfile | None = None,
        max_rows: int = 64,
        queue_limit: int = 256,
        max_loops: Callable[[int], int] | None = None,
        max_length: int | None = None,
        bucket_width: int = 1,
        bypass_limit: int = 64,
        refill: bool = True,
        pressure: Callable[[LoopBatchEngine], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` counts seconds. The rest, where it needs a word:

        max_rows: rows live at once, over all lengths.  queue_limit: requests waiting.
        max_loops: most loops of any row, by length. Empty: T* and a half, or 2 n + 8 where nothing was measured.
        max_length: longest word taken. Empty: what the model can take, which may be anything.
        bucket_width: w pads words up to a multiple of w, so that they share a pass; models that cannot pad ignore it.
        bypass_limit: most younger rows that may be admitted before an older one.
        refill: off admits only into an empty engine, a batch that nobody joins.
        pressure: says when rows that allow it are shed. Empty: while at least half of `queue_limit` wait.
        """
        if min(max_rows, queue_limit, bucket_width) < 1 or bypass_limit < 0:
            raise InputError(
                f"expected max_rows, queue_limit and bucket_width of at least 1 and bypass_limit of at least 0, got {max_rows}, "
                f"{queue_limit}, {bucket_width}, {bypass_limit}"
            )
        self.stepper = stepper
        self.profile = profile
        self.max_rows = max_rows
        self.queue_limit = queue_limit
        self.refill = refill
        self.stats = Stats()
        self.max_length = min((most for most in (max_length, stepper.max_length) if most is not None), default=None)
        self._allowed = _bounded(max_loops or default_max_loops(profile), stepper.max_loops)
        self._bucket_width = bucket_width if stepper.pads else 1
        self._pressure = pressure or (lambda engine: 2 * engine.waiting >= engine.queue_limit)
        self._clock = clock
        self._ids = itertools.count()
        self._waiting: Waiting[Row] = Waiting(queue_limit, bypass_limit)
        self._live: dict[int, list[Row]] = {}  # by bucket, in slot order
        self._spare: list[int] = []  # empty buckets not yet closed, longest unused first
        self._open: dict[int, Row] = {}  # by ticket id
        self._deadlines: list[tuple[float, int]] = []
        self._gone: list[Row] = []  # left the line unadmitted since the last tick

    @property
    def waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def live(self) -> int:
        """Rows that loop."""
        return sum(map(len, self._live.values()))

    @property
    def busy(self) -> bool:
        """Whether a tick has anything to do."""
        return bool(self._open)

    def submit(self, request: Request) -> Ticket:
        """Takes a request into the line.

        Raises LengthError, UnknownSymbol or InputError for a word or a rule that this model cannot take, QueueFull when the
        line is full.
        """
        length = len(request.tokens)
        self._check_word(request.tokens)
        if request.accuracy_floor is not None and not 0.0 <= request.accuracy_floor <= 1.0:
            raise InputError(f"an accuracy floor is a share between 0 and 1, got {request.accuracy_floor}")
        if request.deadline_s is not None and not request.deadline_s > 0.0:
            raise InputError(f"a deadline is a number of seconds above 0, got {request.deadline_s}")
        halting = Halting(request.halting, self.profile, allowed=self._allowed)
        plan = halting.plan(length)
        now = self._clock()
        ticket = Ticket(next(self._ids), length, plan.known_exit, now)
        bucket = -(-length // self._bucket_width) * self._bucket_width
        bucket = max(length, min(bucket, self.stepper.max_length or bucket))
        row = Row(ticket, request, halting, plan, halting.watch(), bucket)
        try:
            self._waiting.push(bucket, ticket.id, row)
        except QueueFull:
            self.stats.rejected += 1
            raise
        self._open[ticket.id] = row
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (now + request.deadline_s, ticket.id))
        self.stats.submitted += 1
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Asks that a request end; the next tick says so and frees its place. False where it has ended already."""
        row = self._open.get(ticket.id)
        if row is None:
            return False
        self._abandon(row, "cancelled")
        return True

    def tick(self) -> list[Event]:
        """Admits what fits, takes every live row one loop further, and tells what became of them."""
        began = self._clock()
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= began:
            _, overdue = heapq.heappop(self._deadlines)
            if overdue in self._open:
                self._abandon(self._open[overdue], "deadline")
        events.extend(self._finish(row, began) for row in self._gone)
        self._gone.clear()
        for bucket in list(self._live):
            self._leave(bucket, {}, events, began)
        self._admit(events, began)
        if not self._live:
            return events
        self.stats.most_live_rows = max(self.stats.most_live_rows, self.live)
        shed = self._pressure(self)
        for bucket in list(self._live):
            self._advance(bucket, shed, events)
        seconds = self._clock() - began
        self.stats.ticks += 1
        self.stats.tick_s += seconds
        self.stats.longest_tick_s = max(self.stats.longest_tick_s, seconds)
        return events

    def run(self, requests: Iterable[Request]) -> list[Finished]:
        """Answers requests, in their order, feeding the line as it drains: for notebooks and offline work on an idle engine.

        Raises as `submit` does; then every request still open is cancelled.
        """
        assert not self.busy, "run would swallow the events of requests already submitted"
        answers: dict[int, Finished] = {}
        order: list[int] = []
        pending = iter(requests)
        upcoming = next(pending, None)
        while upcoming is not None or self.busy:
            while upcoming is not None and self.waiting < self.queue_limit:
                try:
                    order.append(self.submit(upcoming).id)
                except LoopcoreError:
                    for row in list(self._open.values()):
                        self._abandon(row, "cancelled")
                    self.tick()
                    raise
                upcoming = next(pending, None)
            answers.update((event.ticket.id, event) for event in self.tick() if isinstance(event, Finished))
        return [answers[ticket] for ticket in order]

    def _check_word(self, tokens: Sequence[int]) -> None:
        longest = self.max_length
        if not tokens or (longest is not None and len(tokens) > longest):
            expected = "at least 1" if longest is None else f"1 to {longest}"
            raise LengthError(f"expected a word of {expected} tokens, got {len(tokens)}")
        wrong = [token for token in tokens if not 0 <= token < self.stepper.vocabulary]
        if wrong:
            raise UnknownSymbol(f"expected tokens from 0 to {self.stepper.vocabulary - 1}, got {wrong[0]}")

    def _abandon(self, row: Row, reason: ExitReason) -> None:
        if row.leaving is not None:
            return
        row.leaving = reason
        if self._waiting.withdraw(row.bucket, row.ticket.id):
            self._gone.append(row)

    def _admit(self, events: list[Event], now: float) -> None:
        free = self.max_rows - self.live
        if free == self.max_rows or self.refill:
            joining: dict[int, list[Row]] = {}
            running = set(self._live)
            while free and (taken := self._waiting.pop(running)):
                bucket, row = taken
                joining.setdefault(bucket, []).append(row)
                running.add(bucket)
                free -= 1
            for bucket, rows in joining.items():
                self._join(bucket, rows, events, now)

    def _join(self, bucket: int, rows: list[Row], events: list[Event], now: float) -> None:
        if bucket in self._spare:
            self._spare.remove(bucket)
        held = self._live.setdefault(bucket, [])
        under_way = bool(held)
        remember = any(row.remember for row in rows)
        for row in rows:
            row.started_at = now
        first = len(held)
        try:
            self.stepper.admit(bucket, range(first, first + len(rows)), [row.request.tokens for row in rows], remember=remember)
            held.extend(rows)
        except Exception:
            for row in rows:  # one of them is at fault: each alone
                try:
                    self.stepper.admit(bucket, [len(held)], [row.request.tokens], remember=remember)
                    held.append(row)
                except Exception as error:
                    row.fail(error)
                    events.append(self._finish(row, now))
        joined = len(held) - first
        self.stats.admitted += joined
        self.stats.refills += joined if under_way else 0
        self._retire(bucket)

    def _advance(self, bucket: int, shed: bool, events: list[Event]) -> None:
        """One loop for a bucket: step, judge, read what has to be read, let go of what is done."""
        rows = self._live[bucket]
        remember = any(row.remember for row in rows)

        def step(slots: Sequence[int]) -> list[None]:
            self.stepper.step(bucket, slots, [rows[slot].loop for slot in slots], remember=remember)
            return [None] * len(slots)

        stepped = self._each(rows, range(len(rows)), step)
        self.stats.passes += 1
        useful = sum(rows[slot].ticket.length for slot in stepped)
        self.stats.useful_token_loops += useful
        self.stats.padded_token_loops += bucket * len(stepped) - useful
        self.stats.row_loops += len(stepped)
        for slot in stepped:
            rows[slot].loop += 1

        due = [slot for slot in stepped if rows[slot].due]
        self._judge(bucket, [slot for slot in due if rows[slot].halting.needs_states])
        for slot in stepped:
            rows[slot].bound(shed, self.profile)
        by_prediction = [slot for slot in due if rows[slot].halting.needs_logits]
        reading = {slot for slot in stepped if rows[slot].leaving or rows[slot].request.trace} | set(by_prediction)
        readings = self._read(bucket, sorted(slot for slot in reading if rows[slot].leaving != "error"))
        self._judge(bucket, [slot for slot in by_prediction if slot in readings])
        traced = [slot for slot in stepped if rows[slot].request.trace and slot in readings]
        changes = self._each(rows, traced, lambda some: self.stepper.residuals(bucket, some, "converged"))
        events.extend(rows[slot].event(readings[slot].prediction, change) for slot, change in changes.items())
        self._leave(bucket, readings, events, self._clock())

    def _judge(self, bucket: int, slots: Sequence[int]) -> None:
        """Asks the rules of due rows, all rows of a rule at once."""
        rows = self._live[bucket]
        by_kind: dict[str, list[int]] = {}
        for slot in slots:
            by_kind.setdefault(rows[slot].halting.spec.kind, []).append(slot)
        for kind, members in by_kind.items():
            found = self._each(rows, members, lambda some, kind=kind: self.stepper.residuals(bucket, some, kind))
            self.stats.check_rows += len(found)
            for slot, residual in found.items():
                rows[slot].judge(residual)

    def _read(self, bucket: int, slots: Sequence[int]) -> dict[int, Reading]:
        rows = self._live[bucket]
        wanted = (rows[slot] for slot in slots if rows[slot].request.logits)
        logits = any(row.leaving or row.halting.needs_logits for row in wanted)  # the latter may leave on this very readout
        readings = self._each(rows, slots, lambda some: self.stepper.readout(bucket, some, logits=logits))
        self.stats.readout_rows += len(readings)
        for slot, reading in readings.items():
            if not reading.finite:
                rows[slot].fail("the prediction of this row is not finite")
        return {slot: reading for slot, reading in readings.items() if reading.finite}

    def _each(self, rows: list[Row], slots: Sequence[int], call: Callable[[Sequence[int]], Sequence[Any]]) -> dict[int, Any]:
        """Value by slot. Where a call over all of them raises, each is asked alone; those that raise again end with the error."""
        if not slots:
            return {}
        try:
            return dict(zip(slots, call(slots), strict=True))
        except Exception as error:
            if len(slots) == 1:
                rows[slots[0]].fail(error)
                return {}
        return {slot: value for alone in slots for slot, value in self._each(rows, [alone], call).items()}

    def _leave(self, bucket: int, readings: dict[int, Reading], events: list[Event], now: float) -> None:
        """Lets rows go that are done, and closes the gaps with the last rows."""
        rows = self._live[bucket]
        gone = [slot for slot, row in enumerate(rows) if row.leaving]
        if not gone:
            return
        events.extend(self._finish(rows[slot], now, readings.get(slot)) for slot in gone)
        kept = len(rows) - len(gone)
        last = [slot for slot in range(kept, len(rows)) if not rows[slot].leaving]
        moves = list(zip(last, (slot for slot in gone if slot < kept), strict=True))
        self.stepper.leave(bucket, gone, moves)
        for source, target in moves:
            rows[target] = rows[source]
        del rows[kept:]
        self._retire(bucket)

    def _retire(self, bucket: int) -> None:
        if self._live[bucket]:
            return
        del self._live[bucket]
        self._spare.append(bucket)
        if len(self._spare) > SPARE_BUCKETS:
            self.stepper.close(self._spare.pop(0))

    def _finish(self, row: Row, now: float, reading: Reading | None = None) -> Finished:
        del self._open[row.ticket.id]
        finished = row.finished(now, reading, self.profile)
        self.stats.reasons[finished.exit_reason] += 1
        if finished.outputs is not None:
            self.stats.exits[row.loop] += 1
        return finished


def _bounded(allowed: Callable[[int], int], most: int | None) -> Callable[[int], int]:
    return allowed if most is None else (lambda length: min(allowed(length), most))
