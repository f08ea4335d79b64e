"""The stepper that runs a looped model, in buffers that are filled in place.

Shapes: S slots, P = N + BOS positions, D width, V classes. A bucket's buffers hold the rows of its slots; they double when
more rows join and are never made anew for a pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loopcore.batching.stepper import Reading
from loopcore.halting import LOGITS_RULES, logits_residual, state_residual
from loopcore.model import LoopedTransformer
from loopcore.recall import RecallNet

__all__ = ["ModelStepper"]


@dataclass
class _Bucket:
    """Buffers of one length, [S, ...] each, all with the same room."""

    length: int
    room: int = 0
    lengths: list[int] = field(default_factory=list)  # the words' own, by slot
    rows: dict[str, Tensor] = field(default_factory=dict)
    latest: dict[int, Tensor] = field(default_factory=dict)  # logits_NV by slot, of readouts after the current loop

    def reserve(self, slots: int) -> None:
        """Makes room for `slots` rows, doubling."""
        if slots <= self.room:
            return
        self.room = max(8, slots, 2 * self.room)
        for name, held in self.rows.items():
            grown = held.new_zeros(self.room, *held.shape[1:])
            grown[: held.shape[0]] = held
            self.rows[name] = grown
        self.lengths.extend([0] * (self.room - len(self.lengths)))

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """The buffer `name`, made on first use with rows shaped as those of `like`."""
        if name not in self.rows:
            self.rows[name] = like.new_zeros(self.room, *like.shape[1:])
        return self.rows[name]


class ModelStepper:
    """Steps a `LoopedTransformer` or a `RecallNet` on the device and in the precision that its weights have.

    A tied model takes one pass of its blocks a bucket, whatever loops its rows are at. One whose map depends on the loop
    (untied, scan-offset) takes one pass for each loop count among them: right, but with less to share.
    """

    def __init__(self, model: LoopedTransformer | RecallNet) -> None:
        self.model = model.eval()
        self.vocabulary = model.vocabulary
        self.max_length, self.pads, self._bos = None, False, 0  # a convnet sees zeros beyond the word, so it cannot be padded
        if isinstance(model, LoopedTransformer):
            self.max_length = model.spec.max_length if model.spec.positions == "learned" else None
            self.pads = model.spec.causal
            self._bos = int(model.spec.bos)
        self.max_loops = model.untied_loops
        self._device = next(model.parameters()).device
        self._buckets: dict[int, _Bucket] = {}

    @torch.inference_mode()
    def admit(self, bucket: int, slots: Sequence[int], words: Sequence[Sequence[int]], *, remember: bool) -> None:
        held = self._buckets.setdefault(bucket, _Bucket(bucket))
        padded = [[*word, *[0] * (bucket - len(word))] for word in words]
        e_SPD = self.model.embed(torch.tensor(padded, device=self._device))
        h_SPD = self.model.start(e_SPD)
        held.reserve(max(slots) + 1)
        at = _index(slots, self._device)
        held.buffer("embedded", e_SPD)[at] = e_SPD
        held.buffer("state", h_SPD)[at] = h_SPD
        if remember:  # the step before the first one is zero
            held.buffer("before", h_SPD)[at] = h_SPD
            held.buffer("before2", h_SPD)[at] = h_SPD
        for slot, word in zip(slots, words, strict=True):
            held.lengths[slot] = len(word)

    @torch.inference_mode()
    def step(self, bucket: int, slots: Sequence[int], loops: Sequence[int], *, remember: bool) -> None:
        held = self._buckets[bucket]
        if self.model.position_free_of_loop:
            groups = {0: list(slots)}
        else:
            groups = defaultdict(list)
            for slot, loop in zip(slots, loops, strict=True):
                groups[loop].append(slot)
        stepped: list[tuple[slice | Tensor, Tensor]] = []
        for loop, members in groups.items():
            at = _index(members, self._device)
            stepped.append((at, self.model.loop(held.rows["state"][at], held.rows["embedded"][at], loop)))
        for at, h_SPD in stepped:  # all computed: from here on nothing raises
            if remember:
                held.buffer("before2", h_SPD)[at] = held.buffer("before", h_SPD)[at]
                held.buffer("before", h_SPD)[at] = held.rows["state"][at]
            held.rows["state"][at] = h_SPD
        held.latest.clear()

    @torch.inference_mode()
    def readout(self, bucket: int, slots: Sequence[int], *, logits: bool) -> list[Reading]:
        held = self._buckets[bucket]
        logits_SNV = self.model.readout(held.rows["state"][_index(slots, self._device)]).float()
        lengths = [held.lengths[slot] for slot in slots]
        # One copy from the device for the whole batch: padding is cut off afterwards, on lists.
        predictions = logits_SNV.argmax(-1).tolist()
        finite_SN = logits_SNV.isfinite().all(-1).tolist()
        arrays = logits_SNV.cpu().numpy() if logits else None
        held.latest.update(zip(slots, logits_SNV, strict=True))
        return [
            Reading(tuple(predictions[i][:length]), all(finite_SN[i][:length]), None if arrays is None else arrays[i, :length])
            for i, length in enumerate(lengths)
        ]

    @torch.inference_mode()
    def residuals(self, bucket: int, slots: Sequence[int], kind: str) -> list[float]:
        held = self._buckets[bucket]
        at = _index(slots, self._device)
        valid_SN = self._valid(held, slots)
        if kind not in LOGITS_RULES:
            h_SND, before_SND, before2_SND = (held.rows[name][at][:, self._bos :] for name in ("state", "before", "before2"))
            return state_residual(kind, h_SND, before_SND, before2_SND, valid_SN).tolist()
        logits_SNV = torch.stack([held.latest[slot] for slot in slots])
        before_SNV = held.buffer("logits", logits_SNV)
        residual_S = logits_residual(kind, logits_SNV, before_SNV[at], valid_SN)
        before_SNV[at] = logits_SNV
        return residual_S.tolist()

    @torch.inference_mode()
    def leave(self, bucket: int, slots: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        if not moves:
            return
        held = self._buckets[bucket]
        sources, targets = ([move[side] for move in moves] for side in (0, 1))
        source_S, target_S = torch.tensor(sources, device=self._device), torch.tensor(targets, device=self._device)
        for rows in held.rows.values():
            rows[target_S] = rows[source_S]
        for source, target in moves:
            held.lengths[target] = held.lengths[source]

    def close(self, bucket: int) -> None:
        self._buckets.pop(bucket, None)

    def _valid(self, held: _Bucket, slots: Sequence[int]) -> Tensor | None:
        """valid_SN, or None where no row is padded."""
        lengths = [held.lengths[slot] for slot in slots]
        if all(length == held.length for length in lengths):
            return None
        return torch.arange(held.length, device=self._device) < torch.tensor(lengths, device=self._device).unsqueeze(-1)


def _index(slots: Sequence[int], device: torch.device) -> slice | Tensor:
    """A slice, which makes a view, where the slots follow each other; else an index."""
    if slots[-1] - slots[0] + 1 == len(slots) and list(slots) == list(range(slots[0], slots[-1] + 1)):
        return slice(slots[0], slots[-1] + 1)
    return torch.tensor(slots, device=device)
