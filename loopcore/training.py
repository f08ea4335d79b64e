"""One training run as an object: it steps, evaluates, is promoted from stage to stage, and can be put down and taken up again.

Nothing in a run depends on when or how often it was interrupted: weights come from the seed, batch i is a pure function of
(seed, i), and `state_dict` has all the rest. On one device and thread count a resumed run is the uninterrupted one, bit for bit.

Shapes in names: B batch, N positions, V classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from loopcore.contract import Stages
from loopcore.device import autocast, autocast_dtype, resolve_device
from loopcore.errors import InputError
from loopcore.model import build_model
from loopcore.optim import learning_rate_factor, make_optimizer
from loopcore.recall import progressive_draw, progressive_loss
from loopcore.specs.train import TrainSpec
from loopcore.tasks import load_task
from loopcore.tasks.pools import rows_of_batch
from loopcore.tasks.task import Batch, Split, generator
from loopcore.tasks.words import WordProblem

__all__ = ["Outcome", "Progress", "Training"]

Outcome = Literal["running", "solved", "unsolved", "finished", "diverged"]

EVALUATED_AT_ONCE = 16_384  # positions of one forward pass in an evaluation: bounds its memory
OF_START = {"readout_init", "untied_loops", "max_length"}  # model fields that change no function that weights of one shape have
CALLED_OFF = (
    2.0  # times the errors that a cool-down may begin with: with more, the loss has risen again and the rate goes back up
)
SAMPLING_ERROR = 0.03  # all pairs of a group are evaluated once the held-out sample is this near to what ends their stage


@dataclass(frozen=True)
class Progress:
    """What `Training.advance` did."""

    step: int
    """Optimizer steps so far."""
    metrics: dict[str, float]
    """What `Training.step` gave, and if there was an evaluation what that gave, its names with `held_out_` before them."""
    evaluated: bool


class Training:
    """The run of `spec`, on `device` (the spec's if empty) and `threads` CPU threads (as they are if empty).

    Raises UnknownGroup, DeviceUnavailable, and InputError for a task that has no data for the first stage.

    A spec with `start_from` names a job, which only a registry knows: give the weights by `start_weights` before the first step.

    run = Training(TrainSpec(), threads=2)
    while not run.finished:
        run.advance()
    run.figures()
    """

    def __init__(self, spec: TrainSpec, *, device: str | None = None, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.spec = spec
        self.device = resolve_device(device or spec.device)
        autocast_dtype(spec.precision, self.device)  # raises now what the first step would
        torch.manual_seed(spec.seed)
        self.task = load_task(spec.task)
        self.stages = Stages(spec.contract)
        self.model = build_model(spec, self.task).to(self.device)
        self.optimizer = make_optimizer(self.model, spec)
        self.step_count = 0
        self._has_weights = spec.start_from is None
        self.cooldown_from: int | None = None
        """Optimizer step (from 0) that the cool-down begins at; None while nobody knows, and where it was called off."""
        self.diverged_at: int | None = None
        """The optimizer step (from 1) whose loss or gradient was not finite. It changed no weight."""
        self.evaluation: dict[str, float] | None = None
        """The newest evaluation, with the `step` it was made after."""
        self.best: dict[str, float] | None = None
        """The best evaluation of this stage: highest token accuracy, or lowest loss where only the loss counts."""
        for split in ("train", "held_out"):
            self._draw(split, 0, 1)

    @property
    def finished(self) -> bool:
        return self.diverged_at is not None or self.step_count >= self._last_step

    @property
    def outcome(self) -> Outcome:
        """`solved`: the last evaluation met the contract on its last stage; `unsolved`: it did not; `finished`: a task in which
        only the loss counts came to its end; `diverged`: a loss or a gradient was not finite."""
        if self.diverged_at is not None:
            return "diverged"
        if not self.finished:
            return "running"
        if self.task.score == "loss":
            return "finished"
        held_out = self.evaluation
        met = (
            held_out is not None and held_out["length"] == self.stages.length and self.stages.reached(held_out["token_accuracy"])
        )
        return "solved" if self.stages.last and met else "unsolved"

    def advance(self) -> Progress:
        """One optimizer step, then what is due: evaluation, promotion, the beginning of the cool-down."""
        metrics = self.step()
        return self._progress(metrics, self.evaluate() if self._evaluation_due else None)

    def step(self) -> dict[str, float]:
        """One optimizer step on the next batch; `loss` (nats, on the last loop only, or the progressive one) and `grad_norm` are
        from before it; `loops` is what was drawn where the contract has extra loops.

        A loss or gradient that is not finite is no exception: the weights stay as they are and the run is `diverged`.
        """
        factor = self._lr_factor()
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        loops = self._drawn_loops()
        loss = self._loss(self._training_batch(), loops)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip = self.spec.optimizer.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        loss_value, norm_value = torch.stack([loss.detach(), norm]).tolist()  # one wait for the device
        if math.isfinite(loss_value) and math.isfinite(norm_value):
            self.optimizer.step()
        return self._counted(loss_value, norm_value, factor, loops)

    @torch.inference_mode()
    def evaluate(self, *, length: int | None = None, loops: int | None = None) -> dict[str, float]:
        """Held-out `loss` (nats a position), `token_accuracy` (share of positions) and `exact_accuracy` (share of sequences that
        are right at every position), always on the same sequences. Empty `length` and `loops`: the stage's, T(n) of the contract.
        """
        length = length or self.stages.length
        loops = loops or self.stages.loops_for(length)
        return self._scored(self._draw("held_out", 0, self.spec.evaluate_on, length), loops) | {"length": length, "loops": loops}

    @torch.inference_mode()
    def pair_accuracy(self) -> float:
        """Share of all |G|^2 pairs of a word task's elements that are right at both positions, at T(2) loops."""
        assert isinstance(self.task, WordProblem), "only a group has pairs"
        pairs = self.task.pairs(torch.arange(self.task.group.order**2))
        return self._scored(pairs, self.stages.loops_for(2))["exact_accuracy"]

    def _scored(self, batch: Batch, loops: int) -> dict[str, float]:
        """Loss and accuracies of a batch, a part of it at a time."""
        at_once = max(1, EVALUATED_AT_ONCE // batch.tokens.shape[1])
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        right_BN: list[Tensor] = []
        for tokens_BN, targets_BN in zip(batch.tokens.split(at_once), batch.targets.split(at_once), strict=True):
            logits_BNV, targets_BN = self._forward(Batch(tokens_BN, targets_BN), loops)
            loss += F.cross_entropy(logits_BNV.flatten(0, 1), targets_BN.flatten(), reduction="sum").double()
            right_BN.append(logits_BNV.argmax(-1) == targets_BN)
        correct_BN = torch.cat(right_BN)
        return {
            "loss": float(loss) / correct_BN.numel(),
            "token_accuracy": float(correct_BN.double().mean()),
            "exact_accuracy": float(correct_BN.all(dim=1).double().mean()),
        }

    def figures(self) -> dict[str, Any]:
        """What the run came to, as JSON values: outcome, steps, stage, the newest evaluation and the best one of the stage."""
        held_out, best = self.evaluation or {}, self.best or {}
        return {
            "outcome": self.outcome,
            "steps": self.step_count,
            "stage": self.stages.index,
            **{name: held_out.get(name) for name in ("length", "loops", "loss", "token_accuracy", "exact_accuracy")},
            **{f"best_{name}": best.get(name) for name in ("step", "loss", "token_accuracy", "exact_accuracy")},
            "cooldown_from": self.cooldown_from,
            "diverged_at": self.diverged_at,
        }

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that the run is: nested dicts of tensors (on the run's device) and JSON values."""
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": {
                name: {key: value.clone() for key, value in self.optimizer.state[parameter].items()}
                for name, parameter in self.model.named_parameters()
                if parameter in self.optimizer.state
            },
            "rng": {"cpu": torch.get_rng_state()}
            | ({"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}),
            "stages": self.stages.state_dict(),
            "stream": {"task": self.task.fingerprint, "index": self.step_count},
            "cooldown_from": self.cooldown_from,
            "diverged_at": self.diverged_at,
            "evaluation": None if self.evaluation is None else dict(self.evaluation),
            "best": None if self.best is None else dict(self.best),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the run that `state` was taken from; its spec has to be this one. Raises InputError where it cannot be."""
        task = state["stream"]["task"]
        if task != self.task.fingerprint:
            raise InputError(
                f"the run was trained on other data than this machine has: {task}, here {self.task.fingerprint}; give it the "
                "data it began with (for the source stdlib that is the same Python), or begin a new run"
            )
        try:
            self.model.load_state_dict(state["model"])
            self._load_optimizer(state["optimizer"])
        except (KeyError, RuntimeError, ValueError) as problem:
            raise InputError(
                f"the state is not one of this run's model ({problem}); load it into a run of its own spec"
            ) from None
        self.stages.load_state_dict(state["stages"])
        self.step_count = state["stream"]["index"]
        self._has_weights |= self.step_count > 0
        self.cooldown_from, self.diverged_at = state["cooldown_from"], state["diverged_at"]
        self.evaluation, self.best = state["evaluation"], state["best"]
        # Nothing here draws from the global generators; a model of one's own with dropout would.
        torch.set_rng_state(state["rng"]["cpu"].cpu())
        if self.device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"].cpu(), self.device)

    def start_weights(self, state: dict[str, Any], *, trained_by: TrainSpec) -> None:
        """Starts this run from the weights of another one's `state_dict` and from nothing else of it: contract, optimizer, data
        stream and schedule begin anew. `trained_by` is that run's spec (a checkpoint has both).

        Raises InputError for weights of another task or of a model of another shape, and for a run that has begun.
        """
        if self.step_count:
            raise InputError(f"the run is at step {self.step_count}; weights can be given before its first step only")
        task = state.get("stream", {}).get("task")
        if task != self.task.fingerprint:
            raise InputError(
                f"the weights to start from were trained on another task: {task}, this run's is {self.task.fingerprint}; start "
                "from a run of the same task"
            )
        ours, theirs = (one.model.model_dump(exclude=OF_START) for one in (self.spec, trained_by))
        if wrong := [f"{name} {theirs[name]} (here {ours[name]})" for name in ours if ours[name] != theirs[name]]:
            raise InputError(f"the weights to start from are of another model: {', '.join(wrong)}; give this run the same model")
        try:
            self.model.load_state_dict(state["model"])
        except (KeyError, RuntimeError) as problem:
            why = " ".join(str(problem).split())
            raise InputError(
                f"the weights to start from are of another shape ({why:.300}); give this run the same model"
            ) from None
        self._has_weights = True

    def _lr_factor(self) -> float:
        """What multiplies the learning rates of the next step. Raises InputError for a run without its weights."""
        assert not self.finished, "the run is over"
        if not self._has_weights:
            raise InputError(
                f"the run starts from the weights of job {self.spec.start_from} and has not been given them: call start_weights "
                "with the state of its checkpoint, or leave start_from out"
            )
        return learning_rate_factor(self.step_count, self.spec.optimizer, steps=self.spec.steps, cooldown_from=self.cooldown_from)

    def _counted(self, loss: float, norm: float, factor: float, loops: int) -> dict[str, float]:
        """Counts a step whose loss and gradient norm were these, and gives its metrics."""
        self.step_count += 1
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.diverged_at = self.step_count
        if self.cooldown_from is None and self._must_cool:
            self.cooldown_from = self.step_count
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr": self.spec.optimizer.lr * factor,
            "length": self.stages.length,
            "loops": loops,
        }

    @property
    def _evaluation_due(self) -> bool:
        due = self.step_count % self.spec.evaluate_every == 0 or self.step_count >= self._last_step
        return due and self.diverged_at is None

    def _progress(self, metrics: dict[str, float], found: dict[str, float] | None) -> Progress:
        """What a step and the evaluation after it, if there was one, lead to."""
        if found is None:
            return Progress(self.step_count, metrics, evaluated=False)
        metrics = metrics | {f"held_out_{name}": value for name, value in found.items()}
        accuracy = found["token_accuracy"]
        if self.stages.operator:
            accuracy = found["exact_accuracy"]
            if accuracy >= self.stages.spec.operator_at - SAMPLING_ERROR:
                metrics["pair_accuracy"] = accuracy = self.pair_accuracy()
        self._judge(found, accuracy)
        return Progress(self.step_count, metrics, evaluated=True)

    @property
    def _last_step(self) -> int:
        if self.cooldown_from is None:
            return self.spec.steps
        return min(self.spec.steps, self.cooldown_from + self.spec.optimizer.cooldown)

    @property
    def _must_cool(self) -> bool:
        """Whether no more steps are left than a cool-down takes: a run that found no time for one ends with it (2404.06395)."""
        optimizer = self.spec.optimizer
        return optimizer.decay == "cooldown" and self.step_count >= self.spec.steps - optimizer.cooldown > 0

    def _judge(self, found: dict[str, float], accuracy: float) -> None:
        """What an evaluation of the current stage leads to; `accuracy` is the one that the stage goes by."""
        self.evaluation = {"step": self.step_count, **found}
        by_loss = self.task.score == "loss"
        if self.best is None or (
            found["loss"] < self.best["loss"] if by_loss else found["token_accuracy"] > self.best["token_accuracy"]
        ):
            self.best = dict(self.evaluation)
        if by_loss:
            return
        optimizer = self.spec.optimizer
        if self.stages.advance(accuracy):
            self.best = None
        elif self.stages.last and optimizer.decay == "cooldown" and not self._must_cool:
            if self.cooldown_from is None and accuracy >= optimizer.cooldown_at:
                self.cooldown_from = self.step_count
            elif self.cooldown_from is not None and 1.0 - accuracy > CALLED_OFF * (1.0 - optimizer.cooldown_at):
                self.cooldown_from = None

    def _loss(self, batch: Batch, loops: int) -> Tensor:
        """What a step makes smaller, in nats a position."""
        if not self.spec.progressive:
            logits_BNV, targets_BN = self._forward(batch, loops)
            return F.cross_entropy(logits_BNV.flatten(0, 1), targets_BN.flatten())
        n, k = progressive_draw(loops, generator("progressive", self.spec.seed, self.step_count))
        tokens_BN, targets_BN = (part.to(self.device, non_blocking=True) for part in batch)
        with autocast(self.spec.precision, self.device):
            return progressive_loss(self.model, tokens_BN, targets_BN, loops=loops, alpha=self.spec.progressive, n=n, k=k)

    def _drawn_loops(self) -> int:
        """Loops of the next step: T, or with extra loops uniform in T .. floor(extra_loops T), by seed and step alone."""
        loops = self.stages.loops
        most = self.spec.contract.most_drawn(loops)
        if most == loops:
            return loops
        return int(torch.randint(loops, most + 1, (), generator=generator("loops", self.spec.seed, self.step_count)))

    def _training_batch(self) -> Batch:
        """The next step's batch: a function of seed, stage and step alone."""
        if not self.stages.operator:
            return self._draw("train", self.step_count, self.spec.batch)
        assert isinstance(self.task, WordProblem), "only a group has pairs"
        pairs = self.task.group.order**2
        return self.task.pairs(rows_of_batch(pairs, "operator", self.spec.seed, index=self.step_count, size=self.spec.batch))

    def _draw(self, split: Split, index: int, size: int, length: int | None = None) -> Batch:
        return self.task.random_batch(
            seed=self.spec.seed, split=split, index=index, size=size, length=length or self.stages.length
        )

    def _forward(self, batch: Batch, loops: int | None = None) -> tuple[Tensor, Tensor]:
        """Logits in fp32 after the last loop, and targets, on the device."""
        tokens_BN, targets_BN = (part.to(self.device, non_blocking=True) for part in batch)
        with autocast(self.spec.precision, self.device):
            logits_BNV = self.model(tokens_BN, loops or self.stages.loops, reveal_per_loop=self.stages.reveal_per_loop)
        return logits_BNV.float(), targets_BN

    def _load_optimizer(self, state: dict[str, dict[str, Tensor]]) -> None:
        names = [name for group in self.optimizer.param_groups for name in group["names"]]
        unknown = state.keys() - set(names)
        if unknown:
            raise ValueError(f"no parameter is called {sorted(unknown)[0]}")
        by_number = {
            number: {key: value.clone() for key, value in state[name].items()}
            for number, name in enumerate(names)
            if name in state
        }
        self.optimizer.load_state_dict({"state": by_number, "param_groups": self.optimizer.state_dict()["param_groups"]})
