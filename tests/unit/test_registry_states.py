"""The states of a job and the arithmetic of trying again, against tables written out by hand."""

from __future__ import annotations

import pickle

import pytest

import services.registry
from services.registry import AttemptOutcome, IllegalTransition, JobState, RunState, errors
from services.registry.states import (
    ENDED,
    LEFT_OPEN,
    STARTS,
    TRANSITIONS,
    after_error,
    after_loss,
    after_release,
    backoff_s,
    blocked_reason,
    check_transition,
    failure_reason,
    loss_reason,
    release_reason,
    sources,
)

Q, B, R, S, F, C = (JobState(name) for name in ("queued", "blocked", "running", "succeeded", "failed", "cancelled"))


def test_every_way_between_states() -> None:
    #          to: queued blocked running succeeded failed cancelled
    allowed = {
        Q: (False, True, True, False, False, True),
        B: (True, False, False, False, False, True),
        R: (True, False, False, True, True, True),
        S: (False,) * 6,
        F: (False,) * 6,
        C: (False,) * 6,
    }
    for state, row in allowed.items():
        for target, may in zip((Q, B, R, S, F, C), row, strict=True):
            assert ((state, target) in TRANSITIONS) is may
            if may:
                check_transition("move it", state, target)
            else:
                with pytest.raises(IllegalTransition, match=f"cannot move it: it is {state}"):
                    check_transition("move it", state, target)


def test_nothing_leaves_an_ended_state_and_every_other_can_end() -> None:
    leaving = {state for state, _ in TRANSITIONS}
    assert frozenset(JobState) - leaving == ENDED
    reached = set(STARTS) | {target for _, target in TRANSITIONS}
    assert reached == set(JobState)
    assert sources(JobState.SUCCEEDED) == (R,)
    assert sources(JobState.CANCELLED) == (Q, B, R)


def test_what_becomes_of_a_run_that_is_open_when_its_job_ends() -> None:
    assert {S: RunState("finished"), F: RunState("failed"), C: RunState("cancelled")} == LEFT_OPEN


@pytest.mark.parametrize("states", [JobState, RunState, AttemptOutcome])
def test_values_are_the_names_in_small_letters(states: type) -> None:
    assert all(member.value == member.name.lower() for member in states)  # type: ignore[attr-defined]


def test_every_transition_is_glossed() -> None:
    assert all(len(gloss) > 10 for gloss in TRANSITIONS.values())
    assert len(set(TRANSITIONS)) == 9


def test_pauses_double_up_to_ten_minutes() -> None:
    assert [backoff_s(errors) for errors in range(1, 10)] == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    assert backoff_s(10_000) == 600


@pytest.mark.parametrize(
    ("errors", "budget", "retry", "cancel", "target"),
    [
        (1, 0, True, False, F),
        (1, 1, True, False, Q),
        (2, 1, True, False, F),
        (1, 5, False, False, F),
        (1, 1, True, True, C),
        (2, 1, True, True, F),
        (1, 5, False, True, F),
    ],
)
def test_after_an_error(errors: int, budget: int, retry: bool, cancel: bool, target: JobState) -> None:
    assert after_error(errors, budget, retry=retry, cancel_requested=cancel) is target


@pytest.mark.parametrize(
    ("losses", "budget", "cancel", "target"),
    [(1, 0, False, F), (1, 1, False, Q), (6, 5, False, F), (1, 5, True, C), (6, 5, True, C)],
)
def test_after_a_loss(losses: int, budget: int, cancel: bool, target: JobState) -> None:
    assert after_loss(losses, budget, cancel_requested=cancel) is target


def test_after_a_release() -> None:
    assert after_release(cancel_requested=False) is Q
    assert after_release(cancel_requested=True) is C


def test_reasons_are_one_line_that_names_what_to_look_at() -> None:
    assert blocked_reason(7, F) == "needs job 7, which failed; retry job 7 or cancel this one"
    assert failure_reason(2, "Traceback\n  x\nKeyError: 'a'\n", F) == "attempt 2 failed: KeyError: 'a'"
    assert failure_reason(1, "", F) == "attempt 1 failed: no message"
    assert len(failure_reason(1, "x" * 5000, Q)) < 300
    assert loss_reason(1, 1, "node b went away", F).startswith("lost 1 time, more than")
    assert loss_reason(3, 2, "node b went away", C) == "attempt 3 was lost: node b went away; cancelled as requested"
    assert (
        release_reason(2, "its cluster is shut down", Q) == "attempt 2 ended: its cluster is shut down; it goes on with another"
    )


@pytest.mark.parametrize(
    "error",
    [
        errors.JobNotFound(3),
        errors.RunNotFound(4),
        errors.RunNotFound(4, 5),
        errors.KeyConflict("k", 6),
        errors.LeaseLost(1, 2, "it is queued"),
        errors.IllegalTransition("cancel job 1", "failed", expected="queued"),
        errors.RegistryUnavailable("no answer"),
        errors.SchemaTooNew("too new"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_to_another_process(error: errors.RegistryError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_the_error_tree_is_the_one_that_is_drawn() -> None:
    drawn = errors.__doc__ or ""
    for name in errors.__all__:
        assert name in drawn
        assert issubclass(getattr(errors, name), errors.RegistryError)


def test_what_is_public_is_there_and_nothing_else() -> None:
    public = {name for name, value in vars(services.registry).items() if not name.startswith("_") and isinstance(value, type)}
    assert public | {"migrate"} == set(services.registry.__all__)
    assert set(errors.__all__) <= set(services.registry.__all__)
