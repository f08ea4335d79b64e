"""AdamW over the rows of a population, with learning rate, epsilon and weight decay by member and group.

Shapes in names: M members, R rows of a step, C columns, S stretches of columns (`loopcore.population.layout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from loopcore.population.layout import Storage
from loopcore.population.members import Member

__all__ = ["AdamW", "clip"]


def clip(grads_RC: Tensor, norms_R: Tensor, most: Sequence[float]) -> None:
    """Scales each row's gradient in place to a norm of at most its own `most`, as torch.nn.utils.clip_grad_norm_ does."""
    most_R = torch.tensor(most, device=grads_RC.device, dtype=grads_RC.dtype)
    grads_RC.mul_((most_R / (norms_R + 1e-6)).clamp(max=1.0)[:, None])


class Due(NamedTuple):
    """One member's part in a step."""

    member: int
    lr_factor: float
    loops: int
    """Stretches of later loops have no gradient: they are left alone, as torch leaves a parameter without one."""


class AdamW:
    """The members' optimizer; it computes what torch.optim.AdamW would for each of them."""

    def __init__(self, storage: Storage, members: Sequence[Member]) -> None:
        self.storage = storage
        self.hyperparameters = [member.hyperparameters() for member in members]
        self.betas = [member.spec.optimizer.betas for member in members]
        stretches = storage.layout.stretches
        columns = [stretch.stop - stretch.start for stretch in stretches]
        tensors = (storage.weights_MC, storage.averages_MC, storage.squares_MC)
        # Slices of every member's row, made once: [member][stretch] -> weights, averages, squares, steps.
        self._slices = [
            list(zip(*(tensor_MC[m].split(columns) for tensor_MC in tensors), storage.steps_MS[m].unbind(), strict=True))
            for m in range(len(members))
        ]
        self._columns = columns

    @torch.no_grad()
    def step(self, due: Sequence[Due], grads_RC: Tensor) -> None:
        """One step of the members in `due`; row r of the gradients is that of `due[r]`."""
        (self.row_by_row if grads_RC.device.type == "cpu" else self.all_rows)(due, grads_RC)

    def row_by_row(self, due: Sequence[Due], grads_RC: Tensor) -> None:
        """torch's fused kernel on the stretches of a row with the same hyperparameters. For the CPU: a row stays in its cache."""
        for (m, factor, loops), grad_C in zip(due, grads_RC, strict=True):
            parts: dict[tuple[float, float, float], list[tuple[Tensor, ...]]] = {}
            grads = grad_C.split(self._columns)
            for s, stretch in enumerate(self.storage.layout.stretches):
                if stretch.loop < loops:
                    parts.setdefault(self.hyperparameters[m][s], []).append((*self._slices[m][s], grads[s]))
            for (lr, epsilon, decay), found in parts.items():
                weights, averages, squares, steps, slices = (list(column) for column in zip(*found, strict=True))
                beta1, beta2 = self.betas[m]
                adamw(
                    weights,
                    slices,
                    averages,
                    squares,
                    [],
                    steps,
                    fused=True,
                    amsgrad=False,
                    maximize=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=lr * factor,
                    weight_decay=decay,
                    eps=epsilon,
                )

    def all_rows(self, due: Sequence[Due], grads_RC: Tensor) -> None:
        """One stretch of all rows at a time, with numbers by row. For a GPU: the launches do not grow with the members."""
        storage = self.storage
        for s, stretch in enumerate(storage.layout.stretches):
            taken = [r for r, (_, _, loops) in enumerate(due) if stretch.loop < loops]
            if not taken:
                continue
            rows = [due[r].member for r in taken]
            every = rows == list(range(len(storage.weights_MC)))
            storage.steps_MS[rows, s] += 1
            numbers_R = [
                _numbers(*self.hyperparameters[m][s], due[r].lr_factor, *self.betas[m], float(storage.steps_MS[m, s]))
                for r, m in zip(taken, rows, strict=True)
            ]
            shrink, new1, old2, new2, correction, epsilon, size = torch.tensor(numbers_R, device=grads_RC.device).split(1, dim=1)
            columns = slice(stretch.start, stretch.stop)
            grad = grads_RC[:, columns] if len(taken) == len(due) else grads_RC[taken, columns]
            places = [tensor_MC[:, columns] for tensor_MC in (storage.weights_MC, storage.averages_MC, storage.squares_MC)]
            weight, average, square = places if every else (place[rows] for place in places)
            weight.mul_(shrink)
            average.lerp_(grad, new1)
            square.mul_(old2).add_(grad * grad * new2)
            weight.sub_(size * average / (square.sqrt() * correction + epsilon))
            if not every:
                for place, value in zip(places, (weight, average, square), strict=True):
                    place[rows] = value


def _numbers(
    lr: float, epsilon: float, decay: float, factor: float, beta1: float, beta2: float, step: float
) -> tuple[float, ...]:
    """What `AdamW.all_rows` multiplies with: 1 - lr decay, 1 - beta1, beta2, 1 - beta2, the root of the second moment's bias
    correction, epsilon, and lr over the first moment's."""
    lr *= factor
    return 1 - lr * decay, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** -0.5, epsilon, lr / (1 - beta1**step)
