"""The model a user may ask for: a looped transformer and the residual rule it runs under."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from loopcore.specs.base import PositiveInt, Spec

__all__ = ["ModelSpec", "Rule", "ScalingSpec"]

OF_RECALL = ("architecture", "width")  # the fields that a recall convnet has

Rule = Literal["standard", "depth_mup", "loop_mup", "deepnorm", "deeploop"]


class ScalingSpec(Spec):
    """How residual branches, initial weights and learning rates scale with width, blocks and loops (see `loopcore.scaling`)."""

    rule: Rule = "standard"
    """`standard`, `depth_mup`, `loop_mup` (pre-norm) or `deepnorm`, `deeploop` (post-norm)."""
    base_width: PositiveInt = 64
    """Width at which the learning rate was tuned; `width_mult` is width / base_width."""
    base_blocks: PositiveInt = 1
    """Number of physical blocks at which the learning rate was tuned (L_base)."""
    loops: PositiveInt | None = None
    """Loop count T the multipliers are computed for. Empty: the largest T(n) of the contract's lengths."""
    exponent: float | None = Field(default=None, gt=0.0, le=2.0)
    """Replaces p in alpha = (2M)^p, beta = (8M)^-p for `deepnorm` and `deeploop`; empty keeps the rule's own (1/4, 1/2)."""

    @model_validator(mode="after")
    def _exponent_needs_post_norm_rule(self) -> ScalingSpec:
        if self.exponent is not None and self.rule not in ("deepnorm", "deeploop"):
            raise ValueError(f"exponent applies to the rules deepnorm and deeploop, got rule {self.rule!r}; leave it out")
        return self


class ModelSpec(Spec):
    """A looped transformer: `blocks` physical blocks, visited once per loop, the loop count given at call time."""

    architecture: Literal["transformer", "recall_conv"] = "transformer"
    """`recall_conv` is the recall convnet of the easy-to-hard benchmark (arXiv 2202.05826); of these fields it takes
    `width`, and its scaling rule is `standard`."""
    width: PositiveInt = 64
    """Model width d."""
    heads: PositiveInt = 4
    """Attention heads; must divide `width`."""
    blocks: PositiveInt = 1
    """Physical blocks L: distinct weights visited in order once per loop."""
    feedforward: PositiveInt = 4
    """Width of the feed-forward layer as a multiple of `width`."""
    tied: bool = True
    """One set of blocks for all loops; `false` gives every loop its own blocks (a standard-depth model)."""
    untied_loops: PositiveInt | None = None
    """Loops an untied model has weights for. Empty: the largest loop count that the contract trains, extra loops included."""
    norm: Literal["pre", "post"] = "pre"
    """`pre`: x + f(LN(x)). `post`: LN(alpha x + f(x)), as in DeepNorm."""
    causal: bool = True
    """Position i sees positions up to i only."""
    positions: Literal["none", "learned", "rope", "scan_offset"] = "none"
    """How the model knows positions. `scan_offset` exposes position i - 2^t at loop t, the addressing of a log-depth scan."""
    max_length: PositiveInt = 128
    """Longest input that `learned` positions have an embedding for; unused by the others."""
    bos: bool = True
    """Put a beginning-of-sequence token first. Without it a causal model without positions cannot count equal tokens."""
    injection: Literal["none", "add", "linear"] = "linear"
    """How the input re-enters at every loop: not at all, h + e, or Linear([h; e]) initialised to [I, 0.1 I]."""
    readout_init: Literal["zero", "normal"] = "zero"
    """Initial readout: zero (muP), or normal with variance 1/width."""

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        if self.architecture == "recall_conv":
            fields = {name: field.default for name, field in type(self).model_fields.items() if name not in OF_RECALL}
            if given := [name for name, default in fields.items() if getattr(self, name) != default]:
                raise ValueError(
                    f"a recall_conv takes {' and '.join(OF_RECALL)} alone; leave out {', '.join(given)}: a transformer's"
                )
            if self.width < 2:
                raise ValueError(f"a recall_conv needs a width of at least 2, got {self.width}")
            return self
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got width {self.width} and heads {self.heads}")
        if self.positions == "rope" and (self.width // self.heads) % 2:
            raise ValueError(f"rope needs an even head width, got {self.width} / {self.heads} = {self.width // self.heads}")
        if self.tied and self.untied_loops is not None:
            raise ValueError("untied_loops applies to untied models; leave it out or set tied: false")
        return self

    @property
    def looks_back_only(self) -> bool:
        """Whether an answer depends on the inputs up to its position alone, so that a word's prefixes are words. Convolutions
        reach ahead."""
        return self.architecture == "transformer" and self.causal
