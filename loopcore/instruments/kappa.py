"""kappa_R: how far the visits of one block pull in the same direction (arXiv 2607.13491), measured.

A tied matrix gathers the gradients G_t of its R visits in one update, and the output reads that update back through the
sensitivities U_r of the same visits. Taken apart by a copy of the matrix for each visit,

    max-normalised  ||sum_r U_r|| ||sum_t G_t|| / (R max_r ||U_r|| max_t ||G_t||)
    norm-weighted   ||sum_r U_r|| ||sum_t G_t|| / (sqrt(sum_r ||U_r||^2) sqrt(sum_t ||G_t||^2))

both R when the visits align with equal norms and 1 when they are orthogonal with equal norms. The first is the paper's with the
constants C_U, C_G replaced by the largest measured norms **[?]**; it falls below 1 and reads low when norms differ between
visits (`output_ratio`, `gradient_ratio` say by how much). The second **[?]** does not: it is 1 for orthogonal visits of
any norms, and never below the first. Report both.

U_r is the Jacobian of the state that the readout reads (normalised, BOS dropped), its Frobenius norm estimated by random
projections of that state: E ||v' U||^2 = ||U||^2 for standard normal v. The same projections stand in numerator and
denominator, so their error is small: four give +-.05.

Stability asks for M kappa_R (b/a)^2 = O(1) over executed depth M, a on the skip, b on the initial weights. A branch multiplier c
stands where b/a does, in U and in G: (c b/a)^2 **[?]** makes the same bound of pre-norm rules.

Shapes: R visits of a block (= loops), B batch, N input positions, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from loopcore.errors import InputError, Undecided
from loopcore.instruments.depth import Depth, DepthTable, Source, sweep_depths
from loopcore.instruments.fits import finite, row
from loopcore.instruments.visits import Loss, Place, cross_entropy, run_visits, visit_copies, visit_gradients
from loopcore.model import LoopedTransformer
from loopcore.specs.train import TrainSpec

__all__ = ["FORMS", "Form", "Kappa", "KappaResult", "KappaSweep", "implied_exponent", "measure_kappa", "sweep_kappa"]

Form = Literal["max_normalised", "norm_weighted"]
FORMS: tuple[Form, ...] = ("max_normalised", "norm_weighted")
WHOLE = "all"  # the name of a block's matrices taken as one long vector


@dataclass(frozen=True)
class Kappa:
    """kappa_R of one matrix, or of a whole block: all its matrices as one vector."""

    block: int
    """Physical block, from 0."""
    matrix: str
    """Name in the block, `all` for the whole of it."""
    max_normalised: float
    norm_weighted: float
    output_alignment: float
    """||sum U_r|| / sqrt(sum ||U_r||^2): its part of the norm-weighted form, between 0 and sqrt(R)."""
    gradient_alignment: float
    """||sum G_t|| / sqrt(sum ||G_t||^2): the other part."""
    output_norms: tuple[float, ...]
    """||U_r|| a visit, root mean square over positions."""
    gradient_norms: tuple[float, ...]
    """||G_t|| a visit."""

    @property
    def output_ratio(self) -> float:
        """Largest over smallest ||U_r||; infinite where a visit has none."""
        return _ratio(self.output_norms)

    @property
    def gradient_ratio(self) -> float:
        """Largest over smallest ||G_t||; infinite where a visit has none."""
        return _ratio(self.gradient_norms)

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data; a ratio of None is infinite."""
        return asdict(self) | {"output_ratio": finite(self.output_ratio), "gradient_ratio": finite(self.gradient_ratio)}


