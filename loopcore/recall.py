"""A second looped architecture, the recall convnet, and the progressive loss it is trained with (arXiv 2202.05826).

The net projects the raw input to its width; every loop concatenates the raw input to the state again, brings both back to the
width by a convolution, and passes two residual blocks of two convolutions; three convolutions read out. All convolutions are
three wide (in two dimensions three by three) with zeros beyond the edge and without bias, so an input of any size will do and
a loop reaches five positions further. Like `LoopedTransformer` it is a `LoopedModule`, with the same contracts, instruments and
halting.

Shapes in names: B batch, N positions (S^2 in two dimensions, row by row), C channels of the raw input, D width, V classes,
T loops. States are h_BND, raw inputs x_BNC; there is no BOS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopcore.errors import InputError, LengthError
from loopcore.looped import LoopedModule, Steppable

__all__ = ["RecallNet", "Scores", "progressive_draw", "progressive_loss", "scores_by_loop"]


class RecallNet(LoopedModule):
    """The recall convnet in one dimension (strings) or two (squares such as mazes and boards).

    `palette` is the raw input by token, a row of channels each, as the task has it (`PrefixSums.palette`, `Mazes.palette`): it is
    not learned. `classes` answers come out. The paper's widths are 400 for prefix sums and 128 for mazes. As in its public code
    the head narrows to D/2 in one dimension and to 32 and 8 in two, and only in one dimension a ReLU follows the recalling
    convolution. Weights depend on `seed` alone.
    """

    def __init__(
        self, *, width: int, palette: Sequence[Sequence[float]], classes: int, dimensions: Literal[1, 2] = 1, seed: int = 0
    ) -> None:
        super().__init__()
        if width < 2 or dimensions not in (1, 2) or len({len(row) for row in palette}) != 1:
            raise InputError(
                f"expected a width of at least 2, 1 or 2 dimensions and as many channels for each token, got width {width}, "
                f"{dimensions} dimensions and {[len(row) for row in palette]} channels"
            )
        self.width, self.classes, self.dimensions = width, classes, dimensions
        self.vocabulary, channels = len(palette), len(palette[0])
        self.palette_VC: Tensor
        self.register_buffer("palette_VC", torch.tensor(palette, dtype=torch.float32))
        Conv = nn.Conv1d if dimensions == 1 else nn.Conv2d

        def conv(fan_in: int, fan_out: int) -> nn.Module:
            return Conv(fan_in, fan_out, kernel_size=3, padding=1, bias=False)

        self.projection = conv(channels, width)
        self.recall = conv(width + channels, width)
        self.residual = nn.ModuleList(nn.ModuleList([conv(width, width), conv(width, width)]) for _ in range(2))
        narrow = (width, width // 2) if dimensions == 1 else (32, 8)
        self.head = nn.ModuleList(
            [conv(width, narrow[0]), conv(narrow[0], narrow[1]), conv(narrow[1], classes)],
        )
        self.fill(torch.Generator().manual_seed(seed))

    @classmethod
    def for_task(cls, task: Any, *, width: int, seed: int = 0) -> RecallNet:
        """The net for a task that has a `palette` and a `grid` (its dimensions): bits, mazes, boards. Others are strings of
        one-hot tokens."""
        palette = getattr(task, "palette", None) or torch.eye(task.vocabulary).tolist()
        return cls(width=width, palette=palette, classes=task.classes, dimensions=getattr(task, "grid", 1), seed=seed)

    @torch.no_grad()
    def fill(self, generator: torch.Generator) -> None:
        """Initial weights uniform in +- 1/sqrt(fan_in), as torch's own for convolutions, from a generator of this model's own."""
        for weight in self.parameters():
            reach = weight[0].numel() ** -0.5
            weight.uniform_(-reach, reach, generator=generator)

    def admit(self, loops: int) -> None:
        """Raises InputError for loops < 1."""
        if loops < 1:
            raise InputError(f"a recall net needs at least 1 loop, got {loops}")

    def embed(self, tokens_BN: Tensor) -> Tensor:
        """The raw input x_BNC. Raises LengthError for an empty input and, in two dimensions, one that is no square."""
        N = tokens_BN.shape[1]
        if N < 1:
            raise LengthError("the input is empty; give at least one token")
        if self.dimensions == 2 and math.isqrt(N) ** 2 != N:
            raise LengthError(f"the input of a two-dimensional net is a square, row by row; got {N} tokens")
        return F.embedding(tokens_BN, self.palette_VC)

    def start(self, e_BPD: Tensor) -> Tensor:
        """State h_BND before the first loop: the projected raw input."""
        return self.flat(F.relu(self.projection(self.spread(e_BPD))))

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        """One loop, h_BND to h_BND: the raw input is recalled, then come the residual blocks. `t` counts from 0."""
        h = self.recall(self.spread(torch.cat([h_BPD, e_BPD], dim=-1)))
        if self.dimensions == 1:
            h = F.relu(h)
        for first, second in self.residual:  # pyright: ignore[reportGeneralTypeIssues] - a ModuleList of pairs
            h = F.relu(h + second(F.relu(first(h))))
        return self.flat(h)

    def readout(self, h_BPD: Tensor) -> Tensor:
        """Logits [B, N, V]."""
        first, second, third = self.head
        return self.flat(third(F.relu(second(F.relu(first(self.spread(h_BPD)))))))

    def spread(self, x_BND: Tensor) -> Tensor:
        """[B, N, D] as convolutions take it: [B, D, N] or [B, D, S, S]."""
        if self.dimensions == 1:
            return x_BND.transpose(1, 2)
        B, N, D = x_BND.shape
        S = math.isqrt(N)
        return x_BND.view(B, S, S, D).permute(0, 3, 1, 2)  # channels last in memory: nothing is copied

    def flat(self, x: Tensor) -> Tensor:
        """The inverse of `spread`."""
        return x.flatten(2).transpose(1, 2).contiguous()


def progressive_draw(loops: int, stream: torch.Generator) -> tuple[int, int]:
    """(n, k) of one step of the progressive loss: n uniform in 0 .. loops - 1, then k uniform in 1 .. loops - n."""
    n = int(torch.randint(loops, (), generator=stream))
    return n, 1 + int(torch.randint(loops - n, (), generator=stream))


def progressive_loss(
    model: Steppable,
    tokens_BN: Tensor,
    targets_BN: Tensor,
    *,
    loops: int,
    alpha: float,
    n: int,
    k: int,
    counted_BN: Tensor | None = None,
) -> Tensor:
    """(1 - alpha) L_max + alpha L_prog, in nats a position (arXiv 2202.05826).

    L_max is the cross-entropy after `loops` loops. L_prog is that after n + k, of which the first n are taken without gradient:
    the model has to make progress from a state as it finds it, and cannot count loops. The paper draws n and k anew each step
    (`progressive_draw`), with loops = 30, alpha 1 for prefix sums and .01 for mazes. A part of weight zero is not computed.
    `counted_BN` says which positions count (all if empty); the public code leaves out a maze's walls (`Mazes.open`).

    Works for any looped model. Raises InputError for n, k and alpha out of range.
    """
    if not (0 <= n < loops and 1 <= k <= loops - n and 0.0 <= alpha <= 1.0):
        raise InputError(
            f"expected 0 <= n < loops, 1 <= k <= loops - n and alpha from 0 to 1, got n {n}, k {k}, loops {loops} and alpha "
            f"{alpha:g}"
        )
    if counted_BN is None:
        counted_BN = torch.ones_like(targets_BN, dtype=torch.bool)

    def loss_from(h_BPD: Tensor, first: int, last: int) -> Tensor:
        for t in range(first, last):
            h_BPD = model.loop(h_BPD, e_BPD, t)
        return F.cross_entropy(model.readout(h_BPD)[counted_BN], targets_BN[counted_BN])

    e_BPD = model.embed(tokens_BN)
    parts = []
    if alpha < 1.0:
        parts.append((1.0 - alpha) * loss_from(model.start(e_BPD), 0, loops))
    if alpha > 0.0:
        if n == 0:
            found_BPD = model.start(e_BPD)  # the first state, too, is learned where the gradient reaches it
        else:
            with torch.no_grad():
                found_BPD = model.start(e_BPD)
                for t in range(n):
                    found_BPD = model.loop(found_BPD, e_BPD, t)
        parts.append(alpha * loss_from(found_BPD, n, n + k))
    return torch.stack(parts).sum()


class Scores(NamedTuple):
    """Which sequences are right at every position, after loop 1 .. T; bool [T, B] both, on the CPU."""

    default_TB: Tensor
    """By the answer after loop t."""
    max_conf_TB: Tensor
    """By the answer of the loop up to t that was surest of itself: the highest sum over positions of the largest probability."""


@torch.inference_mode()
def scores_by_loop(
    model: Steppable, tokens_BN: Tensor, targets_BN: Tensor, loops: int, *, counted_BN: Tensor | None = None
) -> Scores:
    """The benchmark's two ways to score a net, by exact match of whole sequences, the loops streamed.

    `counted_BN` says which positions count, for the match and for the confidence; all if empty.
    """
    if counted_BN is None:
        counted_BN = torch.ones_like(targets_BN, dtype=torch.bool)
    surest_B = torch.full(targets_BN.shape[:1], -math.inf, device=targets_BN.device)
    by_surest_B = torch.zeros_like(surest_B, dtype=torch.bool)
    default, max_conf = [], []
    for t, h_BPD in enumerate(model.iterate(tokens_BN, loops)):
        if t:
            probability_BN, answer_BN = model.readout(h_BPD).float().softmax(-1).max(-1)
            right_B = ((answer_BN == targets_BN) | ~counted_BN).all(-1)
            sure_B = (probability_BN * counted_BN).sum(-1)
            by_surest_B = torch.where(sure_B > surest_B, right_B, by_surest_B)
            surest_B = torch.maximum(sure_B, surest_B)
            default.append(right_B.cpu())
            max_conf.append(by_surest_B.cpu())
    return Scores(torch.stack(default), torch.stack(max_conf))
