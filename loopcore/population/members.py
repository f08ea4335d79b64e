"""One member of a population: a training run whose weights and optimizer state lie in the population's storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loopcore.errors import InputError
from loopcore.population.layout import Storage
from loopcore.specs.shape import OF_SHAPE
from loopcore.specs.train import TrainSpec
from loopcore.training import Training

__all__ = ["Member", "one_shape"]


def one_shape(specs: Sequence[TrainSpec]) -> None:
    """Raises InputError for specs that cannot be one population, which have no `shape_key` or more than one, and says why."""
    if not specs:
        raise InputError("a population needs at least one member; give it a list of training specs")
    if specs[0].model.architecture != "transformer":
        raise InputError(
            f"a population trains transformers, got model.architecture {specs[0].model.architecture!r}; train each run alone"
        )
    for number, spec in enumerate(specs):
        if spec.progressive:
            raise InputError(
                f"a population trains on the last loop's loss, member {number} has progressive {spec.progressive:g}; train "
                "it alone"
            )
        for name in OF_SHAPE:
            first, this = getattr(specs[0], name), getattr(spec, name)
            if first != this:
                raise InputError(
                    f"members of a population share {', '.join(OF_SHAPE)}; member {number} has another {name} than member 0 "
                    f"({this}, there {first}): make it another population"
                )


class Member(Training):
    """The run of `spec` as a member: everything that `Training` does but for its step, which the population makes.

    Its state is the one that `Training(spec)` would have: either can take up what the other put down.
    """

    _storage: Storage
    _row: int

    def __init__(self, spec: TrainSpec, *, device: str | None = None) -> None:
        super().__init__(spec, device=device)
        # The generators are the process's: each member remembers what they are in a process of its own.
        self._rng = super().state_dict()["rng"]

    def move_into(self, storage: Storage, row: int) -> None:
        """Keeps weights and optimizer state in one row of `storage` from now on; `model` then has views of it."""
        self._storage, self._row = storage, row
        views = storage.layout.views(storage.weights_MC[row])
        for name, parameter in self.model.named_parameters():
            views[name].copy_(parameter.detach())
            parameter.data = views[name]

    def hyperparameters(self) -> list[tuple[float, float, float]]:
        """Base learning rate, epsilon and weight decay of each of the layout's stretches."""
        groups = {group["name"]: group for group in self.optimizer.param_groups}
        found = [groups[stretch.group] for stretch in self._storage.layout.stretches]
        return [(group["base_lr"], group["eps"], group["weight_decay"]) for group in found]

    def step(self) -> dict[str, float]:
        raise AssertionError("a member steps with its population: call Population.step or Population.advance")

    def state_dict(self) -> dict[str, Any]:
        """As `Training.state_dict`: a copy, which shares no memory with the population."""
        moments = self._moments()
        steps = {place.name: self._storage.steps_MS[self._row, place.stretch] for place in self._storage.layout.places}
        return super().state_dict() | {
            "optimizer": {
                name: {"step": steps[name].to(self.device, copy=True)}
                | {key: views[name].clone() for key, views in moments.items()}
                for name, _ in self.model.named_parameters()
                if steps[name] > 0
            },
            "rng": {name: value.clone() for name, value in self._rng.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Training.load_state_dict`, from a member or from a run alone."""
        super().load_state_dict(state)
        self._rng = {name: value.clone() for name, value in state["rng"].items()}

    def _load_optimizer(self, state: dict[str, dict[str, Tensor]]) -> None:
        layout, moments = self._storage.layout, self._moments()
        if unknown := state.keys() - {place.name for place in layout.places}:
            raise ValueError(f"no parameter is called {min(unknown)}")
        counts: list[set[float]] = [set() for _ in layout.stretches]
        for place in layout.places:
            kept = state.get(place.name)
            counts[place.stretch].add(float(kept["step"]) if kept else 0.0)
            for key, views in moments.items():
                view = views[place.name]
                view.copy_(kept[key].view(place.shape)) if kept else view.zero_()
        if uneven := next((found for found in counts if len(found) > 1), None):
            raise ValueError(f"parameters of one group have had different numbers of steps, {sorted(uneven)}")
        self._storage.steps_MS[self._row] = torch.tensor([found.pop() for found in counts])

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        """Views of this member's moments by torch's name for them and by parameter."""
        storage = self._storage
        return {
            "exp_avg": storage.layout.views(storage.averages_MC[self._row]),
            "exp_avg_sq": storage.layout.views(storage.squares_MC[self._row]),
        }
