"""Training runs: what a step does, stages, outcomes, and that an interrupted run is the uninterrupted one to the last bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from loopcore.checkpoint import load, save
from loopcore.errors import DeviceUnavailable, InputError, LengthError, UnknownGroup
from loopcore.specs import TrainSpec, WordTask
from loopcore.training import Training


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def spec_of(**content: Any) -> TrainSpec:
    """Words of Z2, small and quick: a run is promoted at steps 10 and 20 because every accuracy is enough."""
    base: dict[str, Any] = {
        "model": {"width": 16, "heads": 2},
        "task": {"kind": "word", "group": "Z2"},
        "contract": {"lengths": [2, 3, 5], "promote_at": 0.0},
        "optimizer": {"warmup": 5, "cooldown": 30, "cooldown_at": 0.0},
        "batch": 8,
        "steps": 200,
        "evaluate_every": 10,
        "evaluate_on": 32,
    }
    for key in ("model", "contract", "optimizer"):
        content[key] = base[key] | content.get(key, {})
    return TrainSpec.model_validate(base | content)


def text_spec(source: Path, **content: Any) -> TrainSpec:
    return spec_of(
        **{
            "task": {"kind": "text", "source": str(source)},
            "contract": {"lengths": [12], "loops": {"kind": "fixed", "count": 2}},
            "model": {"positions": "rope", "injection": "add"},
            "optimizer": {"decay": "linear"},
            "steps": 60,
        }
        | content
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus").write_bytes(bytes(range(60, 90)) * 100)
    return tmp_path / "corpus"


def advanced(run: Training, steps: int) -> list[dict[str, float]]:
    """Metrics of the next `steps` steps, or of what is left."""
    found = []
    for _ in range(steps):
        if run.finished:
            break
        found.append(run.advance().metrics)
    return found


# Cool-down


def test_a_cooldown_that_the_loss_rises_in_is_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that may begin with 10 % errors goes on with 20 % and is called off with more, at its last evaluation too."""
    run = Training(
        spec_of(contract={"lengths": [2]}, optimizer={"warmup": 0, "cooldown": 40, "cooldown_at": 0.9, "lr": 0.01}, steps=150)
    )
    said = iter([0.91, 0.8, 0.79, 0.89, 0.9, 0.95, 0.95, 0.95, 0.6, 0.9, 0.9, 0.9, 0.9, 0.9])  # after steps 10, 20, ..
    monkeypatch.setattr(run, "evaluate", lambda: {"length": 2, "loops": 2, "loss": 1.0, "token_accuracy": next(said)})
    rates = [metrics["lr"] for metrics in advanced(run, 150)]
    assert len(rates) == 140  # 100 + 40
    # Begins at 10; called off at 30; begins at 50; called off at 90, where it would have ended; begins at 100 and ends.
    for step, share in [(9, 1), (10, 1), (20, 3 / 4), (29, 21 / 40), (30, 1), (49, 1), (50, 1), (89, 1 / 40), (90, 1), (99, 1)]:
        assert rates[step] == pytest.approx(0.01 * share), step
    assert rates[139] == pytest.approx(0.01 / 40)
    assert run.cooldown_from == 100


def test_a_run_that_never_reaches_its_goal_ends_with_a_cooldown() -> None:
    optimizer = {"warmup": 5, "cooldown": 30, "cooldown_at": 1.0, "lr": 1e-5}
    run = Training(spec_of(contract={"promote_at": 1.0}, optimizer=optimizer, steps=50))
    rates = [metrics["lr"] for metrics in advanced(run, 60)]
    assert (len(rates), run.outcome, run.stages.index, run.cooldown_from) == (50, "unsolved", 0, 20)
    assert rates[5:21] == pytest.approx([1e-5] * 16)
    assert rates[21:] == pytest.approx([1e-5 * left / 30 for left in range(29, 0, -1)])


# Resuming


