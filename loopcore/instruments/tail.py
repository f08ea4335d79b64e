"""Tail metrics: what standard instruments see at the end of the loop (arXiv 2607.20594).

The paper's point is that they saturate at the fixed point and so do not tell which model will extrapolate. Their names are
from second-hand notes [N]; the definitions are ours [?]. With h_t the state after t loops, N positions without BOS:

- `one_step_skip` at t: the share of a word's positions whose prediction is the same when loop t, the last, is skipped:
  argmax readout(h_t) = argmax readout(h_(t-1)).
- `adjacent_cosine` at t: the mean over positions of cos(h_(t-1), h_t).
- `asymptotic_alignment` at t: the mean over positions of cos(h_t, h_far), h_far the state after `far` loops (twice as many
  as are measured, if not said otherwise), which stands for the limit.
- `jacobian_alignment` at t: <J, K> / (|J| |K|), Frobenius, where J = d h_(t-1) / d h_(t-2) and K = d h_t / d h_(t-1) are the
  Jacobians of the last two loops over the whole state of a word, BOS too. Exact, from one backward pass a coordinate, where the
  state has at most `exact_up_to` of them; else Hutchinson's estimate, <J, K> = E[(J' u) . (K' u)] for random signs u, with the
  same u in all three products, so that equal Jacobians give exactly 1.

Each is 1 at a fixed point of a tied model. Values are means over words; intervals are Student's over words. The loops are
streamed: a state before, a state now and, for the asymptotic alignment, the far one are all that is held.

Shapes: B words, N positions, P = N + BOS, D width, T loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loopcore.errors import InputError, Undecided
from loopcore.instruments.accuracy import Words
from loopcore.instruments.drawn import Drawn, drawn_words, with_loops
from loopcore.instruments.fits import mean_interval, row
from loopcore.looped import Steppable
from loopcore.tasks.task import generator

__all__ = ["TAIL_METRICS", "TailResult", "jacobian_alignment", "measure_tail"]

TAIL_METRICS = ("one_step_skip", "adjacent_cosine", "asymptotic_alignment", "jacobian_alignment")


@dataclass(frozen=True)
class TailResult:
    """What `measure_tail` found. `undecided` has a reason for each metric that has no value."""

    loops: int
    far: int
    words: int
    jacobian_words: int
    exact_jacobian: bool
    """Whether the Jacobian alignment is exact; otherwise Hutchinson's estimate."""
    curves: dict[str, tuple[float, ...]]
    """Per metric its mean over words after loop 1 .. T; the Jacobian alignment has a value at T only and none here."""
    end: dict[str, tuple[float, float | None, float | None]]
    """Per metric (value, low, high) at the end of the loop, T."""
    undecided: dict[str, str]

    def value(self, metric: str) -> float:
        """The metric at the end of the loop. Raises Undecided with the reason where there is none."""
        if metric in self.undecided:
            raise Undecided(self.undecided[metric])
        return self.end[metric][0]

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes, value, low, high. Undecided figures have no row."""
        rows = []
        for metric, curve_T in self.curves.items():
            rows += [row("tail", {"of": metric, "loop": t}, value) for t, value in enumerate(curve_T[:-1], 1)]
        rows += [row("tail", {"of": metric, "loop": self.loops}, *figure) for metric, figure in self.end.items()]
        return rows

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {
            "loops": self.loops,
            "far": self.far,
            "words": self.words,
            "jacobian_words": self.jacobian_words,
            "exact_jacobian": self.exact_jacobian,
            "curves": {metric: list(curve) for metric, curve in self.curves.items()},
            "end": {metric: list(figure) for metric, figure in self.end.items()},
            "undecided": dict(self.undecided),
        }


def measure_tail(
    model: Steppable,
    task: Words,
    *,
    words: int,
    length: int,
    loops: int,
    far: int | None = None,
    jacobian_words: int = 16,
    probes: int = 16,
    exact_up_to: int = 256,
    confidence: float = 0.95,
    seed: int = 0,
    split: str = "held_out",
    batch: int = 256,
) -> TailResult:
    """The four tail metrics after 1 .. `loops` loops; the Jacobian alignment at the end only, on `jacobian_words` words.

    Never raises for a model that diverges, has too few loops of weights or no Jacobian: the reasons are in `undecided`.
    Raises InputError for counts below 1 and `far` < `loops`.
    """
    far = 2 * loops if far is None else far
    if min(loops, jacobian_words, probes) < 1 or far < loops:
        raise InputError(
            f"expected loops, jacobian_words and probes of at least 1 and far of at least loops, got {loops}, {jacobian_words}, "
            f"{probes} and {far}"
        )
    undecided: dict[str, str] = {}
    if (why := with_loops(model, loops)) is not None:
        undecided = dict.fromkeys(TAIL_METRICS, why)
        return TailResult(loops, far, words, 0, False, {}, {}, undecided)
    if (why := with_loops(model, far)) is not None:
        undecided["asymptotic_alignment"] = why
    values: dict[str, list[Tensor]] = {metric: [] for metric in TAIL_METRICS[:3] if metric not in undecided}
    aligned: list[Tensor] = []
    exact = False
    for drawn in drawn_words(model, task, words=words, length=length, seed=seed, split=split, batch=batch):
        for metric, value_TB in _curves(model, drawn, loops, far, "asymptotic_alignment" in values).items():
            values[metric].append(value_TB)
        if drawn.first < jacobian_words and "jacobian_alignment" not in undecided:
            part_BN = drawn.tokens_BN[: jacobian_words - drawn.first]
            try:
                stream = generator("tail", seed, drawn.batch)
                value_B, exact = jacobian_alignment(model, part_BN, loops, probes=probes, exact_up_to=exact_up_to, stream=stream)
                aligned.append(value_B)
            except Undecided as reason:
                undecided["jacobian_alignment"] = str(reason)
    curves: dict[str, tuple[float, ...]] = {}
    end: dict[str, tuple[float, float | None, float | None]] = {}
    for metric, parts in values.items():
        value_TB = torch.cat(parts, dim=1)
        if not bool(value_TB.isfinite().all()):
            undecided[metric] = "the states are not finite; measure fewer loops, or a model that has not diverged"
            continue
        curves[metric] = tuple(value_TB.mean(1).tolist())
        end[metric] = mean_interval(value_TB[-1].tolist(), confidence)
    if "jacobian_alignment" not in undecided:
        end["jacobian_alignment"] = mean_interval(torch.cat(aligned).tolist(), confidence)
    found = sum(map(len, aligned)) if "jacobian_alignment" not in undecided else 0
    return TailResult(loops, far, words, found, exact, curves, end, undecided)


@torch.inference_mode()
def _curves(model: Steppable, drawn: Drawn, loops: int, far: int, asymptotic: bool) -> dict[str, Tensor]:
    """Per metric its value_TB, float64 on the CPU, for one batch."""
    N = drawn.targets_BN.shape[1]
    far_BND = None
    if asymptotic:
        h_BPD = None
        for h_BPD in model.iterate(drawn.tokens_BN, far):  # noqa: B007 - the last one is what is wanted
            pass
        assert h_BPD is not None
        far_BND = _without_bos(h_BPD, N)
    values: dict[str, list[Tensor]] = {"one_step_skip": [], "adjacent_cosine": []}
    if asymptotic:
        values["asymptotic_alignment"] = []
    before_BND = before_BN = None
    for t, h_BPD in enumerate(model.iterate(drawn.tokens_BN, loops)):
        h_BND, predicted_BN = _without_bos(h_BPD, N), model.readout(h_BPD).argmax(-1)
        if t:
            assert before_BND is not None
            assert before_BN is not None
            same_BN = (predicted_BN == before_BN).double()
            # A state that is not a number predicts class 0 over and over: it must not look like one that has settled.
            same_BN = same_BN.masked_fill(~h_BND.isfinite().all(-1), torch.nan)
            values["one_step_skip"].append(same_BN.mean(-1).cpu())
            values["adjacent_cosine"].append(_cosine(before_BND, h_BND).cpu())
            if far_BND is not None:
                values["asymptotic_alignment"].append(_cosine(h_BND, far_BND).cpu())
        before_BND, before_BN = h_BND, predicted_BN
    return {metric: torch.stack(value_TB) for metric, value_TB in values.items()}


def jacobian_alignment(
    model: Steppable,
    tokens_BN: Tensor,
    loops: int,
    *,
    probes: int = 16,
    exact_up_to: int = 256,
    stream: torch.Generator | None = None,
) -> tuple[Tensor, bool]:
    """(value_B, exact): the alignment of the Jacobians of loops `loops` - 1 and `loops`, word by word, float64 on the CPU.

    Exact where a word's state has at most `exact_up_to` numbers, else estimated from `probes` sign vectors. Raises Undecided
    for fewer than two loops, states that are not finite, and loops that have no derivative or a zero one.
    """
    if loops < 2:
        raise Undecided("the alignment of adjacent loops' Jacobians needs at least 2 loops, got 1")
    with torch.no_grad():
        e_BPD = model.embed(tokens_BN)
        h_BPD = model.start(e_BPD)
        for t in range(loops - 2):
            h_BPD = model.loop(h_BPD, e_BPD, t)
    steps = []
    for t in (loops - 2, loops - 1):
        with torch.enable_grad():
            from_BPD = h_BPD.detach().requires_grad_()
            to_BPD = model.loop(from_BPD, e_BPD.detach(), t)
        if not to_BPD.requires_grad:
            raise Undecided("the loop has no derivative with respect to its state")
        steps.append((from_BPD, to_BPD))
        h_BPD = to_BPD.detach()
    B, size = len(h_BPD), h_BPD[0].numel()
    exact = size <= exact_up_to
    dot_B, first_B, second_B = torch.zeros(3, B, dtype=torch.float64, device=h_BPD.device)
    for k in range(size if exact else probes):
        if exact:
            u_BPD = torch.eye(size, dtype=h_BPD.dtype, device=h_BPD.device)[k].view(1, *h_BPD.shape[1:]).expand(h_BPD.shape)
        else:
            signs = torch.randint(2, h_BPD.shape, generator=stream) * 2 - 1
            u_BPD = signs.to(h_BPD)
        a_BX, b_BX = (
            torch.autograd.grad(to_BPD, from_BPD, u_BPD, retain_graph=True)[0].double().reshape(B, size)
            for from_BPD, to_BPD in steps
        )
        dot_B += (a_BX * b_BX).sum(-1)
        first_B += a_BX.square().sum(-1)
        second_B += b_BX.square().sum(-1)
    value_B = dot_B / (first_B * second_B).sqrt()
    if not bool(value_B.isfinite().all()):
        raise Undecided("a loop's Jacobian is zero or not finite: it has no direction to compare")
    return value_B.cpu(), exact


def _without_bos(h_BPD: Tensor, positions: int) -> Tensor:
    return h_BPD[:, h_BPD.shape[1] - positions :]


def _cosine(a_BND: Tensor, b_BND: Tensor) -> Tensor:
    """Mean over positions, [B]."""
    return F.cosine_similarity(a_BND.double(), b_BND.double(), dim=-1).mean(-1)
