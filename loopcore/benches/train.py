"""`loop bench train`: one optimizer step of a looped block in every way the code offers, against one written down at first.

Per width d, all of it in turns within each round, on equal work (batch, length, loops, loss, clipping, AdamW, the drawing of the
batch):

- `ratio_eager_dD`: the faster plain block, fp32 or bf16 autocast, against the fastest of this code's ways;
- `ratio_eager_fp32_dD`: the same at equal precision, fp32 on both sides;
- `ratio_training_dD`: the faster plain block against `Training` at precision auto, as a job of kind train runs it;
- `ceiling_share_dD`: of the fastest way, its products of weights in FLOPs a second as a share of what one matrix product of the
  same precision reaches in the same rounds;
- `loss_difference`: what bf16 with the weights cast once does to the final held-out loss, seed by seed against fp32;
  `loss_seed_sd` is the spread of fp32 over the same seeds, that it has to be held against.

This code's ways: `Training` under fp32 and bf16 autocast; a `Population` of one, which puts its weights together once a step (in
bf16: casts them once) instead of once a visit, eager and with the loop compiled.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from loopcore.benches.figures import BenchAsk, Figure, Tell, cores, heads_of, machine, median, ratio
from loopcore.benches.plain import PlainRun
from loopcore.device import autocast_dtype, resolve_device, seconds_of
from loopcore.population import Population
from loopcore.specs.train import TrainSpec
from loopcore.statistics import mean_interval
from loopcore.tasks import load_task
from loopcore.training import Training

__all__ = ["NAME", "SIZES", "TrainSizes", "run"]

NAME = "train"
UNTIMED = 2  # steps of each way before the clock is started; the first one compiles
CEILING_FLOPS = 2e9  # of the products that the ceiling is timed over, at least
PLAIN = {"plain_fp32": "plain eager block, fp32", "plain_bf16": "plain eager block, bf16 autocast"}
WAYS = {
    "training_fp32": "Training, fp32",
    "training_bf16": "Training, bf16 autocast",
    "packed_fp32": "population of one, fp32",
    "packed_bf16": "population of one, bf16 weights cast once a step",
    "compiled_fp32": "population of one, compiled, fp32",
    "compiled_bf16": "population of one, compiled, bf16 weights cast once a step",
}


@dataclass(frozen=True)
class TrainSizes:
    """What is timed."""

    widths: tuple[int, ...]
    length: int
    loops: int
    batch: int
    largest_batch_width: int
    """Above this width the batch is a quarter."""
    rounds: int
    compile: bool
    loss_seeds: int
    loss_steps: int


SIZES = {
    "smoke": TrainSizes((16,), 8, 2, 2, 256, rounds=2, compile=False, loss_seeds=2, loss_steps=2),
    "full": TrainSizes((64, 256, 768), 128, 8, 16, 256, rounds=7, compile=True, loss_seeds=3, loss_steps=200),
}


def run(ask: BenchAsk, tell: Tell = lambda _: None) -> tuple[dict[str, object], list[Figure]]:
    """The machine and the figures. Raises DeviceUnavailable."""
    device, threads, sizes = resolve_device(ask.device), ask.threads or cores(), SIZES[ask.scale]
    torch.set_num_threads(threads)
    where = machine(device, threads)
    figures: list[Figure] = []
    for width in ask.widths or sizes.widths:
        figures += _at_width(width, ask.rounds or sizes.rounds, sizes, device, tell)
    return where, figures + _losses(sizes, device, tell)


def spec_at(width: int, sizes: TrainSizes, precision: str = "auto") -> TrainSpec:
    """The run that is timed: parity, one pre-norm block, the input added before every visit, no BOS and no positions."""
    return TrainSpec.model_validate(
        {
            "task": {"kind": "parity"},
            "model": {
                "width": width,
                "heads": heads_of(width, 32 if width <= 256 else 64),
                "bos": False,
                "injection": "add",
                "readout_init": "normal",
            },
            "scaling": {"base_width": width},
            "contract": {"lengths": [sizes.length], "loops": {"kind": "fixed", "count": sizes.loops}},
            "batch": sizes.batch if width <= sizes.largest_batch_width else max(1, sizes.batch // 4),
            "steps": 1_000_000,
            "precision": precision,
        }
    )


def _ways(width: int, sizes: TrainSizes, device: torch.device) -> dict[str, Callable[[], object]]:
    """A step of every way, by its name."""
    ways: dict[str, Callable[[], object]] = {}
    for precision in ("fp32", "bf16"):
        spec = spec_at(width, sizes, precision)
        name = str(device)
        ways[f"plain_{precision}"] = PlainRun(spec, load_task(spec.task), device, bf16=precision == "bf16").step
        ways[f"training_{precision}"] = Training(spec, device=name).step
        ways[f"packed_{precision}"] = Population([spec], device=name).step
        if sizes.compile:
            ways[f"compiled_{precision}"] = Population([spec], device=name, compile=True).step
    return ways


def _at_width(width: int, rounds: int, sizes: TrainSizes, device: torch.device, tell: Tell) -> list[Figure]:
    torch.compiler.reset()  # otherwise a second width is compiled for any width, which is slower
    ways = _ways(width, sizes, device)
    for name, step in list(ways.items()):
        tell(f"d {width}: {'compiling' if name.startswith('compiled') else 'starting'} {name}")
        try:
            for _ in range(UNTIMED):
                step()
        except Exception as problem:  # a compiler that is missing or fails has no common class of errors
            if not name.startswith("compiled"):
                raise
            tell(f"d {width}: {name} is left out, compiling failed: {str(problem).splitlines()[0]:.200}")
            del ways[name]
    spec = spec_at(width, sizes)
    positions = spec.batch * sizes.length
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    ceilings: dict[str, list[float]] = {"fp32": [], "bf16": []}
    order = list(ways)
    for number in range(rounds):
        tell(f"d {width}: round {number + 1} of {rounds}")
        for name in order[number % len(order) :] + order[: number % len(order)]:
            seconds[name].append(seconds_of(ways[name], device))
        for precision, found in ceilings.items():
            found.append(_ceiling(positions, width, torch.float32 if precision == "fp32" else torch.bfloat16, device))
    return figures_of(width, seconds, ceilings, spec, sizes, device)


def figures_of(
    width: int,
    seconds: dict[str, list[float]],
    ceilings: dict[str, list[float]],
    spec: TrainSpec,
    sizes: TrainSizes,
    device: torch.device,
) -> list[Figure]:
    """Those of a width, from the seconds a step of each way and the FLOPs a second of one product by precision, by round."""
    ours = fastest({name: found for name, found in seconds.items() if name in WAYS})
    ours_fp32 = fastest({name: found for name, found in seconds.items() if name in WAYS and name.endswith("fp32")})
    plain = fastest({name: found for name, found in seconds.items() if name in PLAIN})
    auto = "training_fp32" if autocast_dtype("auto", device) is None else "training_bf16"
    positions = spec.batch * sizes.length
    # Six products of every weight a position: forward, and backward to the input and to the weight, two FLOPs a product.
    flops = 6.0 * positions * (12 * width**2 * sizes.loops + width * 2)
    precision = ours.rpartition("_")[2]
    share = [flops / s / ceiling for s, ceiling in zip(seconds[ours], ceilings[precision], strict=True)]
    of = f"batch {spec.batch}, n {sizes.length}, T {sizes.loops}"
    figures = [
        ratio(f"ratio_eager_d{width}", seconds[plain], seconds[ours], f"{PLAIN[plain]}, by {WAYS[ours]}; {of}"),
        ratio(
            f"ratio_eager_fp32_d{width}",
            seconds["plain_fp32"],
            seconds[ours_fp32],
            f"{PLAIN['plain_fp32']}, by {WAYS[ours_fp32]}; {of}",
        ),
        ratio(f"ratio_training_d{width}", seconds[plain], seconds[auto], f"{PLAIN[plain]}, by {WAYS[auto]}; {of}"),
        median(f"ceiling_share_d{width}", share, "share", f"one {precision} matrix product, by {WAYS[ours]}; weights only"),
    ]
    for name, found in seconds.items():
        rates = [positions / s for s in found]
        figures.append(median(f"tokens_per_second_{name}_d{width}", rates, "tokens/s", (PLAIN | WAYS)[name]))
    for kind, rates in ceilings.items():
        shape = f"{positions}x{width}x{4 * width}"
        figures.append(median(f"ceiling_{kind}_d{width}", [rate / 1e9 for rate in rates], "GFLOP/s", f"product {shape}"))
    return figures


def fastest(seconds: dict[str, list[float]]) -> str:
    """The way with the smallest median."""
    return min(seconds, key=lambda name: statistics.median(seconds[name]))


def _ceiling(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOPs a second of the block's widest product, rows x D times D x 4D."""
    a, b = torch.ones(rows, width, dtype=dtype, device=device), torch.ones(width, 4 * width, dtype=dtype, device=device)
    flops = 2.0 * rows * width * 4 * width
    times = max(3, round(CEILING_FLOPS / flops))
    out = a @ b

    def products() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    return times * flops / seconds_of(products, device)


