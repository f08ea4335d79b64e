"""The physical block of a looped transformer: attention and feed-forward, pre-norm or post-norm.

Shapes in names: B batch, P positions (with BOS), D width, H heads, K head width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopcore.scaling import Multipliers, hidden_init_std
from loopcore.specs.model import ModelSpec

__all__ = ["Block", "Matrix", "Sight", "attend", "rotate", "rotation"]

ADDRESSED = 4.0  # initial score of position i - 2^t in the heads that scan_offset steers [?]
ROPE_BASE = 10_000.0


class Sight(NamedTuple):
    """What a position may look at in one loop, shared by the loop's blocks."""

    causal: bool
    rotation_PK: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the rotary angles, [P, K/2] each."""
    addressed_PP: Tensor | None = None
    """1 where column j is position i - 2^t, else 0."""


def rotation(positions: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [P, K/2] of the rotary embedding's angles (arXiv 2104.09864), fp32."""
    frequency_K = ROPE_BASE ** (-torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angle_PK = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequency_K
    return angle_PK.cos(), angle_PK.sin()


def rotate(x_BHPK: Tensor, rotation_PK: tuple[Tensor, Tensor]) -> Tensor:
    """Turns channel k with channel k + K/2 by the position's angle: scores then depend on differences of positions only."""
    cos_PK, sin_PK = rotation_PK
    first, second = x_BHPK.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos_PK - second * sin_PK, second * cos_PK + first * sin_PK], dim=-1)
    return turned.to(x_BHPK.dtype)


def attend(q_BHPK: Tensor, k_BHPK: Tensor, v_BHPK: Tensor, *, causal: bool, bias_HPP: Tensor | None = None) -> Tensor:
    """softmax(q k' / sqrt(K) + bias) v, [B, H, P, K]; `bias_HPP` is added to the scores.

    The fused kernel, but for three cases written out as two matrix products and a softmax: a bias, since it is learned and fused
    kernels give masks no gradient; bf16 on the CPU up to length 512, where the fused kernel with its backward takes 1.2 to
    7 times as long (in fp32 it is the faster one there, 1.2 to 2.7 times, at lengths from 3 to 512); and on the CPU many rows of
    a few positions, see `_attend_short`.
    """
    P, K = q_BHPK.shape[-2:]
    on_cpu = q_BHPK.device.type == "cpu"
    slow_fused = on_cpu and q_BHPK.dtype is torch.bfloat16 and P <= 512
    if on_cpu and bias_HPP is None and not slow_fused and q_BHPK.shape[:-2].numel() >= 256 and 6 <= P <= 32 and K <= 32:
        return _attend_short(q_BHPK, k_BHPK, v_BHPK, causal=causal)
    if bias_HPP is None and not slow_fused:
        return F.scaled_dot_product_attention(q_BHPK, k_BHPK, v_BHPK, is_causal=causal)
    scores_BHPP = (q_BHPK * K**-0.5) @ k_BHPK.transpose(-2, -1)
    if bias_HPP is not None:
        scores_BHPP = scores_BHPP + bias_HPP
    if causal:
        hidden_PP = torch.ones(P, P, dtype=torch.bool, device=q_BHPK.device).triu(1)
        scores_BHPP = scores_BHPP.masked_fill(hidden_PP, -math.inf)
    return scores_BHPP.softmax(dim=-1).to(v_BHPK.dtype) @ v_BHPK


