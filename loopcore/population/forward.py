"""The looped transformer with a member axis: many models of one shape in one pass, each row with weights of its own.

It computes what `loopcore.model` and `loopcore.block` do, with the linear parts put together once a pass and not once a loop:
multipliers go into the matrices behind them, a pre-norm's gain and bias into the matrix after it, Q, K and V are one matrix, and
the embedded input goes through the injection once. Rows leave the pass after their own number of loops.

Shapes in names: R rows (members in this pass), B batch, P positions with BOS, N without, X = B P, D width, E any width,
H heads, K head width, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from loopcore.block import Sight, attend, rotate
from loopcore.model import LoopedTransformer
from loopcore.population.layout import Layout
from loopcore.scaling import Multipliers

__all__ = ["Forward"]


class BlockWeights(NamedTuple):
    """One block of every row. Matrices stand for h @ W, in the type that is computed in."""

    qkv_RDE: Tensor
    qkv_bias_R1E: Tensor | None
    out_RDD: Tensor
    up_RDE: Tensor
    up_bias_R1E: Tensor | None
    down_RED: Tensor
    norms_R1D: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """Gain and bias of both norms, of a post-norm block."""
    skip_R11: Tensor | None
    address_RH: Tensor | None

    def first(self, rows: int) -> BlockWeights:
        return BlockWeights(*(_first(part, rows) for part in self))


class LoopWeights(NamedTuple):
    """What one loop applies to every row."""

    carry_RDD: Tensor | None
    """The state's part of a linear injection."""
    blocks: tuple[BlockWeights, ...]

    def first(self, rows: int) -> LoopWeights:
        return LoopWeights(_first(self.carry_RDD, rows), tuple(block.first(rows) for block in self.blocks))