@dataclass(frozen=True)
class KappaResult:
    """What `measure_kappa` found on one model and batch."""

    depth: Depth
    projections: int
    step_scale: float
    """(c b/a)^2 of the model's scaling rule."""
    kappas: tuple[Kappa, ...]
    """Per block: each of its matrices, then the whole."""

    @property
    def matrices(self) -> tuple[Kappa, ...]:
        return tuple(kappa for kappa in self.kappas if kappa.matrix != WHOLE)

    @property
    def blocks(self) -> tuple[Kappa, ...]:
        return tuple(kappa for kappa in self.kappas if kappa.matrix == WHOLE)

    def largest(self, form: Form) -> float:
        """The largest over matrices: the paper's max over j."""
        return max(getattr(kappa, form) for kappa in self.matrices)

    def bound(self, form: Form) -> float:
        """M kappa_R (c b/a)^2, which stability asks to be O(1)."""
        return self.depth.executed * self.largest(form) * self.step_scale

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes, value, low, high. An infinite ratio has no row."""
        loops = self.depth.loops
        rows = [
            row("kappa", {"of": figure, "block": kappa.block, "matrix": kappa.matrix, "loops": loops}, value)
            for kappa in self.kappas
            for figure in (*FORMS, "output_alignment", "gradient_alignment", "output_ratio", "gradient_ratio")
            if math.isfinite(value := getattr(kappa, figure))
        ]
        for form in FORMS:
            rows.append(row("kappa", {"of": f"{form}_largest", "loops": loops}, self.largest(form)))
            rows.append(row("kappa", {"of": f"{form}_bound", "loops": loops}, self.bound(form)))
        return rows

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {
            "blocks": self.depth.blocks,
            "loops": self.depth.loops,
            "executed_depth": self.depth.executed,
            "projections": self.projections,
            "step_scale": self.step_scale,
            "largest": {form: self.largest(form) for form in FORMS},
            "bound": {form: self.bound(form) for form in FORMS},
            "kappas": [kappa.to_json() for kappa in self.kappas],
        }


@dataclass(frozen=True)
class KappaSweep:
    """kappa_R (largest over matrices) and the bound it implies, at every depth and seed, in both forms."""

    kappa: dict[Form, DepthTable]
    bound: dict[Form, DepthTable]
    results: dict[Depth, tuple[KappaResult, ...]]
    """One a seed."""

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: means and exponents over seeds."""
        return [row for tables in (self.kappa, self.bound) for table in tables.values() for row in table.rows()]

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {
            "kappa": {form: table.to_json() for form, table in self.kappa.items()},
            "bound": {form: table.to_json() for form, table in self.bound.items()},
            "results": [result.to_json() for by_seed in self.results.values() for result in by_seed],
        }


def measure_kappa(
    model: LoopedTransformer, tokens_BN: Tensor, loss: Loss, *, loops: int, projections: int = 4, seed: int = 0
) -> KappaResult:
    """kappa_R of every block and matrix of `model` at R = `loops` visits, at initialisation or at any step of training.

    One forward pass, and one backward pass for the loss and for each of `projections` projections. An untied model, whose
    visits are of different weights, can be measured beside a tied one as its control. Raises InputError for loops or
    projections < 1, LengthError for more loops than an untied model has, Undecided where a matrix has no gradient at all or
    values that are not finite.
    """
    if projections < 1:
        raise InputError(f"expected at least 1 projection of the output, got {projections}")
    copies = visit_copies(model, loops)
    with torch.enable_grad():
        h_BPD = run_visits(model, tokens_BN, copies)
        z_BND = model.normalised(h_BPD)
        gradients = _Visits(copies)
        gradients.add(loss(model.readout(h_BPD)))
        outputs = _Visits(copies)
        generator = torch.Generator().manual_seed(seed)
        scale = math.prod(z_BND.shape[:2]) ** -0.5
        for left in range(projections, 0, -1):
            v_BND = scale * torch.randn(z_BND.shape, generator=generator, dtype=z_BND.dtype).to(z_BND.device)
            outputs.add((z_BND * v_BND).sum(), keep=left > 1)
    kappas = [
        _kappa(block, matrix, outputs.of(members), gradients.of(members), projections)
        for block in range(model.spec.blocks)
        for matrix, members in _groups(block, copies[0])
    ]
    return KappaResult(
        depth=Depth(model.spec.blocks, loops),
        projections=projections,
        step_scale=(model.scale.branch * model.scale.init_gain / model.scale.skip) ** 2,
        kappas=tuple(kappas),
    )


def sweep_kappa(
    spec: TrainSpec,
    task: Source,
    *,
    blocks: Sequence[int] = (1,),
    loops: Sequence[int] = (1, 2, 4, 8),
    seeds: Sequence[int] = (0, 1, 2),
    projections: int = 4,
    device: torch.device | str = "cpu",
    confidence: float = 0.95,
) -> KappaSweep:
    """kappa_R of models of `spec` at initialisation, over blocks x loops and seeds, with its growth exponent in each.

    The scaling rule is computed for the loops measured. `spec.model.readout_init` must be normal: a readout of zero lets no
    gradient through, and raises Undecided.
    """

    def measure(at: TrainSpec, model: LoopedTransformer, tokens_BN: Tensor, targets_BN: Tensor) -> KappaResult:
        T = at.contract.most_loops
        return measure_kappa(model, tokens_BN, cross_entropy(targets_BN), loops=T, projections=projections, seed=at.seed)

    results = sweep_depths(spec, task, measure, blocks=blocks, loops=loops, seeds=seeds, device=device)

    def table(form: Form, figure: Literal["largest", "bound"]) -> DepthTable:
        values = {depth: tuple(getattr(result, figure)(form) for result in by_seed) for depth, by_seed in results.items()}
        return DepthTable("kappa", f"{form}_{figure}", tuple(seeds), values, {"rule": spec.scaling.rule}, confidence)

    return KappaSweep({form: table(form, "largest") for form in FORMS}, {form: table(form, "bound") for form in FORMS}, results)


