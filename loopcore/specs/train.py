"""One training run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from loopcore.specs.base import PositiveInt, Spec, UnitInterval
from loopcore.specs.contract import ContractSpec
from loopcore.specs.model import ModelSpec, ScalingSpec
from loopcore.specs.task import CHESS_SIDE, LARGEST_MAZE, TaskSpec, WordTask, group_order

__all__ = ["OptimizerSpec", "TrainSpec"]

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]

MOST_PAIRS = 1_000_000  # of an operator stage: its shuffled order is held in memory


class OptimizerSpec(Spec):
    """AdamW and its schedule. Learning rate and epsilon are base values: the scaling rule multiplies them per group."""

    lr: float = Field(default=1e-3, gt=0.0, le=10.0)
    """Base learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: float = Field(default=0.1, ge=0.0)
    """Decoupled weight decay, as torch.optim.AdamW applies it (multiplied by the group's learning rate)."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    warmup: int = Field(default=100, ge=0)
    """Steps of linear warm-up."""
    clip: float | None = Field(default=1.0, gt=0.0)
    """Largest global gradient norm; empty turns clipping off."""
    decay: Literal["cooldown", "linear", "none"] = "cooldown"
    """`cooldown`: constant, then linear to 0 over `cooldown` steps once the last stage reaches `cooldown_at`, and in any case at
    the end of `steps`, on whatever stage (warm-up, constant rate, decay: arXiv 2404.06395).
    `linear`: from the end of the warm-up to 0 at the last step. `none`: constant."""
    cooldown: PositiveInt = 300
    """Steps of the cool-down."""
    cooldown_at: UnitInterval = 0.97
    """Held-out token accuracy on the last stage that starts the cool-down. One that has twice as many errors at a later
    evaluation is called off: the learning rate is constant again until this is reached once more."""


class TrainSpec(Spec):
    """One training run: model, task, contract, scaling rule, optimizer, seed."""

    model: ModelSpec = ModelSpec()
    task: TaskSpec = WordTask()
    contract: ContractSpec = ContractSpec()
    scaling: ScalingSpec = ScalingSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    batch: PositiveInt = 32
    """Sequences a step."""
    steps: PositiveInt = 4000
    """Most optimizer steps; a run with a cool-down ends when that is over."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seeds the weights and the data stream."""
    evaluate_every: PositiveInt = 50
    """Steps between evaluations on held-out data (promotion is decided there)."""
    evaluate_on: PositiveInt = 256
    """Held-out sequences an evaluation."""
    progressive: UnitInterval = 0.0
    """Weight alpha of the progressive loss (arXiv 2202.05826): (1 - alpha) of the loss after the last loop, and alpha of that
    after k more loops from a state found after n loops without gradient, n and k drawn anew each step. 0: the last loop alone."""
    checkpoint_every: PositiveInt = 200
    """Steps between checkpoints."""
    start_from: int | None = Field(default=None, ge=1)
    """The `train` job whose weights this run starts from, with a contract and an optimizer of its own; the job waits for it.
    Model and task have to be that job's."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`bf16` computes under autocast with fp32 weights; `auto` does so where the device gains from it (CUDA with bf16)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU if the job was granted one."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainSpec:
        rule, norm = self.scaling.rule, self.model.norm
        needed = "post" if rule in ("deepnorm", "deeploop") else None
        if needed and norm != needed:
            raise ValueError(
                f"scaling rule {rule!r} is defined for norm {needed!r}, got norm {norm!r}; set model.norm to {needed}"
            )
        if rule in ("depth_mup", "loop_mup") and norm != "pre":
            raise ValueError(f"scaling rule {rule!r} is defined for norm 'pre', got norm {norm!r}; set model.norm to pre")
        self._check_places()
        if self.model.architecture == "recall_conv" and self.scaling != ScalingSpec(loops=self.scaling.loops):
            raise ValueError("a scaling rule is one for transformers; leave scaling out for a recall_conv")
        if self.progressive and self.contract.input_schedule != "all":
            raise ValueError("the progressive loss goes on from states as they are found; it takes input_schedule all")
        if self.contract.input_schedule == "streaming" and self.model.injection == "none":
            raise ValueError(
                "a streaming contract needs an injection, by which later inputs enter; set model.injection to linear"
            )
        if self.task.kind == "text" and (len(self.contract.lengths) != 1 or self.optimizer.decay == "cooldown"):
            raise ValueError(
                "a text task takes one contract length and optimizer.decay linear or none (stages and the cool-down are decided "
                f"by accuracy), got lengths {list(self.contract.lengths)} and decay {self.optimizer.decay!r}"
            )
        if self.contract.operator_first and self.task.kind != "word":
            raise ValueError(f"operator_first learns a group's operator: it takes a word task, got {self.task.kind!r}")
        if self.contract.operator_first and self.task.kind == "word" and group_order(self.task.group) ** 2 > MOST_PAIRS:
            raise ValueError(
                f"operator_first goes through all pairs of elements, {group_order(self.task.group) ** 2:,} of {self.task.group}; "
                f"expected at most {MOST_PAIRS:,}: choose a smaller group"
            )
        most_drawn = self.contract.most_drawn(self.contract.most_loops)
        if not self.model.tied and self.model.untied_loops is not None and self.model.untied_loops < most_drawn:
            raise ValueError(
                f"an untied model with {self.model.untied_loops} loops of weights cannot meet a contract of "
                f"{most_drawn} loops; raise model.untied_loops"
            )
        return self

    def _check_places(self) -> None:
        """Positions of the input: of a maze or a board they are the squares, and no answer is told by those before it."""
        square = self.task.kind in ("maze", "chess")
        if self.task.kind == "chess" and self.contract.lengths != (CHESS_SIDE,):
            raise ValueError(f"a board's side is {CHESS_SIDE}: contract.lengths must be [8], got {list(self.contract.lengths)}")
        if self.task.kind == "maze" and (wrong := [n for n in self.contract.lengths if n % 2 == 0 or not 3 <= n <= LARGEST_MAZE]):
            raise ValueError(f"a maze's side is odd, from 3 to {LARGEST_MAZE}: contract.lengths may not have {wrong[0]}")
        if square and self.contract.input_schedule == "streaming":
            raise ValueError(f"a {self.task.kind} has no order to show its squares in; set contract.input_schedule to all")
        if self.model.architecture == "recall_conv":
            if self.task.kind == "text":
                raise ValueError("a recall_conv sees the bytes that it has to predict; choose another task for it")
            return
        if square and self.model.causal:
            raise ValueError(f"in a {self.task.kind} an answer depends on squares that come later; set model.causal to false")
        if square and self.model.positions in ("none", "scan_offset"):
            raise ValueError(
                f"a model without positions cannot tell the squares of a {self.task.kind} apart; set model.positions to learned "
                "or rope"
            )
        if self.task.kind == "text" and not self.model.causal:
            raise ValueError("a model that is not causal sees the bytes that it has to predict; set model.causal to true")
        needed = self.contract.longest ** (2 if square else 1)
        if self.model.positions == "learned" and self.model.max_length < needed:
            of = f"{needed}, the squares of side {self.contract.longest}" if square else f"{needed}"
            raise ValueError(
                f"learned positions reach length {self.model.max_length}, the contract asks for {of}; raise model.max_length"
            )

    @property
    def scaling_loops(self) -> int:
        """Loop count T that the scaling rule is computed for; draws of extra loops do not count."""
        return self.scaling.loops or self.contract.most_loops

    @property
    def untied_loops(self) -> int | None:
        """Loops an untied model has weights for; None for a tied one."""
        if self.model.tied:
            return None
        return self.model.untied_loops or self.contract.most_drawn(self.contract.most_loops)
