"""A population: members that are runs of their own, and a step that makes all of theirs at once.

Shapes in names: M members, R rows (members in one pass), B batch, N positions, V classes, C columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loopcore.device import autocast_dtype
from loopcore.errors import InputError
from loopcore.model import LoopedTransformer
from loopcore.population.forward import Forward
from loopcore.population.layout import Layout, Storage
from loopcore.population.members import Member, one_shape
from loopcore.population.optimizer import AdamW, Due, clip
from loopcore.scaling import multipliers
from loopcore.specs.train import TrainSpec
from loopcore.tasks.task import Batch
from loopcore.training import EVALUATED_AT_ONCE, Progress

__all__ = ["Population"]

WIDEST_BYTES = 3_000_000  # of the widest activation of one pass on the CPU; beyond it a pass outgrows the caches


class Population:
    """The runs of `specs`, trained as one batch on `device` (the specs' if empty) and `threads` CPU threads (empty: as they are).

    Members share model, task, contract, batch, precision and device; seed, learning rate and the rest of the optimizer, scaling
    rule and number of steps are each one's own. So are data stream, stage, cool-down, divergence and end: a member that is over
    leaves the batch, and nothing that happens to one reaches another.

    Results are those of each member trained alone, up to rounding (fp32: losses and weights within 1e-5 after 50 steps). A
    population that is put down and taken up again is the one that never was, bit for bit on one device and thread count.

    `at_once` is the most members in one pass: empty lets the CPU take what its caches hold, and a GPU all. `compile` compiles a
    loop by torch.compile, once for each shape: on a CPU half a minute a shape, which gained nothing where it was measured.

    Raises InputError for specs that are not one population, and what `Training` raises.
    """

    def __init__(
        self,
        specs: Sequence[TrainSpec],
        *,
        device: str | None = None,
        threads: int | None = None,
        at_once: int | None = None,
        compile: bool = False,
    ) -> None:
        one_shape(specs)
        if at_once is not None and at_once < 1:
            raise InputError(f"expected at least 1 member at once, got {at_once}")
        if threads is not None:
            torch.set_num_threads(threads)
        self.specs = tuple(specs)
        self.members = tuple(Member(spec, device=device) for spec in specs)
        first = self.members[0]
        for member in self.members[1:]:
            member.task = first.task
        self.device = first.device
        assert isinstance(first.model, LoopedTransformer), "one_shape lets transformers through"
        layout = Layout(first.model)
        self._storage = Storage.empty(layout, len(specs), self.device)
        for row, member in enumerate(self.members):
            member.move_into(self._storage, row)
        self._forward = Forward(
            first.model,
            layout,
            [multipliers(spec.scaling, spec.model, spec.scaling_loops) for spec in specs],
            device=self.device,
            dtype=autocast_dtype(specs[0].precision, self.device),
            compile=compile,
        )
        self._optimizer = AdamW(self._storage, self.members)
        self._at_once = at_once
        self._stopped: set[int] = set()

    @property
    def running(self) -> list[int]:
        """Numbers of the members that a step would train."""
        return [m for m, member in enumerate(self.members) if m not in self._stopped and not member.finished]

    @property
    def finished(self) -> bool:
        return not self.running

    def stop(self, member: int) -> None:
        """Leaves a member where it is from now on, as an early-stopping search asks; its own outcome stays `running`."""
        if not 0 <= member < len(self.members):
            raise InputError(f"expected a member from 0 to {len(self.members) - 1}, got {member}")
        self._stopped.add(member)

    def advance(self) -> dict[int, Progress]:
        """`Training.advance` of every running member, by its number."""
        metrics = self.step()
        found = self.evaluate([m for m in metrics if self.members[m]._evaluation_due])
        return {m: self.members[m]._progress(of_step, found.get(m)) for m, of_step in metrics.items()}

    def step(self) -> dict[int, dict[str, float]]:
        """`Training.step` of every running member, by its number."""
        running = self.running
        loops = {m: self.members[m]._drawn_loops() for m in running}
        factors = {m: self.members[m]._lr_factor() for m in running}
        batches = self._training_batches(running)
        metrics: dict[int, dict[str, float]] = {}
        for rows in self._passes(running, loops):
            losses_R, norms_R, grads_RC = self._gradients(rows, [batches[m] for m in rows], [loops[m] for m in rows])
            values = torch.stack([losses_R, norms_R], dim=1).tolist()  # one wait for the device
            due = []
            for r, (m, (loss, norm)) in enumerate(zip(rows, values, strict=True)):
                if math.isfinite(loss) and math.isfinite(norm):
                    due.append((r, Due(m, factors[m], loops[m])))
                metrics[m] = self.members[m]._counted(loss, norm, factors[m], loops[m])
            if len(due) < len(rows):
                grads_RC = grads_RC[[r for r, _ in due]]
            self._optimizer.step([member for _, member in due], grads_RC)
        return {m: metrics[m] for m in running}

    @torch.no_grad()
    def evaluate(
        self, members: Sequence[int] | None = None, *, length: int | None = None, loops: int | None = None
    ) -> dict[int, dict[str, float]]:
        """`Training.evaluate` of `members` (all of them if empty), by their numbers."""
        asked = range(len(self.members)) if members is None else members
        lengths = {m: length or self.members[m].stages.length for m in asked}
        loop_counts = {m: loops or self.members[m].stages.loops_for(lengths[m]) for m in asked}
        drawn: dict[tuple[int, int], Batch] = {}
        found: dict[int, dict[str, float]] = {}
        for n in sorted(set(lengths.values())):
            of_length = _by_falling_loops([m for m in asked if lengths[m] == n], loop_counts)
            sequences = self.specs[0].evaluate_on
            at_once = max(1, EVALUATED_AT_ONCE // (n * sequences))
            for first in range(0, len(of_length), at_once):
                rows = of_length[first : first + at_once]
                for m in rows:
                    if (key := (self.specs[m].seed, n)) not in drawn:
                        drawn[key] = self.members[m]._draw("held_out", 0, sequences, n)
                scores = self._scored(rows, [drawn[self.specs[m].seed, n] for m in rows], [loop_counts[m] for m in rows])
                for m, of_member in zip(rows, scores, strict=True):
                    found[m] = of_member | {"length": n, "loops": loop_counts[m]}
        return {m: found[m] for m in asked}

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that the population is. `members[m].state_dict()` is one member, as `Training` has it."""
        return {"members": [member.state_dict() for member in self.members], "stopped": sorted(self._stopped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the population that `state` was taken from; its specs have to be these. Raises InputError as a member does."""
        states = state["members"]
        if len(states) != len(self.members):
            raise InputError(
                f"the state has {len(states)} members, this population {len(self.members)}; build it of the same specs"
            )
        for member, of_member in zip(self.members, states, strict=True):
            member.load_state_dict(of_member)
        self._stopped = set(state["stopped"])

    def _training_batches(self, running: Sequence[int]) -> dict[int, Batch]:
        """Each member's next batch; members with one seed at one step draw it once."""
        drawn: dict[tuple[int, int, int], Batch] = {}
        batches: dict[int, Batch] = {}
        for m in running:
            member = self.members[m]
            key = member.spec.seed, member.step_count, member.stages.index
            if key not in drawn:
                drawn[key] = member._training_batch()
            batches[m] = drawn[key]
        return batches

    def _passes(self, running: Sequence[int], loops: dict[int, int]) -> Iterator[list[int]]:
        """The running members in passes of equal length, most loops first, in parts as even as can be."""
        spec = self.specs[0]
        for n in sorted({self.members[m].stages.length for m in running}):
            of_length = _by_falling_loops([m for m in running if self.members[m].stages.length == n], loops)
            widest = 4 * spec.batch * (n + spec.model.bos) * spec.model.width * max(3, spec.model.feedforward)
            if self._at_once is not None:
                most = self._at_once
            else:
                most = max(1, WIDEST_BYTES * torch.get_num_threads() // widest) if self.device.type == "cpu" else len(of_length)
            passes = math.ceil(len(of_length) / most)
            edges = [len(of_length) * k // passes for k in range(passes + 1)]
            yield from (of_length[start:stop] for start, stop in itertools.pairwise(edges))

    def _gradients(self, rows: list[int], batches: list[Batch], loops: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Losses and gradient norms [R] and clipped gradients [R, C] of the rows."""
        weights_RC = self._storage.rows(rows).detach().requires_grad_()
        tokens_RBN, targets_RBN = self._stacked(batches)
        losses_R = self._forward.losses(rows, weights_RC, tokens_RBN, targets_RBN, loops, self._reveal)
        # Rows do not mix, so the gradient of the sum is each row's own, whatever the others' losses are.
        (grads_RC,) = torch.autograd.grad(losses_R.sum(), weights_RC)
        norms_R = torch.linalg.vector_norm(grads_RC, dim=1)
        clip(grads_RC, norms_R, [self.specs[m].optimizer.clip or math.inf for m in rows])
        return losses_R.detach(), norms_R, grads_RC

    def _scored(self, rows: list[int], batches: list[Batch], loops: list[int]) -> list[dict[str, float]]:
        """Loss and accuracies of each row on its batch, a part of it at a time."""
        tokens_RBN, targets_RBN = self._stacked(batches)
        R, B, N = tokens_RBN.shape
        weights_RC = self._storage.rows(rows)
        losses_R = torch.zeros(R, dtype=torch.float64, device=self.device)
        right_RBN: list[Tensor] = []
        part = max(1, EVALUATED_AT_ONCE // (R * N))
        for tokens, targets in zip(tokens_RBN.split(part, dim=1), targets_RBN.split(part, dim=1), strict=True):
            logits_RBNV = self._forward.logits(rows, weights_RC, tokens, loops, self._reveal)
            losses = F.cross_entropy(logits_RBNV.flatten(0, 2), targets.flatten(), reduction="none")
            losses_R += losses.view(R, -1).sum(1, dtype=torch.float64)
            right_RBN.append(logits_RBNV.argmax(-1) == targets)
        correct_RBN = torch.cat(right_RBN, dim=1)
        tokens_R, exact_R = correct_RBN.double().mean((1, 2)), correct_RBN.all(2).double().mean(1)
        return [
            {"loss": loss, "token_accuracy": token_accuracy, "exact_accuracy": exact_accuracy}
            for loss, token_accuracy, exact_accuracy in torch.stack([losses_R / (B * N), tokens_R, exact_R], dim=1).tolist()
        ]

    @property
    def _reveal(self) -> float | None:
        return self.members[0].stages.reveal_per_loop  # the contract is everybody's

    def _stacked(self, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        tokens_RBN = torch.stack([batch.tokens for batch in batches])
        targets_RBN = torch.stack([batch.targets for batch in batches])
        return tokens_RBN.to(self.device, non_blocking=True), targets_RBN.to(self.device, non_blocking=True)


def _by_falling_loops(members: list[int], loops: dict[int, int]) -> list[int]:
    return sorted(members, key=lambda m: -loops[m])
