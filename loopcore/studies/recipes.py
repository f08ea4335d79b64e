"""The cells that studies share: what trains at each scale, how it is probed, and what it costs.

`smoke` and `cpu` follow what was measured on two CPU cores (RECIPES, "Group words"); `gpu` the recipe of the public
reproduction: two physical blocks, batch 256, AdamW 3e-4, stages 4-8-16-32. A cell's name is made of what tells it apart, so
that the same work asked for by two studies is one cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from loopcore.errors import InputError
from loopcore.specs import (
    ContractSpec,
    LogLoops,
    ModelSpec,
    OptimizerSpec,
    PrefixSumTask,
    ProportionalLoops,
    ResourceSpec,
    TrainSpec,
    WordTask,
)
from loopcore.specs.task import group_order
from loopcore.studies.base import Ask, Cell, ProbeRequest, Scale

__all__ = [
    "CALIBRATION",
    "EASY_TO_HARD",
    "FAR",
    "INSIDE",
    "SCHEDULES",
    "SPEED",
    "budget",
    "chance",
    "easy_to_hard",
    "far_lengths",
    "free",
    "operator_first",
    "scanning",
    "streaming",
    "untied",
    "warm",
    "with_extra_loops",
    "word_length",
]

# Probes by name; what each asks for depends on the cell's length and the scale.
SPEED, FAR, INSIDE, SCHEDULES, EASY_TO_HARD, CALIBRATION = "speed", "far", "inside", "schedules", "easy_to_hard", "calibration"

WORDS = {"smoke": 256, "cpu": 512, "gpu": 1024}  # held-out words of a probe

# Longest trained length N by group order (up to, N at smoke, cpu, gpu). S5 at 6 and A5 at 8 are what RECIPES could train.
LENGTHS = ((24, 8, 12, 32), (60, 4, 8, 32), (5040, 4, 6, 16))
# Model width, batch, AdamW's weight decay and CPU seconds of a demand-1 run at N = T = reference, by group order. In the larger
# groups the decay decides how soon composing is found. Seed 0, demand 1, held-out token accuracy at length 4: A4 with .01 has
# .70 after 2500 steps, with .5 (and twice the batch) .98; A5 with .01 has .41 after 4250, with 1.0 it has .96 after 3500.
SIZES = ((6, 64, 16, 0.1, 50.0, 12), (24, 64, 32, 0.5, 150.0, 12), (60, 96, 32, 1.0, 130.0, 8), (5040, 128, 64, 1.0, 200.0, 6))
# What a stage and the cool-down begin at on a CPU, held-out token accuracy: beyond S3, and with more than a dozen loops, the
# accuracy swings between .85 and .97 while the rate is constant, and a cool-down steadies it from .93 on. A4 at demand 2, seed
# 0: at .98 and .97 on length 10, .93, after 9000 steps; at .95 solved to 12 in 8450. S3 at demand 1/2, seed 2: .20, after .98
# before; with the cool-down from .95 solved in 5350.
SWINGING = 0.95
# Most steps by group order; what learns needs about half of them.
STEPS = ((6, 6000, 6000, 20_000), (24, 4500, 9000, 20_000), (60, 1500, 9000, 30_000), (5040, 400, 9000, 40_000))

SHORT = 8  # longest N of the architecture studies on a CPU: what an untied model comes near to in a minute (RECIPES)
# Longest N on a CPU where a group beyond S3 has more loops than positions. A4 at demand 1/2, seed 0: solved to 8 in 7800 steps
# and to 12 not in 9000, neither at 1e-3 with decay .5 nor at half that rate with twice the decay.
UNHURRIED = 8
# On a GPU seeds train as populations, and two of them fill the GPU: sixteen models this small together [?]. Their probes go one
# by one, sixteen at a time.
PACK, PACK_GPUS, PROBE_GPUS = 8, 1 / 2, 1 / 16
MATCH_TOLERANCE = 0.05  # relative: a demand is met by a whole number of loops this near to it [?]
# The first loop solves two positions more than the others (BOS, and a first token that is its own answer), so that few loops read
# a slow frontier: S3 at demand 2 gave v = 1.7 in three seeds with 4 loops on 8 positions, and 1.86 to 2.3 with 6 on 12.
FEWEST_LOOPS = 6


def _by_order(table: tuple[tuple[Any, ...], ...], group: str) -> tuple[Any, ...]:
    order = group_order(group)
    return next(row[1:] for row in table if order <= row[0])


def _at(scale: Scale, row: tuple[Any, ...]) -> Any:
    return row[("smoke", "cpu", "gpu").index(scale)]


def word_length(ask: Ask, group: str, demand: float = 1.0) -> int:
    """N of the scale; longer where the demand would leave too few loops to see a slope."""
    length = _at(ask.scale, _by_order(LENGTHS, group))
    if ask.scale == "cpu" and demand < 1 and group_order(group) > 6:
        length = min(length, UNHURRIED)
    return max(length, math.ceil(FEWEST_LOOPS * demand))


def chance(group: str, length: int) -> float:
    """Token accuracy of a model that knows the first answer, which is its token, and guesses the others."""
    return (1 + (length - 1) / group_order(group)) / length


def far_lengths(length: int) -> tuple[int, ...]:
    """The trained length and 1.25, 1.5, 2 and 4 times it."""
    return (length, math.ceil(1.25 * length), math.ceil(1.5 * length), 2 * length, 4 * length)


def _stages(length: int) -> tuple[int, ...]:
    """Every second length up to the longest; from 16 on every doubling, as the [R] recipe has them (4-8-16-32).

    Small steps are the cheaper ones: S3 to 12, seed 0, took 4300 training steps (41 s) against 4750 (51 s) by 2-4-8-12.
    """
    if length < 16:
        return (*range(2, length, 2), length)
    first = 4 if length >= 32 else 2
    return (*(2**k for k in range(first.bit_length() - 1, length.bit_length()) if 2**k < length), length)


def _probe(ask: Ask, name: str, length: int, *, looped: bool = True) -> ProbeRequest:
    """`looped` is False for an untied model, which has weights for T loops and no more."""
    words = WORDS[ask.scale]
    content: dict[str, Any] = {"words": words, "calibration_words": 4 * words}
    match name:
        case "speed":
            content |= {"instruments": ["frontier", "tau", "halting"]}
        case "far":
            # To 3 T*, which is the farthest a claim looks; half the words, since the loops are many.
            content |= {"instruments": ["accuracy"], "lengths": list(far_lengths(length)), "words": words // 2}
        case "calibration":
            content |= {"instruments": ["frontier", "halting", "calibration"]}
        case "inside":
            content |= {"instruments": ["damage", "tail"] if looped else ["tail"]}
        case "schedules":
            content |= {"instruments": ["schedules"]}
        case "easy_to_hard":
            content |= {"instruments": ["accuracy"], "lengths": [length, hard_length(ask, length)], "words": 128}
    loops_factor = {"far": 3.5, "easy_to_hard": 1.25}.get(name, 1.5)
    content["loops_factor"] = loops_factor if looped else 1.0
    return ProbeRequest(name=name, content=content)


def _cell(
    ask: Ask,
    role: str,
    family: str,
    group: str,
    seed: int,
    *,
    probes: Iterable[str],
    demand: float = 1.0,
    length: int | None = None,
    start_from: Cell | None = None,
    model: dict[str, Any] | None = None,
    contract: dict[str, Any] | None = None,
    steps: int | None = None,
    axes: dict[str, Any] | None = None,
    cost: float = 1.0,
    variant: str = "",
) -> Cell:
    """A word-problem cell. `cost` multiplies what a free run of the same demand takes."""
    width, batch, decay, seconds, reference = _by_order(SIZES, group)
    length = length or word_length(ask, group, demand)
    on_gpu = ask.scale == "gpu"
    # Demand 2 is hard with one block, S3 stuck at .95 (RECIPES); the [R] recipe has two throughout.
    blocks = 2 if on_gpu or demand > 1.5 else 1
    shape = ModelSpec.model_validate({"width": 2 * width if on_gpu else width, "blocks": blocks} | (model or {}))
    demanded = ContractSpec.model_validate(
        {"lengths": _stages(length), "loops": ProportionalLoops(per_position=1.0 / demand)} | (contract or {})
    )
    loops = demanded.loops.loops(length)
    optimizer = OptimizerSpec(lr=3e-4, cooldown=1000) if on_gpu else OptimizerSpec(weight_decay=decay)
    if ask.scale == "cpu":
        beyond = group_order(group) > 6
        if beyond:
            demanded = demanded.model_copy(update={"promote_at": SWINGING})
        if beyond or loops > 12:
            optimizer = optimizer.model_copy(update={"cooldown_at": SWINGING})
    train = TrainSpec(
        model=shape,
        task=WordTask(group=group),
        contract=demanded,
        optimizer=optimizer,
        batch=256 if on_gpu else batch,
        steps=steps or _at(ask.scale, _by_order(STEPS, group)),
        seed=seed,
    )
    parts = (family, group, f"n{length}", f"T{loops}", f"L{shape.blocks}", variant, f"s{seed}")
    expected = seconds * cost * loops * shape.blocks * length / reference**2 if not on_gpu else None
    return Cell(
        name="/".join(part for part in parts if part),
        train=train,
        start_from=None if start_from is None else start_from.name,
        probes=tuple(_probe(ask, name, length, looped=shape.tied) for name in probes),
        axes={"family": family, "group": group, "length": length, "loops": loops, "demand": length / loops, "seed": seed}
        | {"blocks": shape.blocks, "scale": ask.scale}
        | (axes or {}),
        roles=(role,),
        resources=ResourceSpec(gpus=PACK_GPUS if on_gpu else 0.0),
        pack=PACK if on_gpu else 1,
        probe_resources=ResourceSpec(gpus=PROBE_GPUS) if on_gpu else None,
        expected_s=expected,
    )


def budget(ask: Ask, group: str, demand: float) -> tuple[int, int]:
    """(n, T) whose n / T is the demand. Raises InputError where no loop count meets it."""
    lowest = 1 / 64  # the most loops a position that a contract takes (ProportionalLoops)
    if not lowest <= demand <= 32:
        raise InputError(f"expected a demand from 1/64 to 32 positions a loop, got {demand:g}")
    length = word_length(ask, group, demand)
    loops = ProportionalLoops(per_position=1.0 / demand).loops(length)
    if abs(length / loops / demand - 1) > MATCH_TOLERANCE:
        near = f"{length / loops:g} with {loops} loops" + (f" or {length / (loops - 1):g} with {loops - 1}" if loops > 1 else "")
        raise InputError(f"no loop count meets a demand of {demand:g} at length {length} on {group}; the nearest are {near}")
    return length, loops


def free(ask: Ask, role: str, group: str, seed: int, demand: float = 1.0, probes: Iterable[str] = (SPEED,)) -> Cell:
    """Free training at a demand: nothing but the contract says how fast to be."""
    budget(ask, group, demand)
    return _cell(ask, role, "free", group, seed, demand=demand, probes=probes)


def with_extra_loops(ask: Ask, role: str, group: str, seed: int, probes: Iterable[str]) -> Cell:
    """Demand 1, trained with T drawn from [T, 1.5 T]: what removed overthinking in RECIPES."""
    return _cell(ask, role, "extra", group, seed, contract={"extra_loops": 1.5}, probes=probes, cost=1.3, variant="x1.5")


def untied(ask: Ask, role: str, group: str, seed: int, matched: str, probes: Iterable[str]) -> Cell:
    """A standard-depth model at demand 1, on the length of `tied` ones beside it.

    `matched`: `depth` has the looped model's width in every one of its T blocks; `parameters` its parameter count, by a width
    smaller by sqrt(T), to the next multiple of 8.
    """
    length = _short(ask, group)
    wide = _by_order(SIZES, group)[0] * (2 if ask.scale == "gpu" else 1)
    blocks = 2 if ask.scale == "gpu" else 1
    # Blocks of both: L of the looped model, L T of this one, of width^2 parameters each.
    width = wide if matched == "depth" else 8 * math.ceil(wide / math.sqrt(length) / 8)
    return _cell(
        ask,
        role,
        "untied",
        group,
        seed,
        length=length,
        model={"tied": False, "width": width, "blocks": blocks},
        axes={"matched": matched, "width": width},
        probes=probes,
        cost=2.5,
        variant=f"d{width}-{matched}",
    )


def _short(ask: Ask, group: str) -> int:
    return min(SHORT, word_length(ask, group)) if ask.scale == "cpu" else word_length(ask, group)


def scanning(
    ask: Ask, role: str, group: str, seed: int, *, tied: bool = True, scan: bool = False, log: bool = False, probes: Iterable[str]
) -> Cell:
    """A model on the length of the architecture studies: plain, or with the addressing of a log-depth scan, and on request with
    only ceil(log2 n) + 1 loops (one more than a scan needs)."""
    length = _short(ask, group)
    model: dict[str, Any] = {"tied": tied} | ({"positions": "scan_offset"} if scan else {})
    family = ("scan" if scan else "free") if tied else "untied-scan"
    return _cell(
        ask,
        role,
        family,
        group,
        seed,
        length=length,
        model=model,
        contract={"loops": LogLoops(extra=1)} if log else None,
        axes={"log": log} if scan else None,
        probes=probes,
        cost=1.0 if tied else 2.5,
        variant="log" if log else "",
    )


def operator_first(ask: Ask, role: str, group: str, seed: int, *, curriculum: bool, probes: Iterable[str]) -> Cell:
    """The wall, with the curriculum (all pairs at n = 2 until they are exact, then longer) or straight at the full length."""
    length = word_length(ask, group)
    stages = (2, *(n for n in (3, 4) if n < length), *(n for n in _stages(length) if n > 4 or n == length))
    steps = {"smoke": 400, "cpu": 16_000 if curriculum else 4000, "gpu": 40_000}[ask.scale]
    return _cell(
        ask,
        role,
        "operator-first" if curriculum else "direct",
        group,
        seed,
        contract={"lengths": tuple(dict.fromkeys(stages)), "operator_first": True} if curriculum else {"lengths": (length,)},
        # A short budget cannot tell slow from stuck, and smoke has no other.
        axes={"full": ask.scale != "smoke"},
        steps=steps,
        probes=probes,
        cost=1.0 if curriculum else 0.6,
    )


def warm(ask: Ask, role: str, parent: Cell, demand: float, probes: Iterable[str]) -> Cell:
    """The parent's weights under another demand: its model, its longest length from the first step."""
    group, seed, length = str(parent.axes["group"]), parent.seed, parent.train.contract.longest
    return _cell(
        ask,
        role,
        "warm",
        group,
        seed,
        demand=demand,
        length=length,
        start_from=parent,
        model={"blocks": parent.train.model.blocks},
        contract={"lengths": (length,)},
        axes={"parent_demand": parent.axes["demand"], "parent": parent.name},
        probes=probes,
        cost=0.3 if demand < 1 else 2.5,
        variant=f"from-T{parent.axes['loops']}",
    )


