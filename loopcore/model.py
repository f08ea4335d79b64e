"""A looped transformer: physical blocks visited once a loop, the loop count given at call time.

Shapes in names: B batch, N input positions, P = N + 1 positions with BOS (P = N without), D width, V classes, T loops.
States are h, embedded inputs e. Loops are counted t = 0 .. T-1; a trace has the T + 1 states around them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopcore.block import Block, Matrix, Sight, rotation
from loopcore.errors import InputError, LengthError
from loopcore.looped import LoopedModule, Trace
from loopcore.recall import RecallNet
from loopcore.scaling import Multipliers, multipliers
from loopcore.specs.model import ModelSpec
from loopcore.specs.train import TrainSpec

__all__ = ["LoopedTransformer", "Trace", "build_model"]

INJECTED = 0.1  # initial weight of the input in Linear([h; e]) (public reproduction of arXiv 2607.20594)


class LoopedTransformer(LoopedModule):
    """The model of `spec`: embed the tokens once, visit the blocks T times, read out.

    `vocabulary` tokens in, `classes` out. A tied model has one set of L blocks whatever T is; an untied one has L blocks
    (and an injection) for each of its `untied_loops` loops, and no more loops than that. Weights depend on `seed` alone.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        vocabulary: int,
        classes: int,
        multipliers: Multipliers,
        untied_loops: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not spec.tied and untied_loops is None:
            untied_loops = spec.untied_loops
        if spec.tied != (untied_loops is None):
            raise InputError("an untied model needs its number of loops (untied_loops), and a tied one takes none")
        self.spec, self.scale, self.vocabulary, self.classes = spec, multipliers, vocabulary, classes
        self.untied_loops, self.always_shown, self.injects = untied_loops, int(spec.bos), spec.injection != "none"
        D, copies = spec.width, untied_loops or 1
        self.embedding_VD = nn.Parameter(torch.empty(vocabulary + spec.bos, D))  # BOS, where there is one, is the last row
        if spec.positions == "learned":
            self.position_PD = nn.Parameter(torch.empty(spec.max_length + spec.bos, D))
        self.blocks = nn.ModuleList(Block(spec, multipliers) for _ in range(copies * spec.blocks))
        if spec.injection == "linear":
            self.injections = nn.ModuleList(Matrix(2 * D, D) for _ in range(copies))
        self.readout_matrix = Matrix(D, classes)
        self.fill(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def fill(self, generator: torch.Generator) -> None:
        """Initial weights: embeddings of unit variance, hidden matrices by `Block.fill`, injection [I, 0.1 I]."""
        self.embedding_VD.normal_(generator=generator)
        if self.spec.positions == "learned":
            self.position_PD.normal_(generator=generator)
        for block in self.blocks:
            block.fill(generator, self.scale.init_gain)  # pyright: ignore[reportCallIssue]
        if self.spec.injection == "linear":
            eye_DD = torch.eye(self.spec.width)
            for matrix in self.injections:
                matrix.weight.copy_(torch.cat([eye_DD, INJECTED * eye_DD], dim=1))  # pyright: ignore
        if self.spec.readout_init == "zero":
            self.readout_matrix.weight.zero_()
        else:
            self.readout_matrix.weight.normal_(0.0, self.spec.width**-0.5, generator=generator)

    @property
    def position_free_of_loop(self) -> bool:
        return self.spec.tied and self.spec.positions != "scan_offset"

    def admit(self, loops: int) -> None:
        """Raises InputError for loops < 1, LengthError for more loops than an untied model has weights for."""
        if loops < 1:
            raise InputError(f"a looped transformer needs at least 1 loop, got {loops}")
        if self.untied_loops is not None and loops > self.untied_loops:
            raise LengthError(
                f"this untied model has weights for {self.untied_loops} loops, {loops} were asked for; ask for at most "
                f"{self.untied_loops}, or train with a larger model.untied_loops"
            )

    def embed(self, tokens_BN: Tensor) -> Tensor:
        """Embedded input e_BPD with BOS first. Raises LengthError for an empty input and one beyond the learned positions."""
        N = tokens_BN.shape[1]
        if N < 1:
            raise LengthError("the input is empty; give at least one token")
        if self.spec.positions == "learned" and self.spec.max_length < N:
            raise LengthError(
                f"the input has {N} tokens, the model's learned positions reach {self.spec.max_length}; shorten the input, or "
                "train with a larger model.max_length"
            )
        if self.spec.bos:
            tokens_BN = F.pad(tokens_BN, (1, 0), value=self.vocabulary)
        e_BPD = F.embedding(tokens_BN, self.embedding_VD)
        return e_BPD + self.position_PD[: tokens_BN.shape[1]] if self.spec.positions == "learned" else e_BPD

    def start(self, e_BPD: Tensor) -> Tensor:
        """State h_BPD before the first loop: the embedded input."""
        return e_BPD

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        """One loop, h_BPD to h_BPD: the input re-enters, then every block is visited once. `t` counts from 0."""
        self.admit(t + 1)
        first = 0 if self.spec.tied else t * self.spec.blocks
        h_BPD = self.inject(h_BPD, e_BPD, t)
        sight = self.sight(h_BPD.shape[1], h_BPD.device, t)
        for block in self.blocks[first : first + self.spec.blocks]:
            h_BPD = block(h_BPD, sight)
        return h_BPD

    def inject(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        """The input re-enters the state. The injection is no residual branch of a block: it acts once a loop, before the blocks.

        What it adds, e or Linear([h; e]) - h, is multiplied by `injection` (ours, see `loopcore.scaling`), which is 1 under
        standard, deepnorm and deeploop: there the map is the published Linear([h; e]) itself.
        """
        if self.spec.injection == "none":
            return h_BPD
        if self.spec.injection == "add":
            return h_BPD + self.scale.injection * e_BPD
        # Not under autocast: the map carries the whole state, which would be rounded to bf16 once a loop.
        with torch.autocast(h_BPD.device.type, enabled=False):
            mixed_BPD = self.injections[0 if self.spec.tied else t](torch.cat([h_BPD, e_BPD], dim=-1))
        return mixed_BPD if self.scale.injection == 1.0 else torch.lerp(h_BPD, mixed_BPD, self.scale.injection)

    def sight(self, positions: int, device: torch.device, t: int) -> Sight:
        """What positions 0 .. P-1 may look at in loop t."""
        spec = self.spec
        turns, addressed_PP = None, None
        if spec.positions == "rope":
            turns = rotation(positions, spec.width // spec.heads, device)
        elif spec.positions == "scan_offset":
            # Hillis-Steele addressing [?]: a score of its own for exactly position i - 2^t. It is added to the content's score,
            # so a model may also ignore it: what tying then does to a model that could scan is the question (finding 2b).
            offset = min(2**t, positions)
            addressed_PP = torch.ones(positions - offset, device=device).diag(-offset)
        return Sight(spec.causal, turns, addressed_PP)

    def normalised(self, h_BPD: Tensor) -> Tensor:
        """What the readout matrix reads, z_BND: the state after the final norm, BOS dropped.

        The state of a pre-norm model grows with the loops, so it is normalised here; without gain and bias, which the linear
        map would only repeat. A post-norm state is normalised already.
        """
        h_BND = h_BPD[:, 1:] if self.spec.bos else h_BPD
        return F.layer_norm(h_BND, h_BND.shape[-1:]) if self.spec.norm == "pre" else h_BND

    def readout(self, h_BPD: Tensor) -> Tensor:
        """Logits [B, N, V]: 1/m times a linear map of the normalised state."""
        return self.scale.readout * self.readout_matrix(self.normalised(h_BPD))


class Sized(Protocol):
    """What a model has to know of a task."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def classes(self) -> int: ...


def build_model(spec: TrainSpec, task: Sized) -> LoopedTransformer | RecallNet:
    """The model of a training run on the CPU, with the weights it starts from: a function of `spec` and the task's sizes (of a
    recall convnet, its palette and dimensions too)."""
    if spec.model.architecture == "recall_conv":
        return RecallNet.for_task(task, width=spec.model.width, seed=spec.seed)
    return LoopedTransformer(
        spec.model,
        vocabulary=task.vocabulary,
        classes=task.classes,
        multipliers=multipliers(spec.scaling, spec.model, spec.scaling_loops),
        untied_loops=spec.untied_loops,
        seed=spec.seed,
    )
