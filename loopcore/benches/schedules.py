"""Ways of scheduling words whose exits are recorded: batches cut beforehand, and the engine that rows join as others leave.

All of them run the same stepper, may hold the same number of rows at once, look at the rows after every loop where the exit has
to be found by looking, and read a word out at its recorded exit, so that they give the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from loopcore.batching import Finished, LoopBatchEngine, Reading, Request, Stepper
from loopcore.device import seconds_of
from loopcore.specs.halting import HaltingSpec

__all__ = ["Recording", "Replayed", "Word", "batch_latencies", "cut", "engine_latencies", "engine_of", "requests_of", "run_batch"]

Word = tuple[int, ...]


@dataclass(frozen=True)
class Recording:
    """Words in their order of arrival, and the loops after which each is ready."""

    words: tuple[Word, ...]
    exits: Mapping[Word, int]
    watched: bool
    """Whether an exit has to be found by looking at the state after every loop (`converged`), or is known beforehand (`rule`)."""
    bucket_width: int = 1
    """Of the engine: it pads words up to a multiple of this."""

    @property
    def useful_token_loops(self) -> int:
        """The fewest that answer every word."""
        return sum(len(word) * self.exits[word] for word in self.words)


class Replayed:
    """Runs a stepper; a row's residual is computed as ever, but the record says what it shows: 0 from the exit on, 1 before.

    Counts the token-loops executed, padding included.
    """

    def __init__(self, stepper: Stepper, exits: Mapping[Word, int]) -> None:
        self.stepper, self.exits, self.executed_token_loops = stepper, exits, 0
        self.vocabulary, self.max_length = stepper.vocabulary, stepper.max_length
        self.max_loops, self.pads = stepper.max_loops, stepper.pads
        self._left: dict[int, dict[int, int]] = {}  # loops to its exit, by bucket and slot

    def admit(self, bucket: int, slots: Sequence[int], words: Sequence[Sequence[int]], *, remember: bool) -> None:
        self.stepper.admit(bucket, slots, words, remember=remember)
        left = (self.exits[tuple(word)] for word in words)
        self._left.setdefault(bucket, {}).update(zip(slots, left, strict=True))

    def step(self, bucket: int, slots: Sequence[int], loops: Sequence[int], *, remember: bool) -> None:
        self.stepper.step(bucket, slots, loops, remember=remember)
        self.executed_token_loops += bucket * len(slots)
        for slot in slots:
            self._left[bucket][slot] -= 1

    def readout(self, bucket: int, slots: Sequence[int], *, logits: bool) -> list[Reading]:
        return self.stepper.readout(bucket, slots, logits=logits)

    def residuals(self, bucket: int, slots: Sequence[int], kind: str) -> list[float]:
        self.stepper.residuals(bucket, slots, kind)
        return [float(self._left[bucket][slot] > 0) for slot in slots]

    def leave(self, bucket: int, slots: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        self.stepper.leave(bucket, slots, moves)
        for slot in slots:
            del self._left[bucket][slot]
        for source, target in moves:
            self._left[bucket][target] = self._left[bucket].pop(source)

    def close(self, bucket: int) -> None:
        self.stepper.close(bucket)
        self._left.pop(bucket, None)


def cut(words: Sequence[Word], rows: int) -> list[Sequence[Word]]:
    """Batches of `rows` words, in their order."""
    return [words[first : first + rows] for first in range(0, len(words), rows)]


def run_batch(
    stepper: Stepper, words: Sequence[Word], exits: Mapping[Word, int], *, watched: bool, drop: bool = False
) -> list[Word]:
    """Answers a batch, padded to its longest word and run to its slowest row; with `drop` finished rows leave it."""
    bucket, held = max(map(len, words)), list(range(len(words)))  # number of the word, by slot
    stepper.admit(bucket, held, words, remember=watched)
    answers: dict[int, Word] = {}
    loop = 0
    while len(answers) < len(words):
        slots = range(len(held))
        stepper.step(bucket, slots, [loop] * len(held), remember=watched)
        loop += 1
        if watched:
            stepper.residuals(bucket, slots, "converged")
        done = [slot for slot in slots if exits[words[held[slot]]] == loop]
        if not done:
            continue
        readings = stepper.readout(bucket, done, logits=False)
        answers.update((held[slot], reading.prediction) for slot, reading in zip(done, readings, strict=True))
        if drop:
            kept = len(held) - len(done)
            last = [slot for slot in range(kept, len(held)) if slot not in done]
            moves = list(zip(last, (slot for slot in done if slot < kept), strict=True))
            stepper.leave(bucket, done, moves)
            for source, target in moves:
                held[target] = held[source]
            del held[kept:]
    stepper.leave(bucket, range(len(held)), [])
    return [answers[number] for number in range(len(words))]


def engine_of(stepper: Stepper, recording: Recording, rows: int, waiting: int) -> LoopBatchEngine:
    """The engine as it serves these words; `waiting` is the room in its line."""
    most = max(recording.exits.values())
    width = recording.bucket_width
    return LoopBatchEngine(stepper, max_rows=rows, queue_limit=waiting, max_loops=lambda _: most, bucket_width=width)


def requests_of(recording: Recording, words: Sequence[Word]) -> list[Request]:
    """The words as they are asked for: with the loops that the rule planned, or to be watched."""
    if recording.watched:
        return [Request(word, HaltingSpec(kind="converged")) for word in words]
    return [Request(word, HaltingSpec(kind="fixed", loops=recording.exits[word])) for word in words]


def batch_latencies(
    answer: Callable[[Sequence[Word]], object],
    words: Sequence[Word],
    arrivals: Sequence[float],
    *,
    rows: int,
    wait_s: float,
    device: torch.device,
) -> list[float]:
    """Seconds from each arrival to its answer where batches are formed as Ray Serve's `@serve.batch` does, one at a time.

    A batch begins with the oldest word that waits; it is closed once it has `rows` words or `wait_s` went by, and `answer` then
    answers them together. Time is that of `answer`; while nothing is to be done it jumps to the next arrival.
    """
    now, first = 0.0, 0
    latencies: list[float] = []
    while first < len(words):
        opened = max(now, arrivals[first])
        here = [at for at in arrivals[first : first + rows] if at <= opened + wait_s]
        now = max(opened, here[-1]) if len(here) == rows else opened + wait_s
        batch = words[first : first + len(here)]
        now += seconds_of(lambda batch=batch: answer(batch), device)
        latencies.extend(now - at for at in here)
        first += len(here)
    return latencies


def engine_latencies(
    engine: LoopBatchEngine, requests: Sequence[Request], arrivals: Sequence[float], device: torch.device
) -> list[float]:
    """Seconds from each arrival to its answer by the engine, idle at first: words come in between ticks, as in the service."""
    now, submitted = 0.0, 0
    latencies: dict[int, float] = {}
    while len(latencies) < len(requests):
        if not engine.busy:
            now = max(now, arrivals[submitted])
        due = submitted
        while due < len(requests) and arrivals[due] <= now:
            due += 1
        ended: list[int] = []

        def tick(first: int = submitted, due: int = due, ended: list[int] = ended) -> None:
            for request in requests[first:due]:
                engine.submit(request)
            ended.extend(event.ticket.id for event in engine.tick() if isinstance(event, Finished))

        now += seconds_of(tick, device)
        submitted = due
        latencies.update((number, now - arrivals[number]) for number in ended)
    return [latencies[number] for number in range(len(requests))]
