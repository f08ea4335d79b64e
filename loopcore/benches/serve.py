"""`loop bench serve`: words whose exits are recorded, answered by this engine and by batches, on equal terms.

Two sets of words. `wide` is for scheduling alone: lengths uniform in [8, 64], d 128, weights as drawn, exits drawn once;
its figures have no suffix. `solved` is of lengths that a model solves, trained here on words of S3, its exits measured on it.
Exits are of two kinds: by `rule`, known beforehand from the length; by `converged`, found by looking at the state after every
loop.

- wide, rule: T*(n) = ceil(n / 4) + 2. wide, converged: uniform from 2 to the budget of the length, ceil(1.5 T*(n)) + 1.
- solved, rule: T*(n) as a probe measures it. solved, converged: the first loop with a residual below .5.

Ways: `full`, every row at the budget of its length; `static`, batches in order of arrival, each to its slowest row; `sorted`,
the same sorted by length; `compaction`, sorted too, finished rows dropped and none joining; `engine`, LoopBatchEngine. All have
the same stepper, the same most rows at once, and all but `full` the same recorded exits and so the same answers, which is
checked (`same_answers_KIND`: the share of positions that all of them answer alike; the bench fails under .999).

- `ceiling_share`: useful / executed token-loops of the engine, the lower of both kinds; `useful_share_WAY_KIND` of every way;
- `ratio_WAY_KIND`: the seconds of a way by those of the engine, all words there at once; `requests_per_second_WAY_KIND`;
- `p99_ratio_serve_batch_LOAD_KIND` (and p50): the engine's latency by that of batches formed as Ray Serve's `@serve.batch` forms
  them (its default wait of 10 ms, one at a time, each to its slowest row), both under the same Poisson arrivals at LOAD percent
  of what such batches carry when the line is never empty. That policy is followed in this process, without Ray: what Ray adds to
  a request would be added to either;
- `accuracy_WAY_KIND_solved`: of tokens.

One CPU thread, in CPU seconds: what else the machine does is not part of it. While nothing is to be done, time jumps to the next
arrival. On a GPU it is time on the clock.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from loopcore.batching import ModelStepper
from loopcore.benches.figures import BenchAsk, Figure, Tell, heads_of, machine, median, ratio
from loopcore.benches.schedules import (
    Recording,
    Replayed,
    Word,
    batch_latencies,
    cut,
    engine_latencies,
    engine_of,
    requests_of,
    run_batch,
)
from loopcore.device import resolve_device, seconds_of
from loopcore.errors import Undecided
from loopcore.halting import HaltingProfile, default_max_loops, measure_halting
from loopcore.instruments import correct_by_loop, measure_frontier
from loopcore.model import LoopedTransformer, build_model
from loopcore.specs.train import TrainSpec
from loopcore.tasks import load_task
from loopcore.training import Training

__all__ = ["NAME", "SIZES", "ServeSizes", "run"]

NAME = "serve"
KINDS = ("rule", "converged")
AGAINST = {
    "full": "every row at the budget of its length",
    "static": "batches in order of arrival, each to its slowest row",
    "sorted": "batches sorted by length, each to its slowest row",
    "compaction": "batches sorted by length, finished rows dropped",
}
LOADS = (50, 80)  # percent of what @serve.batch carries
WAIT_S = 0.01  # batch_wait_timeout_s of @serve.batch
POSITIONS_A_LOOP, BURN_IN = 4, 2  # T* of the wide set
STANDS_STILL = 0.5  # residual of a solved state, which drifts on by about .2 a loop
ALIKE = 0.999  # share of positions; the rest is for logits that are equal but for rounding


@dataclass(frozen=True)
class ServeSizes:
    """What is timed."""

    lengths: tuple[int, int]
    """Shortest and longest word of the wide set."""
    width: int
    words: int
    """Of the wide set."""
    solved_words: int
    rows: int
    """At once, of every way."""
    bucket_width: int
    """Of the engine on the wide set."""
    rounds: int
    load_words: int
    """Arrivals under load."""
    stages: tuple[int, ...]
    """Lengths that the model of the solved set is trained on."""
    steps: int


SIZES = {
    "smoke": ServeSizes((3, 8), 16, 12, 8, rows=4, bucket_width=2, rounds=2, load_words=12, stages=(2,), steps=2),
    "full": ServeSizes((8, 64), 128, 384, 384, rows=32, bucket_width=4, rounds=3, load_words=384, stages=(2, 4, 6), steps=4000),
}


@dataclass(frozen=True)
class Served:
    """A set of words with the model that answers them."""

    suffix: str
    stepper: ModelStepper
    recordings: Mapping[str, Recording]
    """By kind of exit, of the same words."""
    budgets: Mapping[Word, int]
    targets: Mapping[Word, Word] | None = None


def run(ask: BenchAsk, tell: Tell = lambda _: None) -> tuple[dict[str, object], list[Figure]]:
    """The machine and the figures. Raises DeviceUnavailable; RuntimeError where two ways answer differently."""
    device, threads, sizes = resolve_device(ask.device), ask.threads or 1, SIZES[ask.scale]
    torch.set_num_threads(threads)
    where = machine(device, threads)
    rounds, figures = ask.rounds or sizes.rounds, []
    for width in ask.widths or (sizes.width,):
        wide = wide_set(width, sizes, device)
        suffix = f"_d{width}" if ask.widths else ""
        found, capacities = _offline(wide, rounds, sizes, device, tell)
        found += _under_load(wide, capacities, rounds, sizes, device, tell)
        figures += [Figure(f"{figure.name}{suffix}", *list(vars(figure).values())[1:]) for figure in found]
    return where, figures + _offline(solved_set(sizes, device, tell), rounds, sizes, device, tell)[0]


def wide_set(width: int, sizes: ServeSizes, device: torch.device) -> Served:
    """Words of lengths drawn uniformly, no two alike, and a model with weights as they are drawn."""
    spec = TrainSpec.model_validate(
        {"model": {"width": width, "heads": heads_of(width, 32), "readout_init": "normal"}, "scaling": {"base_width": width}}
    )
    task = load_task(spec.task)
    model = build_model(spec, task).to(device)
    assert isinstance(model, LoopedTransformer)
    draw = random.Random(0)  # noqa: S311 - a draw, no secret
    words: dict[Word, None] = {}
    while len(words) < sizes.words:
        words[tuple(draw.randrange(task.vocabulary) for _ in range(draw.randint(*sizes.lengths)))] = None
    planned = {word: -(-len(word) // POSITIONS_A_LOOP) + BURN_IN for word in words}
    budgets = {word: -(-3 * loops // 2) + 1 for word, loops in planned.items()}
    exits = {"rule": planned, "converged": {word: draw.randint(2, most) for word, most in budgets.items()}}
    recordings = {kind: Recording(tuple(words), exits[kind], kind == "converged", sizes.bucket_width) for kind in KINDS}
    return Served("", ModelStepper(model), recordings, budgets)


def solved_set(sizes: ServeSizes, device: torch.device, tell: Tell) -> Served:
    """Held-out words of the lengths that a model of S3 was trained on, in mixed order, with its exits on them."""
    training = Training(
        TrainSpec.model_validate(
            {"contract": {"lengths": sizes.stages}, "optimizer": {"weight_decay": 0.01}, "batch": 16, "steps": sizes.steps}
        ),
        device=str(device),
    )
    tell(f"training a model on words of S3 up to length {sizes.stages[-1]}")
    while not training.finished:
        training.advance()
    model, task, longest = training.model, training.task, sizes.stages[-1]
    assert isinstance(model, LoopedTransformer)
    profile = _profile(training, longest)
    planned = (lambda n: n) if profile is None else profile.planned_loops  # the contract's, T = n, where v was not decided
    targets: dict[Word, Word] = {}
    words: list[Word] = []
    lengths = range(2, longest + 1)
    for n, size in zip(lengths, _shares(sizes.solved_words, len(lengths)), strict=True):
        batch = task.random_batch(seed=1, split="held_out", index=0, size=size, length=n)
        words += map(tuple, batch.tokens.tolist())
        targets.update(zip(map(tuple, batch.tokens.tolist()), map(tuple, batch.targets.tolist()), strict=True))
    random.Random(0).shuffle(words)  # noqa: S311
    budgets = {word: default_max_loops(profile)(len(word)) for word in words}
    stepper = ModelStepper(model)
    exits = {"rule": {word: planned(len(word)) for word in words}, "converged": converged_exits(stepper, budgets)}
    recordings = {kind: Recording(tuple(words), exits[kind], kind == "converged") for kind in KINDS}
    return Served("_solved", stepper, recordings, budgets, targets)


def _profile(training: Training, longest: int) -> HaltingProfile | None:
    """v and burn-in as a probe measures them; None where the model did not learn enough to have a speed."""
    correct_TBN = correct_by_loop(training.model, training.task, words=512, length=longest, loops=2 * longest)
    try:
        return measure_halting(correct_TBN, measure_frontier(correct_TBN).speed, causal=True)
    except Undecided:
        return None


def _shares(words: int, parts: int) -> list[int]:
    """As even as can be."""
    return [words * (part + 1) // parts - words * part // parts for part in range(parts)]


def converged_exits(stepper: ModelStepper, budgets: Mapping[Word, int]) -> dict[Word, int]:
    """The first loop after which each word's residual is below `STANDS_STILL`, or its budget."""
    exits = dict(budgets)
    for length in sorted({len(word) for word in budgets}):
        words = [word for word in budgets if len(word) == length]
        slots = range(len(words))
        stepper.admit(length, slots, words, remember=True)
        for loop in range(1, max(budgets[word] for word in words) + 1):
            stepper.step(length, slots, [loop - 1] * len(words), remember=True)
            for word, residual in zip(words, stepper.residuals(length, slots, "converged"), strict=True):
                if residual < STANDS_STILL:
                    exits[word] = min(exits[word], loop)
        stepper.close(length)
    return exits


