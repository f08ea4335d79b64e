"""What the inference service takes and gives."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from loopcore.batching import ExitReason
from loopcore.specs import HaltingSpec, parse_halting
from loopcore.specs.base import PositiveInt, Spec, UnitInterval
from services.problems import explain, join_lines

__all__ = ["Answer", "Answers", "LoopNews", "ModelCard", "ModelCards", "PredictRequest", "Word", "Words"]

Token = Annotated[int, Field(ge=0, lt=2**31)]
Word = str | list[Token]

_FORMS = 'text such as "3 1 4", a list of token ids such as [3, 1, 4], or a list of up to 10000 of these'
MOST_WORDS = 10_000  # that are looked at at all; what a model takes at once is in its card
DEFAULT_FLOOR = 0.95  # token accuracy that a request which allows degrading keeps, where it names none


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_word(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_token, value)))


def _inputs(value: Any) -> Any:
    """One message for whatever is wrong, in place of one for each form that it is not."""
    if isinstance(value, list) and len(value) > MOST_WORDS:
        raise ValueError(f"got a list of {len(value)}; expected {_FORMS}")
    if _is_word(value):
        return value
    if not isinstance(value, list):
        raise ValueError(f"got a {type(value).__name__}; expected {_FORMS}")
    wrong = next((at for at, word in enumerate(value) if not _is_word(word)), None)
    if wrong is not None:
        raise ValueError(f"item {wrong} is neither text nor a list of token ids of at least 0; expected {_FORMS}")
    return value


def _halt(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_halting(value)
    except ValidationError as error:
        raise ValueError(join_lines(explain(error, HaltingSpec))) from None


Words = Annotated[str | list[Token] | list[Word], BeforeValidator(_inputs)]
# A short form, or the rule written out. The validator turns the first into the second.
Halt = Annotated[HaltingSpec, BeforeValidator(_halt, json_schema_input_type=str | HaltingSpec)]


class PredictRequest(Spec):
    """Words to be answered, and how long each may loop."""

    inputs: Words
    """A word as text (its symbols apart by spaces) or as token ids, or a list of words."""
    halt: Halt | None = None
    """When a word may stop: `rule`, `converged`, `converged:0.05`, `fixed:12`, `calibrated:0.01`, ... or the same with all its
    fields. Empty: the model's own, `rule` where its speed was measured."""
    min_loops: PositiveInt | None = None
    """Never fewer loops than this; for `halt` in its short form."""
    max_loops: PositiveInt | None = None
    """Never more loops than this; for `halt` in its short form."""
    deadline_ms: float | None = Field(default=None, gt=0.0, le=3_600_000.0)
    """Milliseconds after which no answer is wanted any more (504)."""
    degrade: bool = False
    """Under pressure, words may stop earlier (`exit_reason` `shed`), but not below `accuracy_floor`."""
    accuracy_floor: UnitInterval | None = None
    """Measured token accuracy that `degrade` keeps. Empty: 0.95."""

    @model_validator(mode="before")
    @classmethod
    def _bounds_go_into_the_rule(cls, values: Any) -> Any:
        """`min_loops` and `max_loops` belong to the rule; given beside its long form they would say it twice."""
        if isinstance(values, dict) and isinstance(values.get("halt"), dict):
            twice = [name for name in ("min_loops", "max_loops") if name in values and values[name] is not None]
            if twice:
                raise ValueError(f"{twice[0]} stands beside a halt that is written out; put it into halt")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> PredictRequest:
        if self.accuracy_floor is not None and not self.degrade:
            raise ValueError("accuracy_floor says how far degrade may go; add degrade: true, or leave it out")
        rule = self.halt or HaltingSpec()
        least, most = self.min_loops or rule.min_loops, self.max_loops or rule.max_loops
        if most is not None and most < least:
            raise ValueError(f"max_loops must be at least min_loops, got {most} and {least}")
        return self

    @property
    def many(self) -> bool:
        """Whether a list of words was given, and so a list of answers is expected."""
        return isinstance(self.inputs, list) and bool(self.inputs) and not isinstance(self.inputs[0], int)

    @property
    def words(self) -> list[str | list[int]]:
        """The words, one or several."""
        return self.inputs if self.many else [self.inputs]  # pyright: ignore[reportReturnType]

    @property
    def floor(self) -> float | None:
        """Accuracy down to which words may be cut short; None where they may not."""
        if not self.degrade:
            return None
        return DEFAULT_FLOOR if self.accuracy_floor is None else self.accuracy_floor

    def halting(self, default: HaltingSpec) -> HaltingSpec:
        """The rule with its bounds; `default` where the request names none."""
        bounds = {name: value for name in ("min_loops", "max_loops") if (value := getattr(self, name)) is not None}
        rule = self.halt or default
        return HaltingSpec.model_validate(rule.model_dump() | bounds) if bounds else rule