def _attend_short(q_BHPK: Tensor, k_BHPK: Tensor, v_BHPK: Tensor, *, causal: bool) -> Tensor:
    """`attend` with keys and values padded to W, a multiple of 16 positions, which the softmax never weighs.

    torch's softmax over 13 numbers takes nine times as long as over 16, and its fused attention goes through rows and heads one
    by one: with 256 of them and more this takes .5 to .9 of its time, forward and backward.
    """
    P, K = q_BHPK.shape[-2:]
    added = -P % 16
    hidden_PW = torch.zeros(P, P + added, device=q_BHPK.device)
    hidden_PW[:, P:] = -math.inf
    if causal:
        hidden_PW += torch.full_like(hidden_PW, -math.inf).triu(1)
    k, v = (F.pad(x_BHPK, (0, 0, 0, added)).flatten(0, -3) for x_BHPK in (k_BHPK, v_BHPK))
    scores = torch.baddbmm(hidden_PW, q_BHPK.flatten(0, -3), k.transpose(1, 2), alpha=K**-0.5)
    return torch.bmm(scores.softmax(dim=-1), v).unflatten(0, q_BHPK.shape[:-2])


class Matrix(nn.Linear):
    """A linear map without bias, left empty: the model fills it from its own generator, never from the global one."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(fan_in, fan_out, bias=False)

    def reset_parameters(self) -> None:
        pass


class Block(nn.Module):
    """Attention, then feed-forward, each a residual branch: pre-norm h + c f(LN(h)) or post-norm LN(a h + c f(h)).

    c is the rule's `branch`, a its `skip` (on the skip, not on the branch: arXiv 2607.13491).
    """

    def __init__(self, spec: ModelSpec, scale: Multipliers) -> None:
        super().__init__()
        assert spec.norm == "post" or scale.skip == 1.0, "a skip multiplier belongs to post-norm"
        D, wide = spec.width, spec.feedforward * spec.width
        self.heads, self.pre, self.branch, self.skip = spec.heads, spec.norm == "pre", scale.branch, scale.skip
        self.query, self.key, self.value, self.out = (Matrix(D, D) for _ in range(4))
        self.up, self.down = Matrix(D, wide), Matrix(wide, D)
        self.norm_attention, self.norm_feedforward = nn.LayerNorm(D), nn.LayerNorm(D)
        if spec.positions == "scan_offset":
            self.address_H = nn.Parameter(torch.empty(spec.heads))

    @torch.no_grad()
    def fill(self, generator: torch.Generator, gain: float) -> None:
        """Normal entries with variance 1/fan_in; `gain` (beta) on V, O and the feed-forward matrices, not on Q and K."""
        for matrix in (self.query, self.key, self.value, self.out, self.up, self.down):
            std = hidden_init_std(matrix.in_features) * (1.0 if matrix in (self.query, self.key) else gain)
            matrix.weight.normal_(0.0, std, generator=generator)
        if hasattr(self, "address_H"):
            # Half the heads start by looking at i - 2^t, so the log-depth scan is at hand; the others start free.
            self.address_H.zero_()[: (self.heads + 1) // 2] = ADDRESSED

    def attention(self, x_BPD: Tensor, sight: Sight) -> Tensor:
        B, P, D = x_BPD.shape
        q, k, v = (
            matrix(x_BPD).view(B, P, self.heads, D // self.heads).transpose(1, 2) for matrix in (self.query, self.key, self.value)
        )
        if sight.rotation_PK is not None:
            q, k = rotate(q, sight.rotation_PK), rotate(k, sight.rotation_PK)
        bias_HPP = None if sight.addressed_PP is None else self.address_H[:, None, None] * sight.addressed_PP
        mixed_BHPK = attend(q, k, v, causal=sight.causal, bias_HPP=bias_HPP)
        return self.out(mixed_BHPK.transpose(1, 2).reshape(B, P, D))

    def feedforward(self, x_BPD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BPD)))

    def forward(self, h_BPD: Tensor, sight: Sight) -> Tensor:
        if self.pre:
            h_BPD = h_BPD + self.branch * self.attention(self.norm_attention(h_BPD), sight)
            return h_BPD + self.branch * self.feedforward(self.norm_feedforward(h_BPD))
        h_BPD = self.norm_attention(self.skip * h_BPD + self.branch * self.attention(h_BPD, sight))
        return self.norm_feedforward(self.skip * h_BPD + self.branch * self.feedforward(h_BPD))
