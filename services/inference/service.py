"""Requests on their way through a served model: words in, answers or events out. No HTTP here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopcore.batching import Finished, LoopEvent, Request
from loopcore.errors import InputError
from services.inference.engine_loop import Call
from services.inference.errors import Refusal
from services.inference.limits import Limits
from services.inference.metrics import Metrics
from services.inference.schemas import Answer, Answers, LoopNews, ModelCard, PredictRequest
from services.inference.shelf import Shelf
from services.inference.sources import Models
from services.problems import Problem

if TYPE_CHECKING:
    from services.inference.loaded import Loaded

__all__ = ["Asked", "Service"]


@dataclass(eq=False)
class Asked:
    """One request that a served model has in its line."""

    loaded: Loaded
    words: list[str | list[int]]
    lengths: list[int]
    many: bool
    call: Call
    metrics: Metrics
    ids: list[tuple[int, ...]] = field(default_factory=list)
    """Once there is an answer: what the model said at each position of each word."""

    async def accepted(self) -> None:
        """Waits until every word is in the line. Raises QueueFull, and InputError for a rule that the model cannot follow."""
        try:
            await self.call.accepted
        except InputError as error:
            raise type(error)(str(error)) from None  # the traceback is that of another thread

    async def answer(self) -> Answer | Answers:
        """The answer once every word has its own. Raises Refusal where one has none, EngineFailed."""
        finished: dict[int, Finished] = {}
        async for word, event in self.call.events():
            if isinstance(event, Finished):
                finished[word] = self._answered(word, event)
        return self._answer([finished[word] for word in range(len(self.words))])

    async def news(self) -> AsyncIterator[LoopNews | Answer | Answers]:
        """Every word after every loop, and the answer at the end. Raises as `answer` does."""
        finished: dict[int, Finished] = {}
        async for word, event in self.call.events():
            if isinstance(event, LoopEvent):
                yield self._news(word, event)
            else:
                finished[word] = self._answered(word, event)
        yield self._answer([finished[word] for word in range(len(self.words))])

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self.call.abandon()

    def _answered(self, word: int, event: Finished) -> Finished:
        if event.outputs is not None:
            self.metrics.answered(self.loaded.found.model, event)
            return event
        self.abandon()  # an answer without one of its words is none
        which = f"word {word}" if self.many else "the word"
        if event.exit_reason == "deadline":
            problem = Problem(f"{which} had no answer at the deadline, after {event.loops_used} loops", None, "allow more time")
            raise Refusal(504, problem)
        raise Refusal(500, Problem(f"{which} could not be computed: {event.error or event.exit_reason}"))

    def _news(self, word: int, event: LoopEvent) -> LoopNews:
        return LoopNews(
            word=word,
            loop=event.loop,
            prediction=self._decoded(word, event.prediction),
            frontier=event.settled,
            residual=event.residual,
        )

    def _decoded(self, word: int, outputs: tuple[int, ...]) -> str | list[int]:
        return self.loaded.decode(outputs, as_text=isinstance(self.words[word], str))

    def _answer(self, finished: list[Finished]) -> Answer | Answers:
        self.ids = [event.outputs or () for event in finished]
        rows = [self._row(word, event) for word, event in enumerate(finished)]
        model, version = self.loaded.found.model, self.loaded.version
        if not self.many:
            return Answer(model=model, model_version=version, **rows[0])
        columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        return Answers(model=model, model_version=version, **columns)

    def _row(self, word: int, event: Finished) -> dict[str, Any]:
        return {
            "outputs": self._decoded(word, self.ids[word]),
            "loops_used": event.loops_used,
            "loops_planned": event.loops_planned,
            "loops_budget": self.loaded.budget(self.lengths[word]),
            "exit_reason": event.exit_reason,
            "expected_accuracy": event.expected_accuracy,
            "queue_ms": round(1000 * event.queue_s, 3),
            "compute_ms": round(1000 * event.compute_s, 3),
        }


class Service:
    """The models of one replica and their requests. Belongs to one event loop, in which it is opened and closed."""

    def __init__(self, models: Models, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.shelf = Shelf(models, self.limits)
        self.metrics = Metrics()

    async def open(self) -> None:
        """Brings up what is to be served."""
        await self.shelf.open()

    async def close(self) -> None:
        """Lets requests under way end."""
        await self.shelf.close()

    async def ask(self, model: str, body: PredictRequest, *, trace: bool = False) -> Asked:
        """Hands the words to the model; wait for `accepted` next. Whoever asks has to `abandon` what is not awaited to its end.

        Raises NotServed, Unusable, and UnknownSymbol, LengthError or InputError for a word that the model cannot take.
        """
        loaded = await self.shelf.get(model)
        words = body.words
        if len(words) > loaded.max_words:
            raise InputError(f"got {len(words)} words; expected 1 to {loaded.max_words}; send several requests")
        encoded = []
        for number, word in enumerate(words):
            try:
                encoded.append(loaded.encode(word))
            except InputError as error:
                raise type(error)(f"word {number}: {error}" if body.many else str(error)) from None
        deadline_s = None if body.deadline_ms is None else body.deadline_ms / 1000
        requests = [
            Request(
                tokens,
                loaded.bounded(body.halting(loaded.default_halting(len(tokens))), len(tokens)),
                deadline_s=deadline_s,
                accuracy_floor=body.floor,
                trace=trace,
            )
            for tokens in encoded
        ]
        # Nothing is awaited between the model's choice and this line, so that its engine is not closed meanwhile.
        return Asked(loaded, words, [len(tokens) for tokens in encoded], body.many, loaded.engine.submit(requests), self.metrics)

    async def card(self, model: str) -> ModelCard:
        """How a model stands. Raises NotServed."""
        await self.shelf.notice(model)
        state, found, problem = self.shelf.state(model)
        card = ModelCard(model=model, state=state, version=found.version if found else None, problem=problem)
        loaded = next((held for held in self.shelf.up if held.found.model == model), None)
        if loaded is None:
            return card
        live, waiting = await loaded.engine.ask(lambda engine: (engine.live, engine.waiting)) or (None, None)
        profile = loaded.profile
        measured = {} if profile is None else {name: getattr(profile, name) for name in ("v", "v_low", "v_high", "burn_in")}
        longest = loaded.spec.contract.longest
        return card.model_copy(
            update={
                "task": loaded.task.name,
                "vocabulary": loaded.task.vocabulary,
                "longest_trained": longest,
                "max_length": loaded.max_length,
                "max_words": loaded.max_words,
                "halt": loaded.default_halting(longest).kind,
                "loops_budget": loaded.budget(longest),
                "live": live,
                "waiting": waiting,
                **measured,
            }
        )

    async def exposition(self) -> bytes:
        """Everything counted, in Prometheus' text format."""
        for held in self.shelf.up:
            seen = await held.engine.ask(lambda engine: (engine.stats.to_json(), engine.live, engine.waiting))
            if seen is not None:
                self.metrics.observe(held.found.model, held.version, *seen)
        return self.metrics.text({(held.found.model, held.version) for held in self.shelf.up})
