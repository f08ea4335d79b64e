"""A stepper that follows a record: which row is ready after how many loops, with which answer. No torch, no arithmetic.

For schedulers and their tests, and for replaying the exits of a measured run. It keeps the same books as a model would
(slots, moves, buckets) and complains where the engine breaks them. With a `VirtualClock` and a cost of a pass it also
tells the time that a schedule would take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loopcore.batching.stepper import Reading

__all__ = ["Recorded", "TraceStepper", "VirtualClock"]


class VirtualClock:
    """Time in seconds that passes only when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Recorded:
    """How one word behaves."""

    exit: int
    """Loops after which it stands still: its residual is 1 before and 0 from then on."""
    outputs: tuple[int, ...]
    """Its prediction from `exit` loops on; 0 everywhere before."""
    fails_at: int | None = None
    """Loop in which computing this row raises, and every batch that holds it with it."""


@dataclass
class _Row:
    word: tuple[int, ...]
    record: Recorded
    loops: int = 0


class TraceStepper:
    """Follows `record(word)`, a mapping or a function."""

    def __init__(
        self,
        record: Mapping[tuple[int, ...], Recorded] | Callable[[tuple[int, ...]], Recorded],
        *,
        vocabulary: int = 2**31,
        max_length: int | None = None,
        max_loops: int | None = None,
        pads: bool = False,
        cost_s: Callable[[int, int], float] | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        """`cost_s(rows, length)` is added to `clock` at every pass."""
        self._record = record if callable(record) else record.__getitem__
        self.vocabulary, self.max_length, self.max_loops, self.pads = vocabulary, max_length, max_loops, pads
        self._cost_s, self._clock = cost_s, clock
        self._buckets: dict[int, dict[int, _Row]] = {}
        self.passes: list[tuple[int, int]] = []
        """(bucket, rows) of every pass so far."""

    def admit(self, bucket: int, slots: Sequence[int], words: Sequence[Sequence[int]], *, remember: bool) -> None:
        rows = [_Row(tuple(word), self._record(tuple(word))) for word in words]
        held = self._buckets.setdefault(bucket, {})
        assert not held.keys() & set(slots), f"slots {list(slots)} of bucket {bucket} are taken"
        held.update(zip(slots, rows, strict=True))

    def step(self, bucket: int, slots: Sequence[int], loops: Sequence[int], *, remember: bool) -> None:
        rows = [self._buckets[bucket][slot] for slot in slots]
        assert [row.loops for row in rows] == list(loops), "the engine's count of loops is not the row's"
        failing = [row.word for row in rows if row.record.fails_at == row.loops + 1]
        if failing:
            raise RuntimeError(f"recorded failure of {failing[0]}")
        for row in rows:
            row.loops += 1
        self.passes.append((bucket, len(rows)))
        if self._clock and self._cost_s:
            self._clock.advance(self._cost_s(len(rows), bucket))

    def readout(self, bucket: int, slots: Sequence[int], *, logits: bool) -> list[Reading]:
        rows = [self._buckets[bucket][slot] for slot in slots]
        return [Reading(row.record.outputs if row.loops >= row.record.exit else (0,) * len(row.word)) for row in rows]

    def residuals(self, bucket: int, slots: Sequence[int], kind: str) -> list[float]:
        rows = [self._buckets[bucket][slot] for slot in slots]
        return [0.0 if row.loops >= row.record.exit else 1.0 for row in rows]

    def leave(self, bucket: int, slots: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        held = self._buckets[bucket]
        for slot in slots:
            del held[slot]
        for source, target in moves:
            assert target not in held, f"slot {target} of bucket {bucket} is taken"
            held[target] = held.pop(source)

    def close(self, bucket: int) -> None:
        held = self._buckets.pop(bucket, {})
        assert not held, f"bucket {bucket} still holds {len(held)} rows"
