"""The runs of the DeepLoop study: bytes of text, one shape, and what tells them apart: rule, loops, blocks, rate, warm-up.

Costs and rates follow what was measured on two CPU cores (RECIPES, "DeepLoop and kappa_R"). Rates are a factor of 1.8 apart: a
wider grid misranks the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loopcore.specs import ContractSpec, FixedLoops, ModelSpec, OptimizerSpec, ResourceSpec, ScalingSpec, TextTask, TrainSpec
from loopcore.specs.model import Rule
from loopcore.studies.base import Ask, Cell, ProbeRequest, Scale

__all__ = ["EXPONENTS", "NAME", "RULES", "cells"]

NAME = "deeploop"
RULES: tuple[Rule, ...] = ("standard", "depth_mup", "loop_mup", "deepnorm", "deeploop")
POST_NORM: tuple[Rule, ...] = ("deepnorm", "deeploop")
COMPARED: tuple[Rule, ...] = ("standard", "deeploop")  # whose losses the paper compares
EXPONENTS = (0.25, 0.35, 0.5, 0.6)  # p of a = (2M)^p, b = (8M)^-p

LOOPS: dict[Scale, tuple[int, ...]] = {"smoke": (1, 3, 5), "cpu": (1, 3, 5, 7), "gpu": (1, 3, 5, 7)}
STEPS: dict[Scale, tuple[int, ...]] = {"smoke": (30,), "cpu": (100, 300), "gpu": (500, 2000)}
RATES: dict[Scale, tuple[float, ...]] = {
    "smoke": (0.0056,),
    "cpu": (0.0056, 0.01, 0.018),
    "gpu": (0.001, 0.0018, 0.0032),
}
"""The first is the one that kappa_R is followed at: there every rule trains."""
BLOCKS = 2  # physical blocks of the runs that show kappa_R block by block, at LOOPS[1] loops

# The exponent sweep: at the most loops, at a rate where some exponents train and others do not.
SWEEP_LOOPS = 7
SWEEP_RATE: dict[Scale, float] = {"smoke": 0.03, "cpu": 0.03, "gpu": 0.005}
WARMUPS: dict[Scale, tuple[int, ...]] = {"smoke": (20,), "cpu": (20, 100), "gpu": (20, 200)}
AT_RATE: dict[Scale, int] = {"smoke": 20, "cpu": 100, "gpu": 500}  # steps at the full rate, after the warm-up

WARMUP = 20
WIDTH = {"smoke": 64, "cpu": 64, "gpu": 256}
CONTEXT = {"smoke": 64, "cpu": 64, "gpu": 256}
BATCH = {"smoke": 16, "cpu": 16, "gpu": 64}
HEAD_WIDTH = 16
SECONDS_A_VISIT = 0.0095  # of one training step at width 64, context 64, batch 16, on one thread


def cells(ask: Ask) -> Iterator[Cell]:
    """What the cheap and sharp findings need stands first."""
    yield from _sweep(ask)
    yield from _over_loops(ask)
    if ask.scale != "smoke":
        for rule in RULES:
            for seed in _seeds(ask):
                yield _run(ask, "blocks", rule, seed, loops=LOOPS[ask.scale][1], blocks=BLOCKS, probe=_kappa())


def _seeds(ask: Ask) -> range:
    return ask.seed_range(smoke=2, cpu=3, gpu=8)


def _sweep(ask: Ask) -> Iterator[Cell]:
    for warmup in WARMUPS[ask.scale]:
        first = warmup == WARMUPS[ask.scale][0]
        probe = ProbeRequest(
            name="one-step" if first else "plateau",
            content={"instruments": ["perturbation", "plateau"] if first else ["plateau"], "words": 256, "loops_factor": 1.0},
        )
        for p in EXPONENTS:
            for seed in ask.seed_range(smoke=3, cpu=6, gpu=16):
                yield _run(
                    ask,
                    "sweep",
                    "deeploop",
                    seed,
                    loops=SWEEP_LOOPS,
                    rate=SWEEP_RATE[ask.scale],
                    steps=warmup + AT_RATE[ask.scale],
                    warmup=warmup,
                    p=p,
                    probe=probe,
                )


def _over_loops(ask: Ask) -> Iterator[Cell]:
    counts, rates = LOOPS[ask.scale], RATES[ask.scale]
    for steps in STEPS[ask.scale]:
        longest = steps == STEPS[ask.scale][-1]
        for rule in RULES:
            for rate in rates if longest and rule in COMPARED else rates[:1]:
                for loops in counts:
                    # The stream as initialised does not know of the training: one set of runs is enough to measure it on.
                    probe = _kappa(growth=loops == counts[-1] and steps == STEPS[ask.scale][0]) if rate == rates[0] else None
                    for seed in _seeds(ask):
                        yield _run(ask, "loops", rule, seed, loops=loops, rate=rate, steps=steps, probe=probe)


def _kappa(*, growth: bool = False) -> ProbeRequest:
    content = {"instruments": ["kappa", "growth"] if growth else ["kappa"], "words": 16, "loops_factor": 1.0}
    return ProbeRequest(name="kappa-growth" if growth else "kappa", content=content)


def _run(
    ask: Ask,
    family: str,
    rule: Rule,
    seed: int,
    *,
    loops: int,
    blocks: int = 1,
    rate: float | None = None,
    steps: int | None = None,
    warmup: int = WARMUP,
    p: float | None = None,
    probe: ProbeRequest | None = None,
) -> Cell:
    scale = ask.scale
    rate = RATES[scale][0] if rate is None else rate
    steps = STEPS[scale][-1] if steps is None else steps
    what = rule if p is None else f"p{p:g}"
    axes: dict[str, Any] = {
        "family": family,
        "rule": rule,
        "length": CONTEXT[scale],
        "loops": loops,
        "blocks": blocks,
        "rate": rate,
        "steps": steps,
        "warmup": warmup,
        "seed": seed,
    }
    return Cell(
        name=f"deeploop/{family}/{what}/L{blocks}/T{loops}/lr{rate:g}/w{warmup}/n{steps}/s{seed}",
        train=TrainSpec(
            model=ModelSpec(
                width=WIDTH[scale],
                heads=WIDTH[scale] // HEAD_WIDTH,
                blocks=blocks,
                norm="post" if rule in POST_NORM else "pre",
                positions="rope",
                bos=False,
                injection="none",
                readout_init="normal",
            ),
            task=TextTask(),
            contract=ContractSpec(lengths=(CONTEXT[scale],), loops=FixedLoops(count=loops)),
            scaling=ScalingSpec(rule=rule, exponent=p, base_width=WIDTH[scale]),
            optimizer=OptimizerSpec(
                lr=rate,
                betas=(0.9, 0.95),
                weight_decay=0.0,
                warmup=warmup,
                # The sweep asks whether a rate is borne, so it stays at it.
                decay="none" if family == "sweep" else "linear",
            ),
            batch=BATCH[scale],
            steps=steps,
            seed=seed,
            evaluate_every=steps,
            checkpoint_every=steps,
        ),
        probes=() if probe is None else (probe,),
        axes=axes if p is None else axes | {"p": p},
        roles=(NAME,),
        resources=ResourceSpec(cpus=1.0, gpus=1 / 16 if scale == "gpu" else 0.0),
        expected_s=None if scale == "gpu" else steps * SECONDS_A_VISIT * blocks * loops,
    )
