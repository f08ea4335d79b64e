"""The one-step perturbation: how far one update of the blocks moves the logits, against loops and blocks.

The sharpest test of a residual rule at small size. A step on a tied matrix is the sum of its T visits' gradients and is read
back T times, so to first order the logits move with M kappa_R (b/a)^2: for a = (2M)^p, b = (8M)^-p and aligned visits as
R^(2 - 4p) in the loops R, and as R^(1 - 4p) where every visit has weights of its own (arXiv 2607.13491).

Updates, of the blocks' matrices only:
- `sgd`: W - lr G, the update that the paper is about.
- `sign`: W - lr lr_hidden sign(G), Adam's first step with epsilon 0; lr_hidden is what the rule gives the blocks' matrices. Its
  size does not shrink with G, so one factor b/a and one sum over visits are left, and every visit's step goes downhill: the
  logits move as R^(1 - 2p), tied or not **[?]**.

Shapes: B batch, N input positions, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from loopcore.errors import InputError, Undecided
from loopcore.instruments.depth import Along, DepthTable, Source, sweep_depths
from loopcore.instruments.fits import row
from loopcore.instruments.visits import Loss, cross_entropy, matrix_names
from loopcore.model import LoopedTransformer
from loopcore.scaling import RULES
from loopcore.specs.train import TrainSpec

__all__ = ["LEARNING_RATES", "PerturbationResult", "Update", "measure_step", "predicted_exponent", "sweep_perturbation"]

Update = Literal["sgd", "sign"]
LEARNING_RATES: dict[Update, float] = {"sgd": 1e-2, "sign": 1e-4}
"""Small enough for the change of the logits to be of first order."""


@dataclass(frozen=True)
class PerturbationResult:
    """Root mean square change of the logits after one update, at every depth and seed."""

    table: DepthTable
    update: Update
    lr: float
    tied: bool
    p: float | None
    """Exponent of the rule's a = (2M)^p, b = (8M)^-p; None for a rule without."""

    def predicted(self, along: Along) -> float | None:
        """Exponent that the theory predicts; None for a rule without p."""
        return None if self.p is None else predicted_exponent(self.p, along=along, tied=self.tied, update=self.update)

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes, value, low, high."""
        rows = self.table.rows()
        fitted: set[Along] = {along for along, _ in self.table.lines()}
        for along in sorted(fitted):
            if (predicted := self.predicted(along)) is not None:
                rows.append(row("perturbation", {"of": "predicted_exponent", "along": along, **self.table.axes}, predicted))
        return rows

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {
            "update": self.update,
            "lr": self.lr,
            "tied": self.tied,
            "p": self.p,
            "predicted": {along: self.predicted(along) for along in ("loops", "blocks")},
            **self.table.to_json(),
        }


def predicted_exponent(p: float, *, along: Along = "loops", tied: bool = True, update: Update = "sgd") -> float:
    """Exponent of the one-step change in loops or in blocks, for a = (2M)^p, b = (8M)^-p.

    `sgd` moves the logits with M kappa_R (b/a)^2, M = L R: kappa_R is R for tied visits that align and 1 for weights of their
    own, so loops give 2 - 4p tied and 1 - 4p untied; blocks are always weights of their own. `sign` moves them with M b/a:
    1 - 2p.
    """
    if update == "sign":
        return 1.0 - 2 * p
    return (2.0 if tied and along == "loops" else 1.0) - 4 * p


def measure_step(
    model: LoopedTransformer, tokens_BN: Tensor, loss: Loss, *, loops: int, update: Update = "sgd", lr: float | None = None
) -> float:
    """Root mean square over positions and classes of the logits' change on `tokens_BN` after one update on `loss`.

    Computed on weights put in the model's place: the model itself is left as it was. `lr` defaults to `LEARNING_RATES`.
    Not finite where the update diverged. Raises Undecided where the update is exactly zero.
    """
    rate = LEARNING_RATES[update] if lr is None else lr
    if not rate > 0.0:
        raise InputError(f"a learning rate above 0 was expected, got {rate:g}")
    names = sorted({name for visited in matrix_names(model, loops) for name in visited.values()})
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        logits_BNV = torch.func.functional_call(model, before, (tokens_BN, loops))
        found = torch.autograd.grad(loss(logits_BNV), list(before.values()))
    if not any(bool(gradient.any()) for gradient in found):
        raise Undecided(
            "the update of the blocks is exactly zero: a readout that starts at zero lets no gradient through. Set "
            "model.readout_init to normal, or measure after training has moved it"
        )
    if update == "sign":
        rate *= model.scale.lr_hidden
    with torch.no_grad():
        after = {
            name: weight - rate * (gradient.sign() if update == "sign" else gradient)
            for (name, weight), gradient in zip(before.items(), found, strict=True)
        }
        moved_BNV = torch.func.functional_call(model, after, (tokens_BN, loops)) - logits_BNV.detach()
    return float(moved_BNV.double().square().mean().sqrt())


def sweep_perturbation(
    spec: TrainSpec,
    task: Source,
    *,
    blocks: Sequence[int] = (1,),
    loops: Sequence[int] = (1, 2, 4, 8, 16),
    seeds: Sequence[int] = (0, 1, 2),
    update: Update = "sgd",
    lr: float | None = None,
    device: torch.device | str = "cpu",
    confidence: float = 0.95,
) -> PerturbationResult:
    """The one-step change of models of `spec` at initialisation, over blocks x loops and seeds, with its exponent in each.

    The scaling rule is computed for the loops measured. `spec.model.readout_init` must be normal: a readout of zero lets no
    gradient through, and raises Undecided.
    """

    def measure(at: TrainSpec, model: LoopedTransformer, tokens_BN: Tensor, targets_BN: Tensor) -> float:
        return measure_step(model, tokens_BN, cross_entropy(targets_BN), loops=at.contract.most_loops, update=update, lr=lr)

    values = sweep_depths(spec, task, measure, blocks=blocks, loops=loops, seeds=seeds, device=device)
    scaling, tied = spec.scaling, spec.model.tied
    axes = {"rule": scaling.rule, "update": update, "tied": tied}
    p = (RULES[scaling.rule].p if scaling.exponent is None else scaling.exponent) or None
    if p is not None:
        axes["p"] = p
    table = DepthTable("perturbation", "logit_change", tuple(seeds), values, axes, confidence)
    return PerturbationResult(table, update, LEARNING_RATES[update] if lr is None else lr, tied, p)