def _losses(sizes: TrainSizes, device: torch.device, tell: Tell) -> list[Figure]:
    """Final held-out loss of bf16 with weights cast once against fp32, the same seeds on the same text."""
    found: dict[str, list[float]] = {}
    for precision in ("fp32", "bf16"):
        tell(f"losses: {sizes.loss_seeds} seeds in {precision}")
        specs = [_loss_spec(seed, sizes, precision) for seed in range(sizes.loss_seeds)]
        population = Population(specs, device=str(device))
        while not population.finished:
            population.step()
        found[precision] = [scores["loss"] for scores in population.evaluate().values()]
    mean, low, high = mean_interval([b - a for a, b in zip(found["fp32"], found["bf16"], strict=True)], 0.95)
    noise = statistics.stdev(found["fp32"])
    assert low is not None and high is not None  # noqa: PT018 - two seeds or more
    of = f"{sizes.loss_seeds} seeds, {sizes.loss_steps} steps of d 64, bytes of the standard library"
    return [
        Figure("loss_difference", mean, low, high, "nats", f"fp32, by bf16 weights cast once a step; 95 % interval; {of}"),
        Figure("loss_seed_sd", noise, noise, noise, "nats", f"standard deviation of fp32 over seeds; {of}"),
    ]


def _loss_spec(seed: int, sizes: TrainSizes, precision: str) -> TrainSpec:
    return TrainSpec.model_validate(
        {
            "task": {"kind": "text"},
            "model": {"positions": "rope", "bos": False, "injection": "none"},
            "contract": {"lengths": [64], "loops": {"kind": "fixed", "count": 4}},
            "optimizer": {"decay": "linear", "warmup": 20, "betas": [0.9, 0.95], "weight_decay": 0.0, "lr": 2**-6},
            "batch": sizes.batch,
            "steps": sizes.loss_steps,
            "evaluate_on": 32 * sizes.batch,
            "precision": precision,
            "seed": seed,
        }
    )
