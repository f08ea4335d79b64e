"""Damage maps: change one position's state at one loop and see which (loop, position) predictions change (arXiv 2607.20594).

What works (measured, RECIPES): damage each word at its own tau(p), the loop at which position p has just become right, by another
word's state of that loop and position; later positions are not solved yet, so they are computed from the damaged state, and
their predictions stay changed. At a fixed loop behind the front next to nothing happens: solved states are locked. Input
injection heals, so every loop is looked at, not only the last.

Three kinds of damage:
- `donor`: position p's state becomes that of another word of the batch, whose right answer at p is another one and, where the
  damage comes at tau, which has converged at p by then [?]. Words without such a donor are left out.
- `noise`: a Gaussian draw with the batch's mean and standard deviation of that loop and position, feature by feature [?].
- `flip`: token p becomes another token in the input that re-enters from then on; the state is left alone (before the first loop
  there is no state but the input: then it starts from the other token too) [?].

Shapes: B words, N positions, P = N + BOS, D width, V classes, S = after + 1 loops since the damage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from loopcore.errors import InputError, Undecided
from loopcore.instruments.accuracy import Words, correct_by_loop
from loopcore.instruments.drawn import Drawn, drawn_words, with_loops
from loopcore.instruments.fits import row
from loopcore.instruments.tau import convergence_times
from loopcore.looped import Steppable
from loopcore.tasks.task import generator

__all__ = ["Damage", "DamageKind", "DamageMap", "damage_maps"]

DamageKind = Literal["donor", "noise", "flip"]


@dataclass(frozen=True)
class DamageMap:
    """What one kind of damage to one position does, over the damaged words. Row s is s loops after the damage."""

    kind: DamageKind
    position: int
    """The damaged position p, from 0."""
    at: int | None
    """Loops before the damage; None: each word's own tau(p)."""
    words: int
    damaged: int
    """Words that were damaged; the shares below are of these. The map is empty where there are none."""
    changed_SN: tuple[tuple[float, ...], ...]
    """Share of words whose prediction differs from the undamaged run's at the same loop."""
    moved_SN: tuple[tuple[float, ...], ...]
    """Mean of |h' - h| / |h|, how far the state is from the undamaged one."""

    def rows(self) -> list[dict[str, Any]]:
        """One row an entry, for the registry: instrument, axes, value, low, high."""
        axes = {"kind": self.kind, "patched": self.position, "at": "tau" if self.at is None else self.at}
        return [
            row(f"damage_{of}", {**axes, "after": s, "position": i}, value)
            for of, shares_SN in (("changed", self.changed_SN), ("moved", self.moved_SN))
            for s, shares_N in enumerate(shares_SN)
            for i, value in enumerate(shares_N)
        ]


@dataclass(frozen=True)
class Damage:
    """A map, and the onsets behind it that the cone's edge is fitted to."""

    map: DamageMap
    onset_BN: Tensor
    """long: loops after the damage from which the prediction stays changed to the last watched loop; -1 where it does not."""


class _Watch:
    """One position's damaged run beside the undamaged one of a batch, and what is counted of it: flat in loops."""

    def __init__(self, position: int, at_B: Tensor, donor_B: Tensor | None, used_B: Tensor, after: int, positions: int) -> None:
        self.position, self.after = position, after
        self.at_B, self.donor_B, self.used_B = at_B, donor_B, used_B
        self.h_BPD: Tensor | None = None
        self.e_BPD: Tensor | None = None
        self.onset_BN = torch.full((len(at_B), positions), -1, device=at_B.device)
        self.changed_SN = torch.zeros(after + 1, positions, dtype=torch.float64, device=at_B.device)
        self.moved_SN = torch.zeros_like(self.changed_SN)

    @property
    def last(self) -> int:
        """The last loop that has to be looked at."""
        return int(self.at_B[self.used_B].max()) + self.after if bool(self.used_B.any()) else 0

    def compare(self, t: int, differs_BN: Tensor, moved_BN: Tensor) -> None:
        """Takes in loop t: where predictions differ, and how far states are apart."""
        since_B = t - self.at_B
        watched_B = self.used_B & (since_B >= 0) & (since_B <= self.after)
        begins_BN = torch.where(self.onset_BN >= 0, self.onset_BN, since_B.unsqueeze(-1))
        now_BN = torch.where(differs_BN, begins_BN, -1)
        self.onset_BN = torch.where(watched_B.unsqueeze(-1), now_BN, self.onset_BN)
        since_S = since_B[watched_B]
        self.changed_SN.index_add_(0, since_S, differs_BN[watched_B].double())
        self.moved_SN.index_add_(0, since_S, moved_BN[watched_B].double())