def _ways(served: Served, kind: str, rows: int) -> dict[str, Callable[[Replayed], list[tuple[Word, Word]]]]:
    """Answers to every word, in pairs with it, by way."""
    recording = served.recordings[kind]
    by_length = sorted(recording.words, key=len)
    requests = requests_of(recording, recording.words)

    def batches(words: Sequence[Word], *, budget: bool = False, drop: bool = False) -> Callable:
        exits, watched = (served.budgets, False) if budget else (recording.exits, recording.watched)

        def answer(stepper: Replayed) -> list[tuple[Word, Word]]:
            found: list[tuple[Word, Word]] = []
            for batch in cut(words, rows):
                found += zip(batch, run_batch(stepper, batch, exits, watched=watched, drop=drop), strict=True)
            return found

        return answer

    def engine(stepper: Replayed) -> list[tuple[Word, Word]]:
        ended = engine_of(stepper, recording, rows, len(requests)).run(requests)
        return [(request.tokens, end.outputs or ()) for request, end in zip(requests, ended, strict=True)]

    return {
        "full": batches(recording.words, budget=True),
        "static": batches(recording.words),
        "sorted": batches(by_length),
        "compaction": batches(by_length, drop=True),
        "engine": engine,
    }


def _offline(
    served: Served, rounds: int, sizes: ServeSizes, device: torch.device, tell: Tell
) -> tuple[list[Figure], dict[str, float]]:
    """All words there at once: the figures, and the words a second that static batches carry, by kind."""
    figures, capacities, shares = [], {}, []
    for kind, recording in served.recordings.items():
        ways = _ways(served, kind, sizes.rows)
        answers: dict[str, list[tuple[Word, Word]]] = {}
        executed: dict[str, int] = {}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(-1, rounds):  # the one before the first warms up
            if number >= 0:
                tell(f"{kind}{served.suffix}: round {number + 1} of {rounds}")
            order = list(ways)
            for way in order[number % len(order) :] + order[: number % len(order)]:
                stepper = Replayed(served.stepper, recording.exits)
                took = seconds_of(lambda: answers.update({way: ways[way](stepper)}), device)  # noqa: B023 - called at once
                executed[way] = stepper.executed_token_loops
                if number >= 0:
                    seconds[way].append(took)
        end = f"{kind}{served.suffix}"
        count = len(recording.words)
        of = f"{count} words, at most {sizes.rows} rows at once"
        for way, against in AGAINST.items():
            figures.append(ratio(f"ratio_{way}_{end}", seconds[way], seconds["engine"], f"{against}; {of}"))
        for way, took in seconds.items():
            share = recording.useful_token_loops / executed[way]
            figures.append(median(f"useful_share_{way}_{end}", [share], "share", "token-loops executed"))
            figures.append(median(f"requests_per_second_{way}_{end}", [count / s for s in took], "requests/s", of))
        shares.append(recording.useful_token_loops / executed["engine"])
        figures.append(median(f"same_answers_{end}", [alike(answers)], "share", "positions; all ways but full"))
        if served.targets is not None:
            for way, given in answers.items():
                found = accuracy(given, served.targets)
                figures.append(median(f"accuracy_{way}_{end}", [found], "share", "tokens of held-out words"))
        capacities[kind] = count / statistics.median(seconds["static"])
    ceiling = median(
        f"ceiling_share{served.suffix}", [min(shares)], "share", "token-loops executed, the lower of rule and converged"
    )
    return [ceiling, *figures], capacities


