"""A looped block as one writes it down at first, to time this code against: no more and no less work, nothing arranged for speed.

Shapes: B batch, P positions, D width, V classes.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopcore.specs.train import TrainSpec
from loopcore.tasks.task import Task

__all__ = ["PlainLoop", "PlainRun"]


class PlainLoop(nn.Module):
    """Embedding, one pre-norm block visited `loops` times with the input added before each visit, normalised readout."""

    def __init__(self, *, vocabulary: int, classes: int, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm_attention, self.norm_feedforward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.readout = nn.Linear(width, classes, bias=False)

    def forward(self, tokens_BP: Tensor, loops: int) -> Tensor:
        e_BPD = self.embedding(tokens_BP)
        h_BPD = e_BPD
        for _ in range(loops):
            h_BPD = h_BPD + e_BPD
            h_BPD = h_BPD + self.attention(self.norm_attention(h_BPD))
            h_BPD = h_BPD + self.down(F.gelu(self.up(self.norm_feedforward(h_BPD))))
        return self.readout(F.layer_norm(h_BPD, h_BPD.shape[-1:]))

    def attention(self, x_BPD: Tensor) -> Tensor:
        B, P, D = x_BPD.shape
        q, k, v = (part.view(B, P, self.heads, -1).transpose(1, 2) for part in self.qkv(x_BPD).chunk(3, dim=-1))
        mixed_BHPK = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed_BHPK.transpose(1, 2).reshape(B, P, D))


class PlainRun:
    """Its training, in fp32 or under autocast to bf16: the same batches, loss, clipping and AdamW as the run of `spec`."""

    def __init__(self, spec: TrainSpec, task: Task, device: torch.device, *, bf16: bool) -> None:
        self.spec, self.task, self.device, self.bf16, self.index = spec, task, device, bf16, 0
        torch.manual_seed(spec.seed)
        self.model = PlainLoop(
            vocabulary=task.vocabulary, classes=task.classes, width=spec.model.width, heads=spec.model.heads
        ).to(device)
        optimizer = spec.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
        )

    def step(self) -> float:
        """One optimizer step; the loss before it."""
        contract = self.spec.contract
        batch = self.task.random_batch(
            seed=self.spec.seed, split="train", index=self.index, size=self.spec.batch, length=contract.longest
        )
        self.index += 1
        tokens_BP, targets_BP = batch.tokens.to(self.device), batch.targets.to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext():
            logits_BPV = self.model(tokens_BP, contract.most_loops)
        loss = F.cross_entropy(logits_BPV.float().flatten(0, 1), targets_BP.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.optimizer.clip or float("inf"))
        self.optimizer.step()
        return loss.item()