def streaming(ask: Ask, role: str, group: str, seed: int, probes: Iterable[str]) -> Cell:
    """Seriality imposed: input i is shown from loop i on, demand 1."""
    return _cell(ask, role, "streaming", group, seed, contract={"input_schedule": "streaming"}, probes=probes, cost=0.6)


def hard_length(ask: Ask, length: int) -> int:
    """Where the trained length is the easy one: 16 times it as published (32 to 512), 4 times on a CPU [?]."""
    return length * (16 if ask.scale == "gpu" else 4)


def easy_to_hard(ask: Ask, role: str) -> Iterator[Cell]:
    """Prefix sums at demand 1: the looped transformer, and the recall convnet of the easy-to-hard benchmark (2202.05826)."""
    gpu = ask.scale == "gpu"
    length = {"smoke": 8, "cpu": 16, "gpu": 32}[ask.scale]
    width = {"smoke": 32, "cpu": 64, "gpu": 400}[ask.scale]
    for architecture in ("transformer", "recall_conv"):
        conv = architecture == "recall_conv"
        if conv:
            model = ModelSpec(architecture="recall_conv", width=width)
        else:
            model = ModelSpec(width=128 if gpu else 64, blocks=2 if gpu else 1)
        for seed in ask.seed_range():
            yield Cell(
                name=f"prefix-sums/{architecture}/n{length}/s{seed}",
                train=TrainSpec(
                    model=model,
                    task=PrefixSumTask(),
                    contract=ContractSpec(lengths=(length,) if conv else _stages(length), loops=ProportionalLoops()),
                    optimizer=OptimizerSpec(lr=3e-4 if gpu and not conv else 1e-3),
                    batch=256 if gpu else 32,
                    steps={"smoke": 800, "cpu": 4000, "gpu": 20_000}[ask.scale],
                    seed=seed,
                ),
                probes=(_probe(ask, SPEED, length), _probe(ask, EASY_TO_HARD, length)),
                axes={"family": "easy-to-hard", "architecture": architecture, "length": length, "seed": seed}
                | {"hard": hard_length(ask, length), "scale": ask.scale},
                roles=(role,),
                resources=ResourceSpec(gpus=0.0 if not gpu else PROBE_GPUS if conv else PACK_GPUS),
                pack=PACK if gpu and not conv else 1,
                probe_resources=ResourceSpec(gpus=PROBE_GPUS) if gpu else None,
            )
