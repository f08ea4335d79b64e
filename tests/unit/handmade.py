"""Looped models made by hand, whose answers are known.

Shapes: B words, N positions, P = N + 1 with BOS, V elements of Z_V.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["HandMade", "Jumping", "Restless"]


class HandMade:
    """What every model has: `iterate` from the parts."""

    def embed(self, tokens_BN: Tensor) -> Tensor:
        raise NotImplementedError

    def start(self, e_BPD: Tensor) -> Tensor:
        raise NotImplementedError

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        raise NotImplementedError

    def readout(self, h_BPD: Tensor) -> Tensor:
        raise NotImplementedError

    def iterate(self, tokens_BN: Tensor, loops: int, *, reveal_per_loop: float | None = None) -> Iterator[Tensor]:
        assert reveal_per_loop is None
        e_BPD = self.embed(tokens_BN)
        h_BPD = self.start(e_BPD)
        yield h_BPD
        for t in range(loops):
            h_BPD = self.loop(h_BPD, e_BPD, t)
            yield h_BPD


class Jumping(HandMade):
    """Running sums in Z_V, `jump` positions a loop: position i is known one loop after position i - jump, or after BOS.

    A state is (known, value). Known states are locked, or with `heals` computed anew in every loop. An unknown position is read
    as class V, which is never right, so no guess is lucky.
    """

    def __init__(self, order: int, jump: int, *, heals: bool = False) -> None:
        self.order, self.jump, self.heals = order, jump, heals
        self.alive = 0  # loops taken

    def embed(self, tokens_BN: Tensor) -> Tensor:
        return torch.nn.functional.pad(tokens_BN, (1, 0)).float().unsqueeze(-1)

    def start(self, e_BPD: Tensor) -> Tensor:
        h_BPD = torch.zeros(*e_BPD.shape[:2], 2)
        h_BPD[:, 0, 0] = 1.0  # BOS is known, and the identity
        return h_BPD

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        self.alive += 1
        at_P = torch.arange(h_BPD.shape[1])
        source_P = (at_P - self.jump).clamp_min(0)
        sums_BP = e_BPD.squeeze(-1).cumsum(-1)
        known_BP = h_BPD[:, source_P, 0]
        value_BP = (h_BPD[:, source_P, 1] + sums_BP - sums_BP[:, source_P]) % self.order
        new_BPD = torch.stack([known_BP, value_BP], -1)
        kept_BP = h_BPD[..., 0] > 0.5
        if self.heals:
            kept_BP = (at_P == 0).expand_as(kept_BP)
        return torch.where(kept_BP.unsqueeze(-1), h_BPD, new_BPD)

    def readout(self, h_BPD: Tensor) -> Tensor:
        known_BN, value_BN = h_BPD[:, 1:].unbind(-1)
        shown_BN = torch.where(known_BN > 0.5, value_BN.round(), torch.full_like(value_BN, self.order))
        return -(shown_BN.unsqueeze(-1) - torch.arange(self.order + 1)).square()


class Restless(Jumping):
    """A model that never converges: right in every second loop only."""

    def start(self, e_BPD: Tensor) -> Tensor:
        h_BPD = super().start(e_BPD)
        return torch.cat([h_BPD, torch.zeros_like(h_BPD[..., :1])], -1)

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        return torch.cat([super().loop(h_BPD[..., :2], e_BPD, t), 1 - h_BPD[..., 2:]], -1)

    def readout(self, h_BPD: Tensor) -> Tensor:
        off_BP = h_BPD[..., 2]
        h_BPD = h_BPD[..., :2].clone()
        h_BPD[..., 1] = (h_BPD[..., 1] + off_BP) % self.order
        return super().readout(h_BPD)
