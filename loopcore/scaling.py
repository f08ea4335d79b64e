"""How residual branches, initial weights, learning rates and epsilons scale with width, blocks and loops: one table.

L = physical blocks, T = loops, executed_depth M = L T, m = width / base_width, L_base = blocks the learning rate was tuned at.

| rule      | branch        | skip a  | init gain b | lr of the blocks, over width's part | epsilon of the blocks, the same |
|-----------|---------------|---------|-------------|-------------------------------------|---------------------------------|
| standard  | 1             | 1       | 1           | 1                                   | 1                               |
| depth_mup | (L T)^(-1/2)  | 1       | 1           | (L T / L_base)^(-1/2)               | (L T / L_base)^(-1/2)           |
| loop_mup  | 1/(T sqrt(L)) | 1       | 1           | (L / L_base)^(-1/2)                 | (L / L_base)^(-1/2)             |
| deepnorm  | 1             | (2M)^p  | (8M)^(-p)   | 1                                   | (L / L_base)^(-2p)              |
| deeploop  | 1             | (2M)^p  | (8M)^(-p)   | 1                                   | (L / L_base)^(-2p)              |

with p = 1/4 for deepnorm and 1/2 for deeploop (arXiv 2607.13491); branch multipliers and learning rates are Loop-muP's
(no public text; nearest is arXiv 2606.18524).

Width, the same in every rule (muP with AdamW):

| group     | what is in it                                | learning rate      | epsilon            |
|-----------|----------------------------------------------|--------------------|--------------------|
| embedding | tokens, BOS, learned positions               | 1                  | 1/m                |
| hidden    | Q, K, V, O and the feed-forward matrices     | 1/m * blocks' part | 1/m * blocks' part |
| vector    | gains and biases of the blocks' norms        | blocks' part       | 1/m * blocks' part |
| injection | Linear([h; e])                               | 1/m * L=1's part   | 1/m * L=1's part   |
| readout   | Linear(h), whose output is multiplied by 1/m | 1                  | 1/m                |

Hidden matrices start with variance 1/fan_in. Attention scores are divided by sqrt(head width), which transfers over width as
muP asks when a wider model gets more heads, not wider ones.

Ours, without a source **[?]**:
- Epsilon follows the gradient, so that its share of Adam's denominator stays what it was at the base. Every gradient comes
  through the readout's 1/m. Inside a block it also carries the branch multiplier, summed over the parameter's visits as the
  rule counts them: depth_mup takes a visit for a layer of its own; loop_mup takes the T visits as aligned, T / (T sqrt(L)), so
  T drops out; for a, b = (2M)^p, (8M)^(-p) a visit's gradient goes with b/a = (4M)^(-2p), and p = (1+g)/4 assumes
  that T visits add up to T^((1+g)/2) = T^(2p), so T drops out again.
- The injection acts once a loop whatever L is, so it is a branch in a stack of one block: what it adds to the state is
  multiplied by the rule's `branch` at L = 1. Left alone it would add T times 0.1 e, and its updates T times, under loop_mup too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from loopcore.errors import InputError
from loopcore.specs.model import ModelSpec, ScalingSpec
from loopcore.specs.model import Rule as RuleName

__all__ = ["RULES", "Multipliers", "Powers", "Rule", "hidden_init_std", "multipliers"]


class Powers(NamedTuple):
    """The factor L^blocks T^loops."""

    blocks: float
    loops: float

    def at(self, blocks: float, loops: float) -> float:
        return blocks**self.blocks * loops**self.loops


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    branch: Powers
    """Multiplier on every residual branch, of L and T."""
    lr: Powers
    """Blocks' part of the learning rate, of L / L_base and T. Their part of epsilon is this times (L / L_base)^(-2p)."""
    p: float = 0.0
    """Exponent in a = (2M)^p and b = (8M)^(-p); 0 gives a = b = 1."""


RULES: dict[RuleName, Rule] = {
    "standard": Rule(branch=Powers(0, 0), lr=Powers(0, 0)),
    "depth_mup": Rule(branch=Powers(-1 / 2, -1 / 2), lr=Powers(-1 / 2, -1 / 2)),
    "loop_mup": Rule(branch=Powers(-1 / 2, -1), lr=Powers(-1 / 2, 0)),
    "deepnorm": Rule(branch=Powers(0, 0), lr=Powers(0, 0), p=1 / 4),
    "deeploop": Rule(branch=Powers(0, 0), lr=Powers(0, 0), p=1 / 2),
}


@dataclass(frozen=True)
class Multipliers:
    """What one rule gives for one width, block count and loop count. Learning rates and epsilons multiply the base values."""

    branch: float = 1.0
    """On the output of every attention and feed-forward branch, at run time."""
    skip: float = 1.0
    """Alpha, on the skip connection of a post-norm block, at run time; 1 for pre-norm."""
    init_gain: float = 1.0
    """Beta, on the initial V, O and feed-forward matrices only: never on Q and K."""
    injection: float = 1.0
    """On what the injection adds to the state, at run time."""
    readout: float = 1.0
    """On the logits, at run time: 1/m."""
    lr_embedding: float = 1.0
    lr_hidden: float = 1.0
    lr_vector: float = 1.0
    lr_injection: float = 1.0
    lr_readout: float = 1.0
    epsilon_embedding: float = 1.0
    epsilon_hidden: float = 1.0
    epsilon_vector: float = 1.0
    epsilon_injection: float = 1.0
    epsilon_readout: float = 1.0


def hidden_init_std(fan_in: int) -> float:
    """Standard deviation of a hidden matrix's initial entries: 1 / sqrt(fan_in), before `init_gain`."""
    return fan_in**-0.5


def multipliers(scaling: ScalingSpec, model: ModelSpec, loops: int) -> Multipliers:
    """The multipliers of `scaling` for `model` at `loops` loops.

    `loops` is the T that the rule is computed for, one number for a run (`TrainSpec.scaling_loops`): a model that is
    later run for other loop counts keeps its multipliers. Raises InputError for loops < 1.
    """
    if loops < 1:
        raise InputError(f"a scaling rule needs at least 1 loop, got {loops}")
    rule = RULES[scaling.rule]
    p = rule.p if scaling.exponent is None else scaling.exponent
    m = model.width / scaling.base_width
    executed_depth = model.blocks * loops
    relative_blocks = model.blocks / scaling.base_blocks
    lr = rule.lr.at(relative_blocks, loops)
    epsilon = lr * relative_blocks ** (-2 * p)
    once_a_loop = rule.lr.at(1, loops)  # the injection's part, of its learning rate and of its epsilon
    return Multipliers(
        branch=rule.branch.at(model.blocks, loops),
        skip=(2 * executed_depth) ** p,
        init_gain=(8 * executed_depth) ** -p,
        injection=rule.branch.at(1, loops),
        readout=1 / m,
        lr_embedding=1.0,
        lr_hidden=lr / m,
        lr_vector=lr,
        lr_injection=once_a_loop / m,
        lr_readout=1.0,
        epsilon_embedding=1 / m,
        epsilon_hidden=epsilon / m,
        epsilon_vector=epsilon / m,
        epsilon_injection=once_a_loop / m,
        epsilon_readout=1 / m,
    )