def alike(answers: Mapping[str, list[tuple[Word, Word]]]) -> float:
    """Share of positions that all ways but `full` answer alike. Raises RuntimeError under `ALIKE`."""
    by_word = [sorted(given) for way, given in answers.items() if way != "full"]
    same = total = 0
    for given in zip(*by_word, strict=True):
        word, answer = given[0]
        assert all(other == word for other, _ in given), "every way answers every word"
        total += len(word)
        same += sum(len({found[i : i + 1] for _, found in given}) == 1 for i in range(len(answer)))
    if same < ALIKE * total:
        raise RuntimeError(f"the ways of scheduling gave different answers: {same} of {total} positions are alike")
    return same / total


def accuracy(given: list[tuple[Word, Word]], targets: Mapping[Word, Word]) -> float:
    """Share of tokens that are right."""
    right = sum(sum(a == b for a, b in zip(answer, targets[word], strict=True)) for word, answer in given)
    return right / sum(len(word) for word, _ in given)


def _under_load(
    served: Served, capacities: Mapping[str, float], rounds: int, sizes: ServeSizes, device: torch.device, tell: Tell
) -> list[Figure]:
    """Latencies of the engine and of batches as @serve.batch forms them, under the same arrivals."""
    figures = []
    for (kind, recording), load in itertools.product(served.recordings.items(), LOADS):
        found: dict[tuple[str, int], list[float]] = {(way, q): [] for way in ("engine", "serve_batch") for q in (50, 99)}
        rate = capacities[kind] * load / 100
        for number in range(rounds):
            tell(f"{kind}, {load} % load: round {number + 1} of {rounds}")
            words, arrivals = poisson(recording.words, sizes.load_words, rate, seed=number)
            stepper = Replayed(served.stepper, recording.exits)

            def answer(batch: Sequence[Word], stepper: Replayed = stepper, recording: Recording = recording) -> object:
                return run_batch(stepper, batch, recording.exits, watched=recording.watched)

            engine, asked = engine_of(stepper, recording, sizes.rows, len(words)), requests_of(recording, words)
            ways = {
                "serve_batch": lambda: batch_latencies(answer, words, arrivals, rows=sizes.rows, wait_s=WAIT_S, device=device),  # noqa: B023
                "engine": lambda: engine_latencies(engine, asked, arrivals, device),  # noqa: B023 - called at once
            }
            for way in list(ways)[:: 1 if number % 2 else -1]:
                latencies = ways[way]()
                for q in (50, 99):
                    found[way, q].append(percentile(latencies, q))
        of = f"{load} % of {capacities[kind]:.4g} requests/s, {sizes.load_words} arrivals"
        for q in (50, 99):
            name = f"p{q}_ratio_serve_batch_{load}_{kind}"
            figures.append(ratio(name, found["engine", q], found["serve_batch", q], f"engine by @serve.batch's policy; {of}"))
        for (way, q), values in found.items():
            figures.append(median(f"p{q}_{way}_{load}_{kind}", values, "s", of))
    return figures


def poisson(words: Sequence[Word], count: int, rate: float, *, seed: int) -> tuple[list[Word], list[float]]:
    """`count` words drawn from the set, and their arrivals in seconds at `rate` a second on average."""
    draw = random.Random(seed)  # noqa: S311
    gaps = (draw.expovariate(rate) for _ in range(count))
    return draw.choices(words, k=count), list(itertools.accumulate(gaps))


def percentile(values: Sequence[float], q: int) -> float:
    """The smallest value that q percent are not above."""
    return sorted(values)[-(-len(values) * q // 100) - 1]