@torch.inference_mode()
def damage_maps(
    model: Steppable,
    task: Words,
    *,
    words: int,
    length: int,
    loops: int,
    positions: Sequence[int] = (1, 2),
    kind: DamageKind = "donor",
    at: int | None = None,
    after: int | None = None,
    correct_TBN: Tensor | None = None,
    seed: int = 0,
    split: str = "held_out",
    batch: int = 256,
) -> list[Damage]:
    """The damage of each of `positions`, one at a time, watched for `after` loops (None: as many as `loops`) after it.

    `at` = None damages each word at its own tau(p) within `loops` loops and leaves out words whose position p does not converge;
    a number damages all of them after that many loops, 0 being before the first. `correct_TBN` is what `correct_by_loop` gave
    for the same words, loops and seed, where it is at hand. The undamaged run and one a position go side by side, so memory
    does not grow with the loops watched.

    Raises InputError for a position or loop that is none, Undecided for an untied model without weights for the loops watched
    and for states that are not finite.
    """
    after = loops if after is None else after
    _check(task, length, loops, positions, kind, at, after)
    if (why := with_loops(model, (loops if at is None else at) + after)) is not None:
        raise Undecided(f"{why}: damage is watched for {after} loops after it; watch fewer")
    tau_BN = None
    if at is None:
        if correct_TBN is None:
            correct_TBN = correct_by_loop(
                model, task, words=words, length=length, loops=loops, seed=seed, split=split, batch=batch
            )
        assert correct_TBN.shape == (loops, words, length), "correct_TBN of other words or loops"
        tau_BN = convergence_times(correct_TBN)
    found: dict[int, list[_Watch]] = {p: [] for p in positions}
    for drawn in drawn_words(model, task, words=words, length=length, seed=seed, split=split, batch=batch):
        for watch in _run(model, task, drawn, positions, kind, at, after, tau_BN, loops, seed):
            found[watch.position].append(watch)
    return [_damage(watches, kind, at, words) for watches in found.values()]


def _check(task: Words, length: int, loops: int, positions: Sequence[int], kind: DamageKind, at: int | None, after: int) -> None:
    if not positions or any(not 0 <= p < length for p in positions) or len(set(positions)) < len(positions):
        raise InputError(f"expected different positions from 0 to {length - 1} to damage, got {list(positions)}")
    if min(loops, after) < 1 or (at is not None and at < 0):
        raise InputError(f"expected loops and after of at least 1 and at of at least 0, got {loops}, {after} and {at}")
    if kind == "flip" and getattr(task, "vocabulary", 0) < 2:
        raise InputError("a token can be flipped where there is another one: the task needs a vocabulary of at least 2")


def _run(
    model: Steppable,
    task: Words,
    drawn: Drawn,
    positions: Sequence[int],
    kind: DamageKind,
    at: int | None,
    after: int,
    tau_BN: Tensor | None,
    loops: int,
    seed: int,
) -> list[_Watch]:
    """The undamaged run of a batch with a damaged one beside it for each position."""
    tokens_BN, targets_BN = drawn.tokens_BN, drawn.targets_BN
    B, N = targets_BN.shape
    watches = []
    for p in positions:
        if tau_BN is None:
            assert at is not None
            at_B, used_B = torch.full((B,), at, device=tokens_BN.device), torch.ones(B, dtype=torch.bool, device=tokens_BN.device)
        else:
            at_B = tau_BN[drawn.first : drawn.first + B, p].to(tokens_BN.device)
            used_B = at_B <= loops
        donor_B = None
        if kind == "donor":
            donor_B, has_donor_B = _donors(targets_BN[:, p], at_B if tau_BN is not None else None)
            used_B = used_B & has_donor_B
        watches.append(_Watch(p, at_B, donor_B, used_B, after, N))

    e_BPD = model.embed(tokens_BN)
    h_BPD = model.start(e_BPD)
    lead = e_BPD.shape[1] - N
    for watch in watches:
        watch.h_BPD, watch.e_BPD = h_BPD, e_BPD
    for t in range(max(watch.last for watch in watches) + 1):
        if t:
            h_BPD = model.loop(h_BPD, e_BPD, t - 1)
        predicted_BN = model.readout(h_BPD).argmax(-1)
        norm_BN = h_BPD[:, lead:].float().norm(dim=-1).clamp_min(1e-12)
        for watch in watches:
            if t > watch.last:
                continue
            assert watch.h_BPD is not None
            assert watch.e_BPD is not None
            if t:
                watch.h_BPD = model.loop(watch.h_BPD, watch.e_BPD, t - 1)
            hit_B = watch.used_B & (watch.at_B == t)
            if bool(hit_B.any()):
                stream = generator("damage", kind, seed, drawn.batch, watch.position, t)
                _hurt(model, task, watch, hit_B, h_BPD, tokens_BN, kind, t, lead, stream)
            moved_BN = (watch.h_BPD - h_BPD)[:, lead:].float().norm(dim=-1) / norm_BN
            watch.compare(t, model.readout(watch.h_BPD).argmax(-1) != predicted_BN, moved_BN)
    return watches