def implied_exponent(growth: float) -> float:
    """The p that keeps M kappa_R (b/a)^2 = O(1) for a = (2M)^p, b = (8M)^-p when kappa_R grows as R^growth: (1 + g) / 4."""
    return (1 + growth) / 4


class _Norms:
    """Squared norms of one matrix's visit gradients and of their sum, added up over the scalars that were differentiated."""

    def __init__(self, visits_R: Tensor, total: float) -> None:
        self.visits_R, self.total = visits_R, total

    def __add__(self, other: _Norms) -> _Norms:
        return _Norms(self.visits_R + other.visits_R, self.total + other.total)


class _Visits:
    """Per place, the norms of the gradients of one or several scalars in every visit's copy. Gradients are not kept."""

    def __init__(self, copies: list[dict[Place, Tensor]]) -> None:
        self.copies = copies
        self.norms: dict[Place, _Norms] = {
            place: _Norms(torch.zeros(len(copies), dtype=torch.float64), 0.0) for place in copies[0]
        }

    def add(self, scalar: Tensor, *, keep: bool = True) -> None:
        """Differentiates one scalar; `keep` keeps the graph for another."""
        found = visit_gradients(scalar, self.copies, keep=keep)
        for place in self.norms:
            visits = [gradients[place] for gradients in found]
            total = float(_square(sum(visits[1:], start=visits[0])))
            self.norms[place] += _Norms(torch.stack([_square(gradient) for gradient in visits]).cpu(), total)

    def of(self, members: list[Place]) -> _Norms:
        """The norms of these matrices taken as one vector."""
        total = self.norms[members[0]]
        for place in members[1:]:
            total = total + self.norms[place]
        return total


def _groups(block: int, matrices: dict[Place, Tensor]) -> list[tuple[str, list[Place]]]:
    """What kappa is taken of in a block: each matrix, and all of them as one."""
    members = [place for place in matrices if place.block == block]
    return [(place.matrix.removesuffix(".weight"), [place]) for place in members] + [(WHOLE, members)]


def _kappa(block: int, matrix: str, outputs: _Norms, gradients: _Norms, projections: int) -> Kappa:
    R = len(outputs.visits_R)
    for what, norms in (("gradient", gradients), ("output sensitivity", outputs)):
        largest = float(norms.visits_R.max())
        if largest == 0.0 or not math.isfinite(largest):
            problem = "exactly zero" if largest == 0.0 else "not finite"
            raise Undecided(
                f"the {what} of {matrix} in block {block} is {problem} at its {R} visits, so kappa_R has no value. "
                + (
                    "A readout that starts at zero lets no gradient through: set model.readout_init to normal, or measure "
                    "after training has moved it"
                    if what == "gradient" and largest == 0.0
                    else "Measure a model whose states and logits are finite and depend on its weights"
                )
            )
    output_alignment = math.sqrt(outputs.total / float(outputs.visits_R.sum()))
    gradient_alignment = math.sqrt(gradients.total / float(gradients.visits_R.sum()))
    largest = math.sqrt(float(outputs.visits_R.max()) * float(gradients.visits_R.max()))
    return Kappa(
        block=block,
        matrix=matrix,
        max_normalised=math.sqrt(outputs.total * gradients.total) / (R * largest),
        norm_weighted=output_alignment * gradient_alignment,
        output_alignment=output_alignment,
        gradient_alignment=gradient_alignment,
        output_norms=tuple((outputs.visits_R / projections).sqrt().tolist()),
        gradient_norms=tuple(gradients.visits_R.sqrt().tolist()),
    )


def _square(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()


def _ratio(norms: tuple[float, ...]) -> float:
    return max(norms) / min(norms) if min(norms) > 0 else math.inf
