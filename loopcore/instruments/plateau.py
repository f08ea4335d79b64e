"""Whether a run trains at all: its held-out loss beside that of knowing only how often each answer occurs.

A looped model whose updates are too large does not always diverge. It may sit, with finite losses, on the loss of a constant
prediction: a silent plateau, which only the size of the loss tells from training. The constant compared with is the best one
for the very words measured, the frequencies of their own answers, so a model that has learned nothing else is never below it.

Shapes: B words, N positions, V classes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loopcore.errors import Undecided
from loopcore.instruments.accuracy import Words
from loopcore.instruments.drawn import drawn_words, with_loops
from loopcore.instruments.fits import mean_interval, row
from loopcore.looped import Steppable

__all__ = ["Plateau", "measure_plateau"]


@dataclass(frozen=True)
class Plateau:
    """Losses in nats a position, means over words with Student's interval."""

    loops: int
    words: int
    loss: tuple[float, float | None, float | None]
    """Of the model: (mean, low, high)."""
    constant: tuple[float, float | None, float | None]
    """Of the best constant prediction: the entropy of the answers."""
    below: tuple[float, float | None, float | None]
    """`constant` less `loss`, word by word: how far below the plateau the model is."""

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes, value, low, high."""
        figures = {"loss": self.loss, "constant": self.constant, "below": self.below}
        return [row("plateau", {"of": name, "loop": self.loops}, *figure) for name, figure in figures.items()]

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@torch.inference_mode()
def measure_plateau(
    model: Steppable,
    task: Words,
    *,
    words: int,
    length: int,
    loops: int,
    confidence: float = 0.95,
    seed: int = 0,
    split: str = "held_out",
    batch: int = 256,
) -> Plateau:
    """Losses on held-out words after `loops` loops.

    Raises InputError for counts below 1, Undecided for a model whose logits are not finite or that has too few loops of weights.
    """
    if (why := with_loops(model, loops)) is not None:
        raise Undecided(why)
    losses: list[Tensor] = []
    answers: list[Tensor] = []
    for drawn in drawn_words(model, task, words=words, length=length, seed=seed, split=split, batch=batch):
        *_, h_BPD = model.iterate(drawn.tokens_BN, loops)
        logits_BNV = model.readout(h_BPD).double()
        losses.append(F.cross_entropy(logits_BNV.flatten(0, 1), drawn.targets_BN.flatten(), reduction="none").cpu())
        answers.append(drawn.targets_BN.cpu())
    answers_BN = torch.cat(answers)
    loss_B = torch.cat(losses).view(answers_BN.shape).mean(1)
    if not bool(loss_B.isfinite().all()):
        raise Undecided(f"the loss after {loops} loops is not finite: the model has diverged")
    counts_V = answers_BN.flatten().bincount().double()
    surprise_V = -(counts_V / counts_V.sum()).log()
    constant_B = surprise_V[answers_BN].mean(1)
    loss, constant, below = (mean_interval(value_B.tolist(), confidence) for value_B in (loss_B, constant_B, constant_B - loss_B))
    return Plateau(loops, len(answers_BN), loss, constant, below)
