"""What the instruments of scaling find on a run: models of its spec as they are initialised, and the trained one.

Each gives rows for the registry and a figure. Raises Undecided for a model that has no blocks to take apart, or a readout that
starts at zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from loopcore.errors import Undecided
from loopcore.instruments import cross_entropy, measure_kappa, sweep_displacement, sweep_growth, sweep_perturbation
from loopcore.instruments.depth import reshaped, start_of
from loopcore.instruments.perturbation import Update
from loopcore.model import LoopedTransformer
from loopcore.specs import TrainSpec
from loopcore.tasks import Task

__all__ = ["Scaled", "growth", "kappa", "perturbation"]

STEPPED = (1, 2, 4, 8, 16)  # loops of one-step changes
UPDATES: tuple[Update, ...] = ("sgd", "sign")
VISITS = 32  # of growth
GROWN = (1, 2, 4, 8, 16, 32)  # loops that a rule's multipliers are computed for


class Scaled(NamedTuple):
    """What one of them found."""

    rows: list[dict[str, Any]]
    figure: dict[str, Any]


def perturbation(model: Any, task: Task, train: TrainSpec) -> Scaled:
    """One-step changes of the logits over loops, by update and by whether weights are tied, at the run's seed."""
    device = next(_transformer(model).parameters()).device
    rows: list[dict[str, Any]] = []
    figure: dict[str, Any] = {}
    for tied in (True, False):
        for update in UPDATES:
            spec = reshaped(train, tied=tied)
            found = sweep_perturbation(
                spec, task, blocks=(train.model.blocks,), loops=STEPPED, seeds=(train.seed,), update=update, device=device
            )
            rows += found.rows()
            fits, _ = found.table.fits()
            exponent = fits.get(("loops", train.model.blocks))
            figure[f"{update}_{'tied' if tied else 'untied'}"] = None if exponent is None else exponent.exponent
    return Scaled(rows, figure)


def kappa(model: Any, task: Task, train: TrainSpec) -> Scaled:
    """kappa_R at the most loops of the contract, on the first batch of the run: as initialised (`start`), as trained (`end`)."""
    trained, loops = _transformer(model), train.contract.most_loops
    fresh, tokens_BN, targets_BN = start_of(train, task, next(trained.parameters()).device)
    rows: list[dict[str, Any]] = []
    figure: dict[str, Any] = {}
    for at, one in (("start", fresh), ("end", trained)):
        found = measure_kappa(one, tokens_BN, cross_entropy(targets_BN), loops=loops, seed=train.seed)
        rows += [row | {"axes": {**row["axes"], "at": at}} for row in found.rows()]
        figure[at] = {form: found.largest(form) for form in ("max_normalised", "norm_weighted")}
    return Scaled(rows, figure)


def growth(model: Any, task: Task, train: TrainSpec) -> Scaled:
    """Growth of the stream over the visits of one model, and of where it ends over models of more and more loops."""
    device = next(_transformer(model).parameters()).device
    rows: list[dict[str, Any]] = []
    figure: dict[str, Any] = {}
    for tied in (True, False):
        spec, kind = reshaped(train, tied=tied), "tied" if tied else "untied"
        along = sweep_growth(spec, task, loops=VISITS, seeds=(train.seed,), device=device)
        over = sweep_displacement(spec, task, blocks=(train.model.blocks,), loops=GROWN, seeds=(train.seed,), device=device)
        rows += [*along.rows(), *over.rows()]
        exponent = over.fits()[0].get(("loops", train.model.blocks))
        figure[kind] = {"visits": along.fit.exponent, "loops": None if exponent is None else exponent.exponent}
    return Scaled(rows, figure)


def _transformer(model: Any) -> LoopedTransformer:
    if not isinstance(model, LoopedTransformer):
        raise Undecided(f"scaling rules are those of a looped transformer, and this model is a {type(model).__name__}")
    return model