def _donors(target_B: Tensor, tau_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """(donor_B, found_B): for each word the next one, in a circle, with another answer that it has found by this word's tau."""
    B = len(target_B)
    following_BB = (torch.arange(B, device=target_B.device).unsqueeze(-1) + torch.arange(1, B + 1, device=target_B.device)) % B
    suits_BB = target_B[following_BB] != target_B.unsqueeze(-1)
    if tau_B is not None:
        suits_BB &= tau_B[following_BB] <= tau_B.unsqueeze(-1)
    nearest_B1 = suits_BB.int().argmax(-1, keepdim=True)
    return following_BB.gather(1, nearest_B1).squeeze(-1), suits_BB.any(-1)


def _hurt(
    model: Steppable,
    task: Words,
    watch: _Watch,
    hit_B: Tensor,
    h_BPD: Tensor,
    tokens_BN: Tensor,
    kind: DamageKind,
    t: int,
    lead: int,
    stream: torch.Generator,
) -> None:
    """Damages the rows of `hit_B` in the watched run, from the undamaged state h_BPD of the same loop."""
    assert watch.h_BPD is not None
    assert watch.e_BPD is not None
    p = lead + watch.position
    # Until now these rows are the undamaged ones; taken over from there, so that not even rounding tells them apart.
    hurt_BPD = torch.where(hit_B[:, None, None], h_BPD, watch.h_BPD)
    if kind == "donor":
        hurt_BPD[hit_B, p] = h_BPD[watch.donor_B, p][hit_B]
    elif kind == "noise":
        noise_BD = torch.randn(h_BPD[:, p].shape, generator=stream).to(h_BPD)
        spread_D = h_BPD[:, p].std(0, correction=0)
        hurt_BPD[hit_B, p] = (h_BPD[:, p].mean(0) + spread_D * noise_BD)[hit_B]
    else:
        vocabulary: int = task.vocabulary  # pyright: ignore[reportAttributeAccessIssue] - checked on entry
        other_B = torch.randint(1, vocabulary, tokens_BN.shape[:1], generator=stream).to(tokens_BN.device)
        flipped_BN = tokens_BN.clone()
        flipped_BN[:, watch.position] = (tokens_BN[:, watch.position] + other_B) % vocabulary
        e_BPD = model.embed(flipped_BN)
        watch.e_BPD = torch.where(hit_B[:, None, None], e_BPD, watch.e_BPD)
        if t == 0:
            hurt_BPD = torch.where(hit_B[:, None, None], model.start(e_BPD), hurt_BPD)
    watch.h_BPD = hurt_BPD


def _damage(watches: list[_Watch], kind: DamageKind, at: int | None, words: int) -> Damage:
    """The batches of one position put together."""
    damaged = sum(int(watch.used_B.sum()) for watch in watches)
    changed_SN = torch.stack([watch.changed_SN for watch in watches]).sum(0).cpu()
    moved_SN = torch.stack([watch.moved_SN for watch in watches]).sum(0).cpu()
    if not bool(moved_SN.isfinite().all()):
        raise Undecided("the states under damage are not finite; measure fewer loops, or a model that has not diverged")
    shares = [tuple(map(tuple, (of_SN / damaged).tolist())) if damaged else () for of_SN in (changed_SN, moved_SN)]
    return Damage(
        DamageMap(kind, watches[0].position, at, words, damaged, *shares),
        torch.cat([watch.onset_BN for watch in watches]).cpu(),
    )
