"""The profile that a probe leaves, and the rules that stop a row."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from loopcore.errors import InputError, Undecided
from loopcore.halting import (
    Halting,
    HaltingProfile,
    Watch,
    default_max_loops,
    logits_residual,
    measure_burn_in,
    measure_halting,
    planned_loops,
    state_residual,
)
from loopcore.instruments import Speed
from loopcore.specs import HaltingSpec, parse_halting

PROFILE = HaltingProfile(
    v=0.8,
    v_low=0.75,
    v_high=0.85,
    burn_in=1,
    lengths=(1, 3),
    accuracy_TN=((1.0, 0.6, 0.4), (1.0, 1.0, 0.7), (1.0, 1.0, 0.9), (1.0, 1.0, 1.0)),
    exact_TN=((1.0, 0.3, 0.1), (1.0, 1.0, 0.2), (1.0, 1.0, 0.7), (1.0, 1.0, 1.0)),
    words=100,
)


def serial(length: int, loops: int, *, v: float = 1.0, late: int = 0, forgets_at: int = 10**9, words: int = 10) -> torch.Tensor:
    """Position i right from loop ceil((i + 1) / v) + late on, and everything wrong from loop `forgets_at` on."""
    tau_N = torch.tensor([math.ceil((i + 1) / v) + late for i in range(length)])
    loops_T = torch.arange(1, loops + 1).view(-1, 1, 1)
    return ((loops_T >= tau_N) & (loops_T < forgets_at)).expand(loops, words, length)


@pytest.mark.parametrize(("length", "planned"), [(1, 3), (4, 6), (8, 11), (12, 16), (100, 126)])
def test_planned_loops_are_n_over_v_and_the_burn_in(length: int, planned: int) -> None:
    # 12 / 0.8 is 15 and a rounding error, which is no loop.
    assert PROFILE.planned_loops(length) == planned == planned_loops(length, PROFILE)


def test_profile_survives_json() -> None:
    content = json.loads(json.dumps(PROFILE.to_json(), allow_nan=False))
    assert HaltingProfile.from_json(content) == PROFILE
    assert hash(HaltingProfile.from_json(content)) == hash(PROFILE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version 3"),
        ({"version": None}, "version None"),
        ({"tempo": 1}, "tempo"),
        ({"v": -1.0}, "above 0"),
        ({"v": float("nan")}, "above 0"),
        ({"burn_in": -1}, "burn-in"),
    ],
)
def test_a_profile_of_another_make_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        HaltingProfile.from_json(PROFILE.to_json() | change)
    with pytest.raises(InputError, match="burn_in"):
        HaltingProfile.from_json({name: value for name, value in PROFILE.to_json().items() if name != "burn_in"})


def test_expected_accuracy_only_where_it_was_measured() -> None:
    assert PROFILE.expected_accuracy(3, 2) == 0.7
    assert PROFILE.expected_accuracy(3, 2, exact=True) == 0.2
    assert PROFILE.expected_accuracy(4, 2) is None
    assert PROFILE.expected_accuracy(3, 5) is None
    assert PROFILE.expected_accuracy(3, 0) is None
    assert [PROFILE.loops_for_accuracy(3, floor) for floor in (0.3, 0.7, 0.71, 1.0)] == [1, 2, 3, 4]
    assert PROFILE.loops_for_accuracy(4, 0.1) is None
    assert dataclasses.replace(PROFILE, lengths=(3, 3)).expected_accuracy(2, 2) is None
    assert PROFILE.accuracy_by_loops == (0.4, 0.7, 0.9, 1.0)


@pytest.mark.parametrize(("v", "late", "burn_in"), [(1.0, 0, 0), (1.0, 2, 2), (2.0, 1, 1), (0.5, 3, 3)])
def test_burn_in_is_the_lag_behind_the_line(v: float, late: int, burn_in: int) -> None:
    found = measure_burn_in(serial(8, 24, v=v, late=late), v)
    assert found.burn_in == burn_in
    assert found.loops == math.ceil(8 / v) + burn_in
    assert found.accuracy == 1.0
    assert found.within_tolerance


def test_burn_in_makes_up_for_a_speed_read_too_fast() -> None:
    # True v 1, read as 1.25: ceil(10 / 1.25) = 8 loops leave two positions wrong.
    found = measure_burn_in(serial(10, 15), 1.25)
    assert (found.burn_in, found.loops) == (2, 10)
    # A fifth of the last position wrong is .02 of all tokens of a word of ten: within a tolerance of .02, not of .01.
    correct_TBN = serial(10, 15).clone()
    correct_TBN[9:11, :2, 9] = False
    assert measure_burn_in(correct_TBN, 1.0, tolerance=0.021).burn_in == 0
    assert measure_burn_in(correct_TBN, 1.0, tolerance=0.01).burn_in == 2


def test_burn_in_holds_at_every_prefix_asked_for() -> None:
    # Position 0 is late by three loops, all others are on the line: only short prefixes see it.
    correct_TBN = serial(8, 16).clone()
    correct_TBN[:3, :, 0] = False
    assert measure_burn_in(correct_TBN, 1.0).burn_in == 0
    assert measure_burn_in(correct_TBN, 1.0, range(1, 9)).burn_in == 3
    assert measure_burn_in(correct_TBN, 1.0, 2).burn_in == 2


def test_overthinking_before_the_line_says_so() -> None:
    found = measure_burn_in(serial(6, 12, forgets_at=8), 0.75)  # ceil(6 / .75) = 8: everything is forgotten there
    assert not found.within_tolerance
    assert (found.burn_in, found.best_loops, found.accuracy) == (0, 6, 0.0)


def test_loops_that_were_not_watched_are_undecided() -> None:
    with pytest.raises(Undecided, match="20 loops and 12 were watched"):
        measure_burn_in(serial(10, 12), 0.5)


def test_profile_of_a_causal_model_holds_for_its_prefixes() -> None:
    speed = Speed(v=1.0, r2=0.99, points=6, low=0.9, high=1.1)
    profile = measure_halting(serial(6, 9, late=1), speed, causal=True)
    assert (profile.v, profile.v_low, profile.v_high, profile.r2) == (1.0, 0.9, 1.1, 0.99)
    assert (profile.burn_in, profile.lengths, profile.words, profile.watched) == (1, (1, 6), 10, 9)
    # After three loops two positions are right: of a word of two all, of a word of four half.
    assert profile.expected_accuracy(2, 3) == 1.0
    assert profile.expected_accuracy(4, 3) == 0.5
    assert profile.expected_accuracy(4, 3, exact=True) == 0.0
    assert measure_halting(serial(6, 9), speed, causal=False).lengths == (6, 6)


def halting(
    text: str, profile: HaltingProfile | None = PROFILE, allowed: Callable[[int], int] | None = None, **more: Any
) -> Halting:
    return Halting(parse_halting(text).model_copy(update=more), profile, allowed=allowed)


@pytest.mark.parametrize(
    ("rule", "more", "expected"),
    [
        ("rule", {}, (11, "rule")),
        ("rule", {"max_loops": 9}, (9, "max_loops")),
        ("rule", {"min_loops": 14}, (14, "rule")),
        ("fixed:5", {}, (5, "fixed")),
        ("fixed:5", {"max_loops": 3}, (3, "max_loops")),
        ("converged", {}, (None, "converged")),
    ],
)
def test_plans(rule: str, more: dict[str, Any], expected: tuple[int | None, str]) -> None:
    plan = halting(rule, **more).plan(8)
    assert (plan.known_exit, plan.reason) == expected


def test_the_bound_of_the_service_holds() -> None:
    assert halting("rule", allowed=lambda length: 7).plan(8).known_exit == 7
    assert halting("kl", allowed=lambda length: 7, max_loops=20).plan(8).max_loops == 7
    with pytest.raises(InputError, match="fixed asks for 9 loops, at most 7"):
        halting("fixed:9", allowed=lambda length: 7).plan(8)
    with pytest.raises(InputError, match="min_loops asks for 8"):
        halting("converged", allowed=lambda length: 7, min_loops=8).plan(8)
    assert default_max_loops(PROFILE)(8) == 18  # 1.5 * 11 and one
    assert default_max_loops(None)(8) == 24


def test_the_rule_needs_a_measured_speed() -> None:
    with pytest.raises(InputError, match="probe its run"):
        halting("rule", None)
    assert halting("fixed:3", None).plan(8).known_exit == 3


def test_which_rules_pay_for_what() -> None:
    assert {
        kind
        for kind in ("rule", "fixed:3", "converged", "entropy", "kl", "cosine", "argmax_stable")
        if halting(kind).needs_logits
    } == {
        "entropy",
        "kl",
        "argmax_stable",
    }
    assert halting("rule").watch() is None
    assert halting("fixed:3").watch() is None


def judged(spec: HaltingSpec, residuals: list[float]) -> int | None:
    """The loop that a row with these residuals, one a loop, ends at."""
    watch = Watch(spec)
    for loop, residual in enumerate(residuals, 1):
        if watch.due(loop) and watch.judge(loop, residual):
            return loop
    return None


@pytest.mark.parametrize(
    ("fields", "residuals", "ends"),
    [
        ({"kind": "converged"}, [1.0, 0.03, 0.029, 0.0], 3),  # under, not at, the threshold
        ({"kind": "converged", "threshold": 0.5}, [1.0, 0.4], 2),
        ({"kind": "converged", "min_loops": 3}, [0.0, 0.0, 0.0, 0.0], 3),
        ({"kind": "converged", "check_every": 3}, [0.0] * 7, 3),
        ({"kind": "converged", "check_every": 2, "min_loops": 3}, [0.0] * 7, 4),
        ({"kind": "kl"}, [0.0, 0.0], 2),  # the first check has nothing to compare with
        ({"kind": "entropy", "min_loops": 4}, [0.0] * 6, 4),
        ({"kind": "kl", "check_every": 2}, [0.0] * 6, 4),
        ({"kind": "argmax_stable", "threshold": 3}, [9.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], 7),
        ({"kind": "argmax_stable", "threshold": 2, "check_every": 2}, [0.0] * 9, 6),
        ({"kind": "argmax_stable", "threshold": 2, "min_loops": 6}, [0.0] * 9, 6),
        ({"kind": "converged"}, [float("nan")] * 5, None),
        ({"kind": "cosine"}, [0.1] * 5, None),
    ],
)
def test_when_a_watched_row_ends(fields: dict[str, Any], residuals: list[float], ends: int | None) -> None:
    assert judged(HaltingSpec(**fields), residuals) == ends


def test_no_readout_is_paid_before_the_history_that_min_loops_needs() -> None:
    watch = Watch(HaltingSpec(kind="argmax_stable", threshold=2, min_loops=10))
    assert [loop for loop in range(1, 13) if watch.due(loop)] == [8, 9, 10, 11, 12]
    watch = Watch(HaltingSpec(kind="converged", min_loops=10))
    assert [loop for loop in range(1, 13) if watch.due(loop)] == [10, 11, 12]


def test_converged_is_the_larger_of_step_and_turn_relative_to_the_state() -> None:
    before2, before, now = (torch.tensor([[[3.0, x]]]) for x in (4.0, 4.0, 4.5))
    # |step| = .5 of |(3, 4)| = 5: .1; the step before was 0, so the turn is the same.
    assert state_residual("converged", now, before, before2).tolist() == pytest.approx([0.1])
    # Steady motion of .5 a loop: the turn is 0 and the step still counts.
    assert state_residual("converged", now, before, torch.tensor([[[3.0, 3.5]]])).tolist() == pytest.approx([0.1])
    # A state swinging back: step .5, turn 1.
    assert state_residual("converged", now, before, now).tolist() == pytest.approx([0.2])


def test_cosine_is_one_minus_the_cosine() -> None:
    h, before = torch.tensor([[[1.0, 1.0]], [[2.0, 0.0]]]), torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    assert state_residual("cosine", h, before, before).tolist() == pytest.approx([1 - 2**-0.5, 0.0], abs=1e-6)


def test_predictions_are_compared_with_the_check_before() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    now, before = p.log().view(1, 1, 2), q.log().view(1, 1, 2)
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    entropy = math.log(2) + 0.25 * math.log(0.25) + 0.75 * math.log(0.75)
    assert logits_residual("kl", now, before).tolist() == pytest.approx([kl])
    assert logits_residual("entropy", now, before).tolist() == pytest.approx([entropy])
    assert logits_residual("kl", now + 3.0, now).tolist() == pytest.approx([0.0], abs=1e-6)
    swapped = torch.tensor([[[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
    assert logits_residual("argmax_stable", swapped, swapped.flip(-1)).tolist() == [3.0]


@pytest.mark.parametrize("kind", ["converged", "cosine", "entropy", "kl", "argmax_stable"])
def test_a_row_is_judged_by_its_own_valid_positions(kind: str) -> None:
    """Whatever the batch-mates are and whatever stands in the padding, even what is no number, the row's residual is the same."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(5, 6, 4, generator=generator) for _ in range(3)]
    lengths = torch.tensor([6, 3, 1, 4, 2])
    valid_BN = torch.arange(6) < lengths.unsqueeze(-1)

    def residual(some: list[torch.Tensor], valid: torch.Tensor | None) -> torch.Tensor:
        if kind in ("converged", "cosine"):
            return state_residual(kind, some[0], some[1], some[2], valid)
        return logits_residual(kind, some[0], some[1], valid)

    alone = [residual([state[b : b + 1, : lengths[b]] for state in states], None) for b in range(5)]
    spoiled = [state.masked_fill(~valid_BN.unsqueeze(-1), float("nan")) for state in states]
    torch.testing.assert_close(residual(spoiled, valid_BN), torch.cat(alone))


@pytest.mark.parametrize("kind", ["converged", "cosine"])
def test_the_worst_position_speaks_for_the_row(kind: str) -> None:
    before = torch.ones(1, 200, 4)
    now = before.clone()
    now[0, 137] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert float(state_residual(kind, now, before, before)) >= 1.0