class _Body(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=(), frozen=True)


class Answer(_Body):
    """The answer to one word."""

    model: str
    """`name@alias`."""
    model_version: str
    """Version that answered."""
    outputs: str | list[int]
    """What the model says at each position: text for a word given as text, ids for one given as ids."""
    loops_used: int
    """Loops this word went through."""
    loops_planned: int | None
    """Loops planned when it came, T* = ceil(n / v) + burn-in for `rule`, T* and its margin for `calibrated`; none
    for rules that watch the word."""
    loops_budget: int
    """Loops a fixed budget would have spent: the most that were trained, or what the contract asks for a longer word."""
    exit_reason: ExitReason
    """What ended it: the rule's name, `max_loops` where that bound came first, or `shed`."""
    expected_accuracy: float | None
    """Token accuracy that was measured after this many loops at this length, where it was."""
    queue_ms: float
    """Milliseconds from its arrival to its first loop."""
    compute_ms: float
    """Milliseconds from its first loop to its answer."""


class Answers(_Body):
    """The answers to several words: one value a word in each list, in their order."""

    model: str
    """`name@alias`."""
    model_version: str
    """Version that answered."""
    outputs: list[str | list[int]]
    loops_used: list[int]
    loops_planned: list[int | None]
    loops_budget: list[int]
    exit_reason: list[ExitReason]
    expected_accuracy: list[float | None]
    queue_ms: list[float]
    compute_ms: list[float]


class LoopNews(_Body):
    """A word after one more loop (an event `loop`)."""

    word: int
    """Which of the words, from 0."""
    loop: int
    """Loops it has been through."""
    prediction: str | list[int]
    """What the model would answer now."""
    frontier: int
    """Positions from the first on whose prediction this loop did not change."""
    residual: float | None
    """Largest relative change of the state over the word's positions in this loop."""


class ModelCard(_Body):
    """A model that the service is to have up."""

    model: str
    """`name@alias`."""
    state: Literal["ready", "asleep", "failed"]
    """`ready`: in memory. `asleep`: it comes into memory when it is asked for. `failed`: see `problem`."""
    version: str | None
    """Version that answers, or that failed."""
    problem: str | None = None
    """Why it failed; beside a model that is ready, why its newest version did not take over."""
    task: str | None = None
    """What it was trained on."""
    vocabulary: int | None = None
    """Number of tokens; ids are 0 to one less."""
    longest_trained: int | None = None
    """Longest word it was trained on."""
    max_length: int | None = None
    """Longest word it takes."""
    max_words: int | None = None
    """Most words of one request."""
    halt: str | None = None
    """Rule of a request that names none."""
    v: float | None = None
    """Measured speed in positions a loop."""
    v_low: float | None = None
    v_high: float | None = None
    burn_in: int | None = None
    """Loops on top of ceil(n / v)."""
    loops_budget: int | None = None
    """Most loops that were trained: what a fixed budget spends."""
    live: int | None = None
    """Words looping now."""
    waiting: int | None = None
    """Words waiting now."""


class ModelCards(_Body):
    """Every model that the service is to have up."""

    models: list[ModelCard]