@pytest.mark.parametrize("interrupted_at", [3, 13, 20, 30, 45])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, interrupted_at: int) -> None:
    """Before the first evaluation, between promotions, at the second of them (step 20, also the beginning of the cool-down's
    stage), at the beginning of the cool-down (30), and within it."""
    straight = Training(spec_of())
    expected = advanced(straight, 60)
    assert len(expected) == 60
    assert straight.outcome == "solved"
    assert (straight.cooldown_from, straight.stages.index) == (30, 2)

    first = Training(spec_of())
    before = advanced(first, interrupted_at)
    saved = save(tmp_path, first.state_dict(), spec=first.spec, step=first.step_count)
    del first
    torch.manual_seed(99)  # whatever happened in between
    loaded = load(saved.path, saved.digest)
    second = Training(loaded.spec)
    second.load_state_dict(loaded.state)
    assert second.step_count == interrupted_at
    after = advanced(second, 60)

    assert before + after == expected  # floats are compared with ==: the same to the last bit
    assert second.figures() == straight.figures()
    for (name, one), (_, other) in zip(straight.model.state_dict().items(), second.model.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert save(tmp_path / "a", straight.state_dict(), spec=straight.spec, step=60).digest == (
        save(tmp_path / "b", second.state_dict(), spec=second.spec, step=60).digest
    )


def test_a_resumed_text_run_is_the_uninterrupted_one(tmp_path: Path, corpus: Path) -> None:
    spec = text_spec(corpus)
    expected = advanced(Training(spec), 60)
    first = Training(spec)
    before = advanced(first, 31)
    saved = save(tmp_path / "run", first.state_dict(), spec=spec, step=31)
    second = Training(spec)
    second.load_state_dict(load(saved.path).state)
    assert before + advanced(second, 60) == expected
    assert second.outcome == "finished"


def test_resumed_untied_and_post_norm(tmp_path: Path) -> None:
    """An untied model has weights that early stages never touch and the optimizer has no state for."""
    spec = spec_of(model={"tied": False, "norm": "post"}, scaling={"rule": "deeploop"})
    expected = advanced(Training(spec), 60)
    first = Training(spec)
    before = advanced(first, 7)
    state = first.state_dict()
    assert "injections.4.weight" in state["model"]
    assert "injections.4.weight" not in state["optimizer"]
    saved = save(tmp_path, state, spec=spec, step=7)
    second = Training(spec)
    second.load_state_dict(load(saved.path).state)
    assert before + advanced(second, 60) == expected


def test_a_state_is_a_copy() -> None:
    run = Training(spec_of())
    advanced(run, 12)
    state = run.state_dict()
    expected = advanced(run, 20)
    for _ in range(2):  # the state that was loaded is not written to either
        other = Training(spec_of())
        other.load_state_dict(state)
        assert advanced(other, 20) == expected


def test_a_run_depends_on_its_seed_and_on_no_global_generator() -> None:
    first = advanced(Training(spec_of(seed=1)), 12)
    torch.manual_seed(1234)
    run = Training(spec_of(seed=1))
    torch.rand(7)
    assert advanced(run, 12) == first
    assert advanced(Training(spec_of(seed=2)), 12) != first


def test_the_generators_state_is_part_of_a_run() -> None:
    """Nothing here draws from it; a model of one's own with dropout would."""
    run = Training(spec_of(seed=5))
    torch.rand(3)
    state = run.state_dict()
    drawn = torch.rand(4)
    torch.rand(5)
    run.load_state_dict(state)
    assert torch.equal(torch.rand(4), drawn)


def test_a_state_of_another_run(corpus: Path, tmp_path: Path) -> None:
    state = Training(spec_of()).state_dict()
    with pytest.raises(InputError, match="the run was trained on other data than this machine has: word/Z2/1, here word/Z3/1"):
        Training(spec_of(task={"kind": "word", "group": "Z3"})).load_state_dict(state)
    with pytest.raises(InputError, match="the state is not one of this run's model"):
        Training(spec_of(model={"width": 32})).load_state_dict(state)
    with pytest.raises(InputError, match="no parameter is called nonsense"):
        Training(spec_of()).load_state_dict(state | {"optimizer": {"nonsense": {}}})
    other = tmp_path / "other"
    other.write_bytes(corpus.read_bytes() + b"!")
    with pytest.raises(InputError, match="give it the data it began with"):
        Training(text_spec(other)).load_state_dict(Training(text_spec(corpus)).state_dict())


# Steps


def test_the_first_step_by_hand() -> None:
    """Zero readout: the loss is log 2; the step is AdamW's on the gradient, clipped to norm 1, at 1/5 of the learning rate."""
    run = Training(spec_of(optimizer={"lr": 0.01, "weight_decay": 0.0, "clip": 0.5}))
    weight = run.model.readout_matrix.weight
    batch = run.task.random_batch(seed=0, split="train", index=0, size=8, length=2)
    F.cross_entropy(run.model(batch.tokens, 2).flatten(0, 1), batch.targets.flatten()).backward()
    assert weight.grad is not None
    gradient, norm = weight.grad.clone(), float(weight.grad.norm())  # the readout's is the only one that is not zero
    metrics = run.step()
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert (metrics["lr"], metrics["length"], metrics["loops"]) == (pytest.approx(0.002), 2, 2)
    clipped = gradient * min(1.0, 0.5 / norm)
    expected = -0.002 * clipped / (clipped.abs() + 1e-8)  # Adam's first step has the size of the learning rate
    assert torch.allclose(weight, expected, atol=1e-6)
    assert run.step_count == 1


def test_the_loss_is_that_of_the_last_loop_only() -> None:
    """After one loop of two the readout is not asked: only the logits of loop T enter the loss."""
    run = Training(spec_of(contract={"lengths": [4]}, model={"readout_init": "normal"}))
    batch = run.task.random_batch(seed=0, split="train", index=0, size=8, length=4)
    with torch.no_grad():
        losses = [float(F.cross_entropy(run.model(batch.tokens, t).flatten(0, 1), batch.targets.flatten())) for t in (1, 2, 3, 4)]
    assert run.step()["loss"] == pytest.approx(losses[3], abs=1e-6)
    assert len({round(loss, 4) for loss in losses}) == 4


def test_warm_up_cool_down_and_end() -> None:
    run = Training(spec_of(optimizer={"lr": 0.01}))
    rates = [metrics["lr"] for metrics in advanced(run, 100)]
    expected = [0.002, 0.004, 0.006, 0.008] + [0.01] * 27 + [0.01 * (30 - k) / 30 for k in range(1, 30)]
    assert rates == pytest.approx(expected)
    assert run.finished
    assert run.step_count == 60


def test_linear_decay_ends_at_the_last_step() -> None:
    run = Training(spec_of(optimizer={"lr": 0.01, "decay": "linear", "warmup": 0}, steps=4))
    assert [metrics["lr"] for metrics in advanced(run, 9)] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert run.evaluation is not None
    assert run.evaluation["step"] == 4  # there is an evaluation at the end, due or not


def test_no_clipping_changes_nothing_but_the_step() -> None:
    clipped, free = Training(spec_of(optimizer={"clip": 1e9})), Training(spec_of(optimizer={"clip": None}))
    assert advanced(clipped, 8) == advanced(free, 8)


# Evaluation and stages


def test_token_and_exact_accuracy_are_two_things() -> None:
    """Weights that answer class 0 everywhere: right where the running sum is even, and a word is right only if all of it is."""
    run = Training(spec_of(evaluate_on=1000, contract={"lengths": [3]}))
    batch = run.task.random_batch(seed=0, split="held_out", index=0, size=1000, length=3)
    found = run.evaluate()  # a zero readout: logits are 0 and the first class wins
    even_BN = batch.targets == 0
    assert found["loss"] == pytest.approx(math.log(2))
    assert found["token_accuracy"] == pytest.approx(float(even_BN.double().mean()))
    assert found["exact_accuracy"] == pytest.approx(float((even_BN.sum(1) == 3).double().mean()))
    assert 0.45 < found["token_accuracy"] < 0.55
    assert 0.08 < found["exact_accuracy"] < 0.17
    assert (found["length"], found["loops"]) == (3, 3)
    assert run.evaluate(length=6, loops=2)["loops"] == 2
    assert run.evaluate(length=6)["loops"] == 6


def test_an_evaluation_changes_nothing() -> None:
    content: dict[str, Any] = {"contract": {"lengths": [4]}, "optimizer": {"decay": "none"}}
    with_them, without = Training(spec_of(evaluate_every=1, **content)), Training(spec_of(**content))
    for _ in range(9):
        with_them.advance()
        without.advance()
    assert with_them.evaluate() == without.evaluate() == with_them.evaluate()
    assert not any(parameter.is_inference() for parameter in with_them.model.parameters())


def test_a_large_evaluation_is_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(spec_of(evaluate_on=100, contract={"lengths": [5]}, model={"readout_init": "normal"}))
    whole = run.evaluate()
    monkeypatch.setattr("loopcore.training.EVALUATED_AT_ONCE", 33)  # 6 words at a time, 4 in the last part
    assert run.evaluate() == pytest.approx(whole, abs=1e-6)


def test_promotion_is_decided_at_evaluations() -> None:
    run = Training(spec_of())
    lengths = [metrics["length"] for metrics in advanced(run, 60)]
    assert lengths == [2] * 10 + [3] * 10 + [5] * 40
    run = Training(spec_of(contract={"promote_at": 1.0, "lengths": [6, 8]}, optimizer={"lr": 1e-5}))
    assert {metrics["length"] for metrics in advanced(run, 30)} == {6}


def test_progress_says_what_was_done() -> None:
    run = Training(spec_of(evaluate_every=2))
    first, second = run.advance(), run.advance()
    assert (first.step, first.evaluated, second.step, second.evaluated) == (1, False, 2, True)
    assert set(first.metrics) == {"loss", "grad_norm", "lr", "length", "loops"}
    assert set(second.metrics) - set(first.metrics) == {
        "held_out_loss", "held_out_token_accuracy", "held_out_exact_accuracy", "held_out_length", "held_out_loops",
    }  # fmt: skip


def test_the_best_evaluation_is_the_stages_own() -> None:
    run = Training(spec_of(contract={"lengths": [2, 3], "promote_at": 0.0}))
    found = iter([0.9, 0.5, 0.7, 0.6])
    run.evaluate = lambda: {
        "loss": 1.0,
        "token_accuracy": next(found),
        "exact_accuracy": 0.1,
        "length": run.stages.length,
        "loops": 2,
    }  # type: ignore[method-assign]
    advanced(run, 10)
    assert run.best is None  # promoted: what was best at length 2 says nothing about length 3
    advanced(run, 30)
    assert run.figures()["best_token_accuracy"] == 0.7
    assert run.figures()["best_step"] == 30
    assert run.figures()["token_accuracy"] == 0.6


# Outcomes


def test_outcomes_of_a_word_task() -> None:
    run = Training(spec_of(steps=3))
    assert run.outcome == "running"
    advanced(run, 3)
    assert run.figures()["outcome"] == "unsolved"  # the last evaluation was at length 2
    run = Training(spec_of(steps=10, contract={"lengths": [4], "promote_at": 1.0}))
    advanced(run, 10)
    assert run.outcome == "unsolved"
    run = Training(spec_of(steps=10, contract={"lengths": [4], "promote_at": 0.0}))
    advanced(run, 10)
    assert run.outcome == "solved"


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_an_outcome(tmp_path: Path, where: str) -> None:
    """NaN in a weight makes the loss NaN. A huge readout makes the loss finite, and the gradients' squares overflow."""
    run = Training(spec_of())
    advanced(run, 4)
    with torch.no_grad():
        if where == "loss":
            run.model.embedding_VD[0, 0] = math.nan
        else:
            # Not one number in all places: the norm before it takes that direction out, but for rounding.
            run.model.readout_matrix.weight.zero_()
            run.model.readout_matrix.weight[0] = torch.linspace(-1e30, 1e30, run.spec.model.width)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    progress = run.advance()
    assert (progress.step, progress.evaluated) == (5, False)
    assert not math.isfinite(progress.metrics["loss"] if where == "loss" else progress.metrics["grad_norm"])
    assert run.finished
    assert (run.outcome, run.diverged_at, run.step_count) == ("diverged", 5, 5)
    assert run.figures()["diverged_at"] == 5
    after = run.model.state_dict()
    assert all(torch.allclose(value, after[name], rtol=0, atol=0, equal_nan=True) for name, value in before.items())
    # It can be saved and taken up again, and is over then too.
    saved = save(tmp_path, run.state_dict(), spec=run.spec, step=5)
    again = Training(run.spec)
    again.load_state_dict(load(saved.path).state)
    assert (again.outcome, again.finished) == ("diverged", True)


def test_a_learning_rate_that_is_far_too_large_diverges_or_ends_but_raises_nothing() -> None:
    run = Training(spec_of(optimizer={"lr": 10.0, "clip": None}, contract={"promote_at": 1.0}, steps=30))
    advanced(run, 30)
    assert run.outcome in ("diverged", "unsolved")


def test_outcome_of_text(corpus: Path) -> None:
    run = Training(text_spec(corpus, steps=20))
    advanced(run, 20)
    figures = run.figures()
    assert figures["outcome"] == "finished"
    assert figures["loss"] < 5.5 < math.log(256)  # log 256 = 5.545
    assert figures["best_loss"] <= figures["loss"]
    assert (figures["length"], figures["loops"], figures["stage"]) == (12, 2, 0)


def test_figures_are_json(corpus: Path) -> None:
    for spec in (spec_of(), text_spec(corpus)):
        run = Training(spec)
        json.dumps(run.figures(), allow_nan=False)
        advanced(run, 15)
        assert json.loads(json.dumps(run.figures(), allow_nan=False)) == run.figures()


# Contracts


def test_a_streaming_contract_trains_and_evaluates_under_its_schedule() -> None:
    run = Training(spec_of(contract={"lengths": [4], "input_schedule": "streaming"}, model={"readout_init": "normal"}))
    batch = run.task.random_batch(seed=0, split="train", index=0, size=8, length=4)
    with torch.no_grad():
        logits_BNV = run.model(batch.tokens, 4, reveal_per_loop=1.0)
    assert run.step()["loss"] == pytest.approx(
        float(F.cross_entropy(logits_BNV.flatten(0, 1), batch.targets.flatten())), abs=1e-6
    )


def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32() -> None:
    half, full = (Training(spec_of(precision=precision, model={"readout_init": "normal"})) for precision in ("bf16", "fp32"))
    losses = [float(run.step()["loss"]) for run in (half, full)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}


# What cannot be


def test_what_cannot_be_is_said_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="no device is called 'tpu'"):
        Training(spec_of(), device="tpu")
    with pytest.raises(UnknownGroup):
        Training(spec_of().model_copy(update={"task": WordTask.model_construct(group="Q8")}))
    with pytest.raises(InputError, match="cannot read the corpus"):
        Training(text_spec(tmp_path / "missing"))
    (tmp_path / "short").write_bytes(bytes(100))
    with pytest.raises(LengthError, match=r"the held-out part of .* has 10 bytes, a window of length 12 takes 13"):
        Training(text_spec(tmp_path / "short"))


def test_threads_are_set_first() -> None:
    before = torch.get_num_threads()
    try:
        Training(spec_of(), threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# Learning


def test_a_small_word_problem_is_learned() -> None:
    """Z3 to length 3, T = n: solved, with an accuracy on words that were not trained on far above chance (1/3)."""
    run = Training(
        TrainSpec.model_validate(
            {
                "model": {"width": 32},
                "task": {"kind": "word", "group": "Z3"},
                "contract": {"lengths": [2, 3]},
                "optimizer": {"lr": 3e-3, "warmup": 20, "cooldown": 60},
                "steps": 800,
                "evaluate_every": 20,
            }
        )
    )
    while not run.finished:
        run.advance()
    assert run.outcome == "solved"
    assert run.figures()["token_accuracy"] >= 0.98
