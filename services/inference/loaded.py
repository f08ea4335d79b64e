"""A model version in memory, with its engine running."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from loopcore.batching import LoopBatchEngine, ModelStepper, Request
from loopcore.checkpoint import checkpoints, load_model
from loopcore.errors import InputError, LengthError, LoopcoreError, UnknownSymbol
from loopcore.halting import HaltingProfile, default_max_loops
from loopcore.specs import HaltingSpec, TrainSpec
from loopcore.tasks import Task, load_task
from services.inference.engine_loop import EngineLoop
from services.inference.limits import Limits
from services.inference.sources import Found

__all__ = ["Loaded", "bring_up", "read_profile"]


@dataclass(frozen=True, eq=False)
class Loaded:
    """One version that answers. Thread-free but for its engine: everything else about it never changes."""

    found: Found
    spec: TrainSpec
    task: Task
    profile: HaltingProfile | None
    engine: EngineLoop
    max_length: int
    """Longest word it takes."""
    max_words: int
    """Most words of one request."""
    symbol_characters: int

    @property
    def version(self) -> str:
        return self.found.version

    def default_halting(self, length: int) -> HaltingSpec:
        """The rule of a request that names none: `rule`, or for want of a measured speed the loops of the training contract."""
        return HaltingSpec() if self.profile is not None else HaltingSpec(kind="fixed", loops=self.budget(length))

    def budget(self, length: int) -> int:
        """Loops that a fixed budget spends on every word: the most that were trained, or the contract's for longer words."""
        return loops_budget(self.spec, length)

    def encode(self, word: str | list[int]) -> tuple[int, ...]:
        """Tokens of a word as text or as ids. Raises UnknownSymbol and LengthError."""
        if isinstance(word, list):
            tokens = word
        elif len(word) > self.max_length * self.symbol_characters:
            raise LengthError(f"the word has {len(word)} characters; expected 1 to {self.max_length} symbols")
        else:
            tokens = self.task.encode(word)
        if not 1 <= len(tokens) <= self.max_length:
            what = "the word is empty" if not tokens else f"the word has {len(tokens)} symbols"
            raise LengthError(f"{what}; expected 1 to {self.max_length} symbols")
        wrong = next((token for token in tokens if not 0 <= token < self.task.vocabulary), None)
        if wrong is not None:
            raise UnknownSymbol(
                f"token {wrong} is not in the vocabulary of {self.found.model} ({self.task.name}); expected 0 to "
                f"{self.task.vocabulary - 1}"
            )
        return tuple(tokens)

    def decode(self, outputs: tuple[int, ...], *, as_text: bool) -> str | list[int]:
        """Answers in the form in which the word was given."""
        return self.task.decode(outputs) if as_text else list(outputs)

    def bounded(self, halting: HaltingSpec, length: int) -> HaltingSpec:
        """A rule that watches the word and names no bound gets one: a word that never settles must end all the same."""
        if not halting.watches or halting.max_loops is not None:
            return halting
        most = max(default_max_loops(self.profile)(length), halting.min_loops)
        return halting.model_copy(update={"max_loops": most})


def loops_budget(spec: TrainSpec, length: int) -> int:
    """Loops that a fixed budget spends on a word of this length (see `Loaded.budget`)."""
    return max(spec.contract.most_loops, spec.contract.loops.loops(length))


def bring_up(found: Found, limits: Limits) -> Loaded:
    """Loads a version, starts its engine and runs a word through it, so that the first request meets a warm model.

    Raises CheckpointCorrupt for files that are not right, InputError for a profile that cannot be used.
    """
    newest = checkpoints(found.checkpoint)
    model, spec = load_model(newest[0] if newest else found.checkpoint)
    if spec.contract.input_schedule == "streaming":
        raise InputError(
            f"{found.model} was trained on a streaming contract, and the service shows a word whole; expected one trained with "
            "input_schedule all"
        )
    task = load_task(spec.task)
    profile = None
    if found.profile is not None:
        try:
            profile = read_profile(json.loads(found.profile.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{found.profile} cannot be used: {error}; register the run again with its probe") from None
    stepper = ModelStepper(model)
    longest = limits.length_factor * spec.contract.longest
    longest = min(longest, stepper.max_length or longest)
    allowed = default_max_loops(profile)

    def most_loops(length: int) -> int:
        return max(allowed(length), limits.loops_factor * loops_budget(spec, length))

    def engine() -> LoopBatchEngine:
        return LoopBatchEngine(
            ModelStepper(model),
            profile=profile,
            max_rows=limits.rows,
            queue_limit=limits.queue,
            max_loops=most_loops,
            max_length=longest,
        )

    for length in {1, spec.contract.longest}:
        word = Request((0,) * length, HaltingSpec(kind="fixed", loops=1))
        ready = engine().run([word])[0]
        if ready.outputs is None:
            raise LoopcoreError(f"{found.model} version {found.version} does not answer: {ready.error}; register another version")
    running = EngineLoop(engine, name=f"{found.model} {found.version}")
    return Loaded(found, spec, task, profile, running, longest, limits.words, limits.symbol_characters)


def read_profile(content: Any) -> HaltingProfile | None:
    """The halting profile in a model version's `profile.json`; None where its probe could not decide on one."""
    if isinstance(content, dict) and "halting" in content:  # beside other figures
        content = content["halting"]
    if content is not None and not isinstance(content, dict):
        raise InputError(f"expected a JSON object, got a {type(content).__name__}")
    return None if content is None else HaltingProfile.from_json(content)