class Forward:
    """Passes through the members' models; `model` is one of them, `multipliers` are theirs by member.

    `dtype` is what blocks and readout compute in under autocast, None for fp32. With `compile` one loop is compiled, once for
    each shape of its input.

    A CUDA graph would capture `losses` and its gradient for one set of rows: shapes and addresses are fixed as long as
    the rows, their length and loops are, and nothing in it waits for the device. That is not done here.
    """

    def __init__(
        self,
        model: LoopedTransformer,
        layout: Layout,
        multipliers: Sequence[Multipliers],
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        compile: bool = False,
    ) -> None:
        self.model, self.layout, self.dtype = model, layout, dtype
        self.scale_M11: dict[str, Tensor | None] = {}
        for name in ("branch", "skip", "injection", "readout"):
            values = torch.tensor([getattr(scale, name) for scale in multipliers], device=device)
            self.scale_M11[name] = None if bool((values == 1).all()) else values[:, None, None]
        self.one_loop: Callable[..., Tensor] = torch.compile(_one_loop) if compile else _one_loop

    def losses(
        self, rows: list[int], weights_RC: Tensor, tokens_RBN: Tensor, targets_RBN: Tensor, loops: list[int], reveal: float | None
    ) -> Tensor:
        """Mean cross-entropy of each row, [R]. Rows come with falling `loops`."""
        logits_RBNV = self.logits(rows, weights_RC, tokens_RBN, loops, reveal)
        return F.cross_entropy(logits_RBNV.flatten(0, 2), targets_RBN.flatten(), reduction="none").view(len(rows), -1).mean(1)

    def logits(self, rows: list[int], weights_RC: Tensor, tokens_RBN: Tensor, loops: list[int], reveal: float | None) -> Tensor:
        """Logits [R, B, N, V] in fp32 after each row's own `loops`, which fall from row to row."""
        assert loops == sorted(loops, reverse=True), "rows have to come with falling loops"
        self.model.admit(loops[0])
        spec = self.model.spec
        scale = {name: None if scale_M11 is None else scale_M11[rows] for name, scale_M11 in self.scale_M11.items()}
        parameters = self.layout.stacked(weights_RC)
        R, B, N = tokens_RBN.shape
        e_RXD = self.embed(parameters, tokens_RBN)
        h_RXD = self.revealed(e_RXD, B, 0, reveal)
        weights, entering_RXD = self.weights(parameters, scale, 0), self.entering(parameters, scale, e_RXD, 0)
        sight = self.model.sight(N + spec.bos, tokens_RBN.device, 0)
        done: list[Tensor] = []
        for t in range(loops[0]):
            staying = sum(loop > t for loop in loops)
            if staying < len(h_RXD):
                h_RXD, left_RXD = h_RXD.split([staying, len(h_RXD) - staying])
                done.append(left_RXD)
                weights = weights.first(staying)
                entering_RXD = _first(entering_RXD, staying)
            if t and not spec.tied:
                part = {name: _first(value, staying) for name, value in parameters.items()}
                part_scale = {name: _first(value, staying) for name, value in scale.items()}
                weights = self.weights(part, part_scale, t)
                entering_RXD = self.entering(part, part_scale, e_RXD[:staying], t)
            if t and spec.positions == "scan_offset":
                sight = self.model.sight(N + spec.bos, tokens_RBN.device, t)
            shown_RXD = None if entering_RXD is None else self.revealed(entering_RXD, B, t, reveal)
            h_RXD = self.one_loop(h_RXD, shown_RXD, weights, sight, B, spec.heads)
        h_RXD = torch.cat([h_RXD, *reversed(done)]) if done else h_RXD
        return self.readout(parameters, scale, h_RXD.view(R, B, N + spec.bos, -1))

    def embed(self, parameters: dict[str, Tensor], tokens_RBN: Tensor) -> Tensor:
        """Embedded input e_RXD, BOS first, learned positions in it."""
        model, spec = self.model, self.model.spec
        table_RVD = parameters["embedding_VD"]
        tokens_RBP = F.pad(tokens_RBN, (1, 0), value=model.vocabulary) if spec.bos else tokens_RBN
        R, _, P = tokens_RBP.shape
        first_of_row_R11 = torch.arange(R, device=tokens_RBN.device)[:, None, None] * table_RVD.shape[1]
        e_RBPD = F.embedding(tokens_RBP + first_of_row_R11, table_RVD.flatten(0, 1))
        if spec.positions == "learned":
            e_RBPD = e_RBPD + parameters["position_PD"][:, None, :P]
        return e_RBPD.flatten(1, 2)

    def revealed(self, e_RXD: Tensor, batch: int, t: int, reveal: float | None) -> Tensor:
        if reveal is None:
            return e_RXD
        R, X, D = e_RXD.shape
        return self.model.revealed(e_RXD.view(R * batch, X // batch, D), t, reveal).view(R, X, D)

    def entering(self, parameters: dict[str, Tensor], scale: dict[str, Tensor | None], e_RXD: Tensor, t: int) -> Tensor | None:
        """What the injection of loop t adds for the embedded input: it is linear, so zeros of hidden inputs stay zeros."""
        match self.model.spec.injection:
            case "none":
                return None
            case "add":
                return _times(scale["injection"], e_RXD)
        D = e_RXD.shape[-1]
        return torch.bmm(e_RXD, _times(scale["injection"], self.injection(parameters, t)[:, :, D:]).transpose(1, 2))

    def injection(self, parameters: dict[str, Tensor], t: int) -> Tensor:
        return parameters[f"injections.{0 if self.model.spec.tied else t}.weight"]

    def weights(self, parameters: dict[str, Tensor], scale: dict[str, Tensor | None], t: int) -> LoopWeights:
        """The weights of loop t, put together."""
        spec = self.model.spec
        first = 0 if spec.tied else t * spec.blocks
        carry_RDD = None
        if spec.injection == "linear":
            # h + c (W [h; e] - h): the state's part is c W_h + (1 - c) I.
            carry_RDD = self.injection(parameters, t)[:, :, : spec.width].transpose(1, 2)
            if (c_R11 := scale["injection"]) is not None:
                carry_RDD = c_R11 * carry_RDD + (1 - c_R11) * torch.eye(spec.width, device=carry_RDD.device)
        blocks = range(first, first + spec.blocks)
        return LoopWeights(carry_RDD, tuple(self.block(parameters, scale, f"blocks.{number}.") for number in blocks))

    def block(self, parameters: dict[str, Tensor], scale: dict[str, Tensor | None], name: str) -> BlockWeights:
        def matrix(part: str) -> Tensor:
            return parameters[f"{name}{part}.weight"]

        qkv_RED, up_RED = torch.cat([matrix("query"), matrix("key"), matrix("value")], dim=1), matrix("up")
        gain, bias, gain_after, bias_after = (
            parameters[f"{name}norm_{part}.{kind}"][:, None]
            for part in ("attention", "feedforward")
            for kind in ("weight", "bias")
        )
        pre = self.model.spec.norm == "pre"
        return BlockWeights(
            qkv_RDE=self.ready(qkv_RED * gain if pre else qkv_RED),
            qkv_bias_R1E=self.cast(torch.bmm(bias, qkv_RED.transpose(1, 2))) if pre else None,
            out_RDD=self.ready(_times(scale["branch"], matrix("out"))),
            up_RDE=self.ready(up_RED * gain_after if pre else up_RED),
            up_bias_R1E=self.cast(torch.bmm(bias_after, up_RED.transpose(1, 2))) if pre else None,
            down_RED=self.ready(_times(scale["branch"], matrix("down"))),
            norms_R1D=None if pre else (gain, bias, gain_after, bias_after),
            skip_R11=scale["skip"],
            address_RH=parameters.get(f"{name}address_H"),
        )

    def readout(self, parameters: dict[str, Tensor], scale: dict[str, Tensor | None], h_RBPD: Tensor) -> Tensor:
        """As `LoopedTransformer.readout`."""
        spec = self.model.spec
        h_RBND = h_RBPD[:, :, 1:] if spec.bos else h_RBPD
        if spec.norm == "pre":
            h_RBND = F.layer_norm(h_RBND, h_RBND.shape[-1:])
        weight_RDV = self.ready(_times(scale["readout"], parameters["readout_matrix.weight"]))
        logits_RYV = torch.bmm(self.cast(h_RBND.flatten(1, 2)), weight_RDV)
        return logits_RYV.view(*h_RBND.shape[:3], -1).float()

    def cast(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype)

    def ready(self, matrix_RED: Tensor) -> Tensor:
        """A linear map's weight as it is multiplied with."""
        return self.cast(matrix_RED).transpose(1, 2)


def _one_loop(h_RXD: Tensor, entering_RXD: Tensor | None, weights: LoopWeights, sight: Sight, batch: int, heads: int) -> Tensor:
    """One loop: the input enters, every block is visited."""
    if weights.carry_RDD is not None:
        assert entering_RXD is not None
        h_RXD = torch.baddbmm(entering_RXD, h_RXD, weights.carry_RDD)
    elif entering_RXD is not None:
        h_RXD = h_RXD + entering_RXD
    for block in weights.blocks:
        h_RXD = (_visit_pre if block.norms_R1D is None else _visit_post)(h_RXD, block, sight, batch, heads)
    return h_RXD


def _visit_pre(h_RXD: Tensor, block: BlockWeights, sight: Sight, batch: int, heads: int) -> Tensor:
    D, dtype = h_RXD.shape[-1:], block.qkv_RDE.dtype
    assert block.qkv_bias_R1E is not None
    assert block.up_bias_R1E is not None
    qkv_RXE = torch.baddbmm(block.qkv_bias_R1E, F.layer_norm(h_RXD, D).to(dtype), block.qkv_RDE)
    h_RXD = _add_product(h_RXD, _attention(qkv_RXE, block, sight, batch, heads), block.out_RDD)
    up_RXE = torch.baddbmm(block.up_bias_R1E, F.layer_norm(h_RXD, D).to(dtype), block.up_RDE)
    return _add_product(h_RXD, F.gelu(up_RXE), block.down_RED)


def _visit_post(h_RXD: Tensor, block: BlockWeights, sight: Sight, batch: int, heads: int) -> Tensor:
    D, dtype = h_RXD.shape[-1:], block.qkv_RDE.dtype
    assert block.norms_R1D is not None
    gain, bias, gain_after, bias_after = block.norms_R1D
    mixed_RXD = _attention(torch.bmm(h_RXD.to(dtype), block.qkv_RDE), block, sight, batch, heads)
    h_RXD = _add_product(_times(block.skip_R11, h_RXD), mixed_RXD, block.out_RDD)
    h_RXD = torch.addcmul(bias, F.layer_norm(h_RXD, D), gain)
    up_RXE = F.gelu(torch.bmm(h_RXD.to(dtype), block.up_RDE))
    h_RXD = _add_product(_times(block.skip_R11, h_RXD), up_RXE, block.down_RED)
    return torch.addcmul(bias_after, F.layer_norm(h_RXD, D), gain_after)


def _attention(qkv_RXE: Tensor, block: BlockWeights, sight: Sight, batch: int, heads: int) -> Tensor:
    """Mixed values [R, X, D] before the output matrix."""
    R, X, E = qkv_RXE.shape
    P, K = X // batch, E // (3 * heads)
    # Unbound along an inner axis, so that the backward stacks the three gradients straight into what the product needs.
    q, k, v = (part.transpose(1, 2) for part in qkv_RXE.view(R * batch, P, 3, heads, K).unbind(2))
    if sight.rotation_PK is not None:
        q, k = rotate(q, sight.rotation_PK), rotate(k, sight.rotation_PK)
    bias = None
    if sight.addressed_PP is not None:
        assert block.address_RH is not None
        bias = (block.address_RH[..., None, None] * sight.addressed_PP)[:, None]  # [R, 1, H, P, P]
        q, k, v = (part.unflatten(0, (R, batch)) for part in (q, k, v))
    mixed = attend(q, k, v, causal=sight.causal, bias_HPP=bias)
    return mixed.transpose(-3, -2).reshape(R, X, heads * K)


def _add_product(h_RXD: Tensor, x_RXE: Tensor, weight_RED: Tensor) -> Tensor:
    """h + x W. The state is fp32, whatever the product is in."""
    if x_RXE.dtype == h_RXD.dtype:
        return torch.baddbmm(h_RXD, x_RXE, weight_RED)
    return h_RXD + torch.bmm(x_RXE, weight_RED)


def _first(part: Any, rows: int) -> Any:
    """The first rows of a tensor, or of each in a tuple; None stays None."""
    if isinstance(part, tuple):
        return tuple(_first(one, rows) for one in part)
    return part if part is None or len(part) == rows else part[:rows]


def _times(scale_R11: Tensor | None, x: Tensor) -> Tensor:
    return x if scale_R11 is None else scale_R11 * x
