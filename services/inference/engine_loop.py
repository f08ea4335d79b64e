"""The thread that owns an engine: requests reach it through an inbox, results go back to the event loop that asked.

An engine has one owner and waits for nothing. This thread ticks it while there is work and sleeps while there is none;
everything that others want of the engine (submit, cancel, look at its counters) is an errand that it runs between two ticks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from loopcore.batching import Event, Finished, LoopBatchEngine, Request, Ticket
from loopcore.errors import QueueFull

__all__ = ["Call", "EngineFailed", "EngineLoop", "FellBehind"]

MOST_BEHIND = 10_000  # events that a reader may be behind: a traced word makes one a loop, whether anybody reads or not

Value = TypeVar("Value")

log = logging.getLogger("inference")


class EngineFailed(Exception):
    """The engine itself broke: requests it held are lost, later ones meet a new one."""


class FellBehind(Exception):
    """Whoever reads the events is too slow for them: its words were given up."""


class Call:
    """The words of one request on their way: made, read and abandoned in one event loop."""

    def __init__(self, owner: EngineLoop, words: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        """Done once every word is in the line. Fails with the LoopcoreError of the first that cannot be, and then none is."""
        self.tickets: list[Ticket] = []  # the owner's thread alone
        self._owner = owner
        self._left = words
        self._events: asyncio.Queue[tuple[int, Event] | Exception] = asyncio.Queue()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(word, event) as they come, until every word is finished. Raises EngineFailed and FellBehind."""
        while self._left:
            told = await self._events.get()
            if isinstance(told, Exception):
                raise told
            self._left -= isinstance(told[1], Finished)
            yield told

    def abandon(self) -> None:
        """Nobody waits any more: words still under way leave at the next tick. Does nothing after the end."""
        if self._left:
            self._owner.cancel(self)

    def accept(self, error: Exception | None) -> None:
        if self.accepted.done():  # who waited was cancelled
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self._left = 0
            self.accepted.set_exception(error)

    def tell(self, told: tuple[int, Event] | Exception) -> None:
        behind = self._events.qsize()
        if behind < MOST_BEHIND:
            self._events.put_nowait(told)
        elif behind == MOST_BEHIND:
            self.abandon()
            self._events.put_nowait(FellBehind(f"{behind} events were not read; expected a reader that keeps up; read faster"))


class EngineLoop:
    """An engine, made by `make`, with the thread that owns it."""

    def __init__(self, make: Callable[[], LoopBatchEngine], *, name: str) -> None:
        self._make = make
        self._engine = make()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._ended = False
        self._open: dict[int, tuple[Call, int]] = {}  # (call, word) by ticket id
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)
        self._thread.start()

    @property
    def closing(self) -> bool:
        """Whether it takes no more requests."""
        return self._closing

    def submit(self, requests: Sequence[Request]) -> Call:
        """Puts the words of one request into the line, all or none. Call it in the event loop that will read the events."""
        if self._closing:
            raise RuntimeError("this engine is closing; ask the shelf for the model again")
        call = Call(self, len(requests))
        self._errand(lambda: self._submit(call, requests))
        return call

    def cancel(self, call: Call) -> None:
        """Asks that the words of a call that are still under way leave."""
        self._errand(lambda: self._cancel(call))

    async def ask(self, question: Callable[[LoopBatchEngine], Value]) -> Value | None:
        """The answer to a question about the engine, asked between two ticks; None from one that has closed meanwhile."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Value] = loop.create_future()

        def settle(value: Any) -> None:
            if not answer.done():
                answer.set_result(value)

        return await answer if self._errand(lambda: _from_thread(loop, settle, question(self._engine))) else None

    def close(self) -> None:
        """Takes no more requests; the thread ends once those under way have their answers."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the thread after `close`; gives whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _errand(self, errand: Callable[[], None]) -> bool:
        with self._wake:
            if self._ended:
                return False
            self._inbox.append(errand)
            self._wake.notify()
        return True

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and not self._engine.busy:
                    if self._closing:
                        self._ended = True
                        return
                    self._wake.wait()
                errands = list(self._inbox)
                self._inbox.clear()
            for errand in errands:
                errand()
            if self._engine.busy:
                self._tick()

    def _tick(self) -> None:
        try:
            events = self._engine.tick()
        except Exception as error:
            log.exception("the engine failed")
            self._start_again(error)
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, int, Event]]] = {}
        for event in events:
            number = event.ticket.id
            held = self._open.pop(number, None) if isinstance(event, Finished) else self._open.get(number)
            if held is not None:
                by_loop.setdefault(held[0].loop, []).append((*held, event))
        for loop, told in by_loop.items():
            _from_thread(loop, _hand_over, told)

    def _start_again(self, error: Exception) -> None:
        """A new engine in place of one whose books can no longer be trusted."""
        lost = {call for call, _ in self._open.values()}
        self._open.clear()
        self._engine = self._make()
        for call in lost:
            _from_thread(call.loop, call.tell, EngineFailed(f"the engine failed: {type(error).__name__}: {error}"))

    def _submit(self, call: Call, requests: Sequence[Request]) -> None:
        engine = self._engine
        try:
            if engine.waiting + len(requests) > engine.queue_limit:
                engine.stats.rejected += len(requests)
                raise QueueFull(f"{engine.waiting} words are waiting and {engine.queue_limit} may; ask again later")
            for request in requests:
                call.tickets.append(engine.submit(request))
        except Exception as error:  # LoopcoreError for a word that cannot be; anything else is a fault of ours, told as one
            for ticket in call.tickets:
                engine.cancel(ticket)
            _from_thread(call.loop, call.accept, error)
            return
        self._open.update((ticket.id, (call, word)) for word, ticket in enumerate(call.tickets))
        _from_thread(call.loop, call.accept, None)

    def _cancel(self, call: Call) -> None:
        for ticket in call.tickets:
            held = self._open.get(ticket.id)
            if held is not None and held[0] is call:  # a new engine counts its tickets from 0 again
                del self._open[ticket.id]
                self._engine.cancel(ticket)


def _hand_over(told: Sequence[tuple[Call, int, Event]]) -> None:
    for call, word, event in told:
        call.tell((word, event))


def _from_thread(loop: asyncio.AbstractEventLoop, call: Callable[..., Any], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:  # the event loop is closed: nobody waits there any more
        log.debug("an answer came after its event loop had closed")
