"""One parameter, many visits: a looped model run with a copy of its matrices for every visit, and its activations at every call.

A tied matrix gathers the gradients of its T visits and is read back by the same visits (arXiv 2607.13491). A copy a visit
takes the sum apart: one backward pass then gives the gradient of each visit.

Shapes: B batch, N input positions, P positions with BOS, D width, V classes, T loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopcore.errors import InputError
from loopcore.model import LoopedTransformer

__all__ = [
    "Activation",
    "Loss",
    "Place",
    "cross_entropy",
    "matrix_names",
    "places",
    "run_visits",
    "visit_copies",
    "visit_gradients",
    "watch_calls",
]

Loss = Callable[[Tensor], Tensor]
"""logits_BNV to a scalar."""


class Place(NamedTuple):
    """A matrix of a physical block."""

    block: int
    """From 0 to L - 1."""
    matrix: str
    """Its name in the block: query.weight, up.weight, ..."""


class Activation(NamedTuple):
    """What one call of a submodule put out."""

    name: str
    """The submodule: query, norm_attention, block (the block's own output), injection, readout, ..."""
    block: int | str | None
    """Physical block, from 0 to L - 1; None for what stands outside the blocks. A summary may say `last`."""
    visit: int | str | None
    """Loop, from 0 to T - 1; None for what is called once a pass. A summary may say `last`."""


def cross_entropy(targets_BN: Tensor) -> Loss:
    """Mean cross-entropy over all positions against these targets."""
    return lambda logits_BNV: F.cross_entropy(logits_BNV.flatten(0, 1), targets_BN.flatten())


def places(model: LoopedTransformer) -> tuple[Place, ...]:
    """The matrices of the physical blocks, those that every loop visits once."""
    return tuple(
        Place(block, name)
        for block in range(model.spec.blocks)
        for name, parameter in model.blocks[block].named_parameters()
        if parameter.ndim == 2
    )


def matrix_names(model: LoopedTransformer, loops: int) -> list[dict[Place, str]]:
    """For every loop, the name in the model of the matrix that it visits at each place: the same each time if tied."""
    model.admit(loops)
    first = [0 if model.spec.tied else t * model.spec.blocks for t in range(loops)]
    return [{place: f"blocks.{start + place.block}.{place.matrix}" for place in places(model)} for start in first]


def visit_copies(model: LoopedTransformer, loops: int) -> list[dict[Place, Tensor]]:
    """For every loop, the matrices it visits as leaves of their own. They share the model's memory: do not write to them.

    Raises InputError for loops < 1, LengthError for more loops than an untied model has weights for.
    """
    parameters = dict(model.named_parameters())
    return [
        {place: parameters[name].detach().requires_grad_() for place, name in names.items()}
        for names in matrix_names(model, loops)
    ]


def run_visits(model: LoopedTransformer, tokens_BN: Tensor, copies: list[dict[Place, Tensor]]) -> Tensor:
    """State h_BPD after as many loops as there are `copies`, loop t computing with copies[t] in place of the model's matrices.

    Only the copies are differentiated: the embedding enters as a constant.
    """
    names = matrix_names(model, len(copies))
    one_loop = _OneLoop(model)
    with torch.no_grad():
        e_BPD = model.embed(tokens_BN)
        h_BPD = model.start(e_BPD)
    for t, copy in enumerate(copies):
        weights = {f"model.{names[t][place]}": tensor for place, tensor in copy.items()}
        h_BPD = torch.func.functional_call(one_loop, weights, (h_BPD, e_BPD, t))
    return h_BPD


def visit_gradients(scalar: Tensor, copies: list[dict[Place, Tensor]], *, keep: bool = False) -> list[dict[Place, Tensor]]:
    """The gradient of a scalar computed by `run_visits` in every copy, from one backward pass; `keep` allows another one."""
    leaves = [tensor for copy in copies for tensor in copy.values()]
    found = iter(torch.autograd.grad(scalar, leaves, retain_graph=keep))
    return [{place: next(found) for place in copy} for copy in copies]


class _OneLoop(nn.Module):
    """A model's `loop` as the forward of a module, which is what `functional_call` can call."""

    def __init__(self, model: LoopedTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        return self.model.loop(h_BPD, e_BPD, t)


@contextmanager
def watch_calls(model: LoopedTransformer, see: Callable[[Activation, Tensor, Tensor], None]) -> Iterator[None]:
    """Calls see(activation, input, output) at every call of every submodule, so at every visit of a reused one.

    A reused module has one place for its last output and many outputs: to watch each of them, visits are counted here.
    Covers one forward pass; for a second one, enter again.
    """
    calls: dict[str, int] = {}
    handles = [
        module.register_forward_hook(_hook(model, name, calls, see))
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(
    model: LoopedTransformer, name: str, calls: dict[str, int], see: Callable[[Activation, Tensor, Tensor], None]
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    owner, _, rest = name.partition(".")

    def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        call = calls[name] = calls.get(name, -1) + 1
        match owner:
            case "blocks":
                index, _, part = rest.partition(".")
                loop, block = divmod(int(index), model.spec.blocks)
                activation = Activation(part or "block", block, call if model.spec.tied else loop)
            case "injections":
                activation = Activation("injection", None, call if model.spec.tied else int(rest))
            case _:
                if call:
                    raise InputError(f"{name} was called twice while watched; watch one forward pass at a time")
                activation = Activation("readout" if name == "readout_matrix" else name, None, None)
        see(activation, inputs[0], output)

    return hook
