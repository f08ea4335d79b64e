"""The thread that owns an engine, over engines that follow a record."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from loopcore.batching import Finished, LoopBatchEngine, LoopEvent, Recorded, Request, TraceStepper
from loopcore.errors import InputError, QueueFull
from loopcore.specs import HaltingSpec
from services.inference import engine_loop
from services.inference.engine_loop import Call, EngineFailed, EngineLoop, FellBehind

ENDLESS = HaltingSpec(kind="fixed", loops=10**9)


def echo(word: tuple[int, ...]) -> Recorded:
    """Answers a word with itself after as many loops as it is long."""
    return Recorded(len(word), word)


def engine(**given: Any) -> LoopBatchEngine:
    return LoopBatchEngine(TraceStepper(echo), max_loops=lambda length: 10**9, **given)


def until_still(*words: tuple[int, ...]) -> list[Request]:
    return [Request(word, HaltingSpec(kind="converged")) for word in words]


async def outputs(call: Call) -> dict[int, tuple[int, ...] | None]:
    return {word: event.outputs async for word, event in call.events() if isinstance(event, Finished)}


def running(make: Callable[[], LoopBatchEngine], body: Callable[[EngineLoop], Coroutine[Any, Any, None]]) -> None:
    loop = EngineLoop(make, name="test")
    try:
        asyncio.run(asyncio.wait_for(body(loop), 20.0))
    finally:
        loop.close()
        assert loop.join(5.0)


def test_every_word_gets_its_own_answer() -> None:
    async def body(loop: EngineLoop) -> None:
        calls = [loop.submit(until_still((n, n + 1), (n,), (n, n, n))) for n in range(50)]
        found = await asyncio.gather(*(outputs(call) for call in calls))
        assert found == [{0: (n, n + 1), 1: (n,), 2: (n, n, n)} for n in range(50)]

    running(lambda: engine(max_rows=8), body)


def test_two_event_loops_share_an_engine() -> None:
    loop = EngineLoop(engine, name="test")

    async def ask(word: tuple[int, ...]) -> dict[int, Any]:
        return await outputs(loop.submit(until_still(word)))

    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: asyncio.run(ask((n, n)))})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    loop.close()
    assert found == {n: {0: (n, n)} for n in range(4)}


def test_a_call_is_accepted_whole_or_not_at_all() -> None:
    async def body(loop: EngineLoop) -> None:
        held = loop.submit([Request((1,), ENDLESS)] * 3)
        await held.accepted
        assert await loop.ask(lambda engine: (engine.live, engine.waiting)) == (1, 2)
        with pytest.raises(QueueFull, match="2 words are waiting and 4 may"):
            await loop.submit(until_still((1,), (1,), (1,))).accepted
        with pytest.raises(InputError):
            await loop.submit([Request((2,), ENDLESS), Request((), ENDLESS)]).accepted
        await asyncio.sleep(0.01)
        assert await loop.ask(lambda engine: engine.waiting) == 2
        held.abandon()
        assert await outputs(loop.submit(until_still((7,)))) == {0: (7,)}
        assert await loop.ask(lambda engine: engine.busy) is False

    running(lambda: engine(max_rows=1, queue_limit=4), body)


def test_it_sleeps_while_there_is_nothing_to_do() -> None:
    async def body(loop: EngineLoop) -> None:
        await outputs(loop.submit(until_still((1, 2))))
        ticks = await loop.ask(lambda engine: engine.stats.ticks)
        before = time.thread_time_ns(), time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before[1] < 0.1
        assert await loop.ask(lambda engine: engine.stats.ticks) == ticks

    running(engine, body)


def test_traced_words_tell_every_loop_and_a_reader_that_is_too_slow_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "MOST_BEHIND", 20)

    async def body(loop: EngineLoop) -> None:
        call = loop.submit([Request((4, 5), HaltingSpec(kind="fixed", loops=3), trace=True)])
        events = [event async for _, event in call.events()]
        assert [event.loop for event in events if isinstance(event, LoopEvent)] == [1, 2, 3]
        assert isinstance(events[-1], Finished)
        slow = loop.submit([Request((4, 5), ENDLESS, trace=True)])
        await slow.accepted
        while await loop.ask(lambda engine: engine.busy):
            await asyncio.sleep(0.01)
        with pytest.raises(FellBehind, match="20 events"):
            await outputs(slow)

    running(engine, body)


def test_an_engine_that_breaks_fails_its_calls_and_is_replaced() -> None:
    made: list[LoopBatchEngine] = []

    def make() -> LoopBatchEngine:
        made.append(engine())
        return made[-1]

    async def body(loop: EngineLoop) -> None:
        lost = [loop.submit([Request((1,), ENDLESS)]) for _ in range(2)]
        for call in lost:
            await call.accepted

        def broken() -> list[Any]:
            raise RuntimeError("a fault of its own")

        await loop.ask(lambda engine: setattr(engine, "tick", broken))
        for call in lost:
            with pytest.raises(EngineFailed, match="a fault of its own"):
                await outputs(call)
        fresh = loop.submit([Request((3,), ENDLESS)])
        await fresh.accepted
        lost[0].abandon()  # its ticket has the number of the new engine's first
        assert await outputs(loop.submit(until_still((2, 2)))) == {0: (2, 2)}
        assert await loop.ask(lambda engine: engine.live) == 1
        fresh.abandon()

    running(make, body)
    assert len(made) == 2


def test_a_closing_engine_ends_what_it_has_and_takes_nothing_more() -> None:
    async def body(loop: EngineLoop) -> None:
        call = loop.submit([Request((1,) * 500, HaltingSpec(kind="fixed", loops=500))])
        await call.accepted
        loop.close()
        with pytest.raises(RuntimeError, match="closing"):
            loop.submit(until_still((1,)))
        assert await outputs(call) == {0: (1,) * 500}
        assert await asyncio.to_thread(loop.join, 5.0)
        assert await loop.ask(lambda engine: engine.live) is None

    running(engine, body)


def test_an_event_loop_that_is_gone_does_not_stop_the_engine() -> None:
    loop = EngineLoop(engine, name="test")

    async def leave() -> None:
        await loop.submit([Request((1,), HaltingSpec(kind="fixed", loops=20_000))]).accepted

    asyncio.run(leave())

    async def stay() -> dict[int, Any]:
        return await outputs(loop.submit(until_still((5, 6))))

    assert asyncio.run(stay()) == {0: (5, 6)}
    loop.close()
    assert loop.join(10.0)
