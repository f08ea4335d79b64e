"""Promises of `calibrated:eps` on synthetic exits whose risk is known, and the exact test behind them."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from itertools import pairwise
from math import comb

import numpy as np
import pytest
import torch

from loopcore.calibration import (
    DELTA,
    Calibration,
    Promise,
    calibrated_loops,
    count_lost,
    measure_promise,
    most_lost,
    p_value,
    words_needed,
)
from loopcore.errors import InputError, LengthError, Undecided
from loopcore.halting import Halting, HaltingProfile
from loopcore.specs import parse_halting


def at_most(lost: int, words: int, risk: Fraction) -> Fraction:
    """P(at most `lost` of `words`), in whole numbers."""
    return sum((comb(words, k) * risk**k * (1 - risk) ** (words - k) for k in range(lost + 1)), Fraction(0))


@pytest.mark.parametrize(
    ("lost", "words", "eps"),
    [
        (0, 1, Fraction(1, 20)),
        (0, 299, Fraction(1, 100)),
        (5, 1024, Fraction(1, 100)),
        (12, 2048, Fraction(1, 100)),
        (30, 100, Fraction(1, 2)),
    ],
)
def test_the_p_value_is_exact(lost: int, words: int, eps: Fraction) -> None:
    assert p_value(lost, words, float(eps)) == pytest.approx(float(at_most(lost, words, eps)), rel=1e-9)


def test_a_p_value_is_a_probability() -> None:
    assert p_value(50, 50, 0.3) == pytest.approx(1.0)
    assert all(a < b for a, b in pairwise(p_value(lost, 50, 0.3) for lost in range(20)))


@pytest.mark.parametrize(("eps", "words"), [(0.05, 59), (0.01, 299), (0.001, 2995)])
def test_the_fewest_words_that_can_promise(eps: float, words: int) -> None:
    assert words_needed(eps) == words  # the rule of three, and the textbook's 59 for 95 %/95 %
    assert most_lost(words, eps) == 0
    assert most_lost(words - 1, eps) is None


@pytest.mark.parametrize("words", [299, 512, 1024, 2048])
def test_most_lost_is_the_last_count_that_is_rejected(words: int) -> None:
    most = most_lost(words, 0.01)
    assert most is not None
    assert at_most(most, words, Fraction(1, 100)) <= Fraction(1, 20) < at_most(most + 1, words, Fraction(1, 100))


@pytest.mark.parametrize("eps", [0.0, 1.0, -0.1])
def test_a_share_is_between_none_and_all(eps: float) -> None:
    with pytest.raises(InputError, match="between 0 and 1"):
        words_needed(eps)
    with pytest.raises(InputError, match="between 0 and 1"):
        p_value(0, 10, eps)


# Of 512 words one may be lost at eps .01: .99^512 = .0058 and 512 * .01 * .99^511 = .0301 come to .036, and two more are .114.
WORDS = 512


def test_the_smallest_margin_before_the_first_that_fails() -> None:
    by_loop = Calibration(WORDS, ((400,), (0,), (2,), (1,), (1,), (0,)))
    # Loops 5 and 4 lose one and pass, 3 loses two and ends the search; that 2 loses none again must not count.
    assert by_loop.margin({1: 5}, 0.01) == -1
    assert by_loop.exit(5, -1) == 4


def test_every_length_is_tested_by_itself() -> None:
    # Together the two lengths lose 3 of 1024 at loop 3, which would pass (4 may be lost); the second alone loses 2 of 512.
    counts = Calibration(WORDS, ((400, 400), (400, 400), (1, 2), (0, 0)))
    assert most_lost(2 * WORDS, 0.01) == 4
    assert counts.margin({1: 3}, 0.01) == 0
    assert counts.margin({1: 3, 2: 3}, 0.01) == 1


def test_a_margin_never_leaves_the_budget() -> None:
    never_early = Calibration(WORDS, ((500, 500), (500, 500), (500, 500), (0, 0)))
    margin = never_early.margin({1: 2, 2: 9}, 0.01)
    assert [never_early.exit(planned, margin) for planned in (2, 9)] == [4, 4]
    lost_nothing = Calibration(WORDS, ((0, 0), (0, 0), (0, 0)))
    margin = lost_nothing.margin({1: 1, 2: 3}, 0.01)
    assert [lost_nothing.exit(planned, margin) for planned in (1, 3)] == [1, 1]


def test_too_few_words_promise_nothing() -> None:
    with pytest.raises(Undecided, match=r"298 words are too few.*it takes 299"):
        Calibration(298, ((0,),)).margin({1: 1}, 0.01)


@pytest.mark.parametrize(
    ("words", "lost"), [(10, ((11,),)), (10, ((-1,),)), (10, ((1, 2), (1,))), (10, ()), (10, ((),)), (0, ((0,),))]
)
def test_counts_that_cannot_be_are_refused(words: int, lost: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InputError, match="probe the run again"):
        Calibration(words, lost)


def test_false_promises_are_rarer_than_one_in_twenty() -> None:
    """Words are done by loop 10, 9, 8, ... with known chances: leaving at 9 loses .002 of them, at 8 .0102, at 7 .1."""
    words, draws, chances = 1024, 4000, (0.002, 0.0082, 0.0898, 0.9)
    done_DK = np.random.default_rng(11).multinomial(words, chances, size=draws)
    lost_DK = done_DK.cumsum(-1)
    exits = []
    for nine, eight, seven, _ in lost_DK.tolist():
        counts = Calibration(words, (*((words,),) * 6, (seven,), (eight,), (nine,), (0,)))
        exits.append(counts.exit(10, counts.margin({1: 10}, 0.01)))
    false = sum(loops <= 8 for loops in exits) / draws
    most = most_lost(words, 0.01)
    assert most is not None
    # Whoever passes at 8 passes at 9, which loses fewer of the same words: the chance is one binomial's.
    chance = float(at_most(most, words, Fraction(102, 10_000)))
    assert chance <= DELTA
    assert false == pytest.approx(chance, abs=4 * (chance * (1 - chance) / draws) ** 0.5)
    assert false <= DELTA
    assert sum(loops == 9 for loops in exits) > 0.8 * draws  # and the promise is worth something
    assert min(exits) == 8


def test_what_is_lost_is_counted_by_length_and_never_set_off() -> None:
    after_one = [[True, False], [False, False], [True, True], [True, True]]
    after_two = [[True, True], [True, False], [True, True], [False, True]]
    # Length 1 loses the second word, length 2 the first; that the fourth was right only early makes up for neither.
    assert count_lost(torch.tensor([after_one, after_two])) == Calibration(4, ((1, 1), (0, 0)))


def test_a_promise_is_measured_on_other_words() -> None:
    careful, careless = Calibration(WORDS, ((400,), (5,), (0,))), Calibration(WORDS, ((400,), (1,), (0,)))
    truth = Calibration(1000, ((700,), (20,), (0,)))
    found = measure_promise([careful, careless, careful], truth, {1: 3}, 0.01)
    assert found == Promise(0.01, margins_D=(0, -1, 0), risks_D=(0.0, 0.02, 0.0), loops_D=(3.0, 2.0, 3.0), fixed_loops=3)
    assert (found.kept, found.loops) == (2, pytest.approx(8 / 3))
    rows = found.rows({"length": 1})
    whole = {row["axes"]["of"]: row["value"] for row in rows if "draw" not in row["axes"]}
    assert whole == {"kept": 2, "draws": 3, "loops": pytest.approx(8 / 3), "fixed_loops": 3}
    assert [row["value"] for row in rows if row["axes"]["of"] == "risk"] == [0.0, 0.02, 0.0]
    assert all(row["axes"]["eps"] == 0.01 and row["axes"]["length"] == 1 for row in rows)


# T*(n) = n + 1. One loop less loses one word at most, two less lose many.
PROFILE = HaltingProfile(
    v=1.0,
    v_low=0.9,
    v_high=1.1,
    burn_in=1,
    lengths=(1, 3),
    accuracy_TN=((1.0, 1.0, 1.0),),
    exact_TN=((1.0, 1.0, 1.0),),
    words=100,
    calibration=Calibration(WORDS, ((1, 200, 300), (0, 1, 200), (0, 0, 1), (0, 0, 0))),
)


def test_a_word_leaves_at_its_margin() -> None:
    assert [calibrated_loops(PROFILE, n, 0.01) for n in (1, 2, 3)] == [1, 2, 3]
    plan = Halting(parse_halting("calibrated:0.01"), PROFILE).plan(3)
    assert (plan.known_exit, plan.reason) == (3, "calibrated")
    assert Halting(parse_halting("calibrated:0.01"), PROFILE).watch() is None
    bounded = Halting(parse_halting("calibrated:0.01").model_copy(update={"max_loops": 2}), PROFILE).plan(3)
    assert (bounded.known_exit, bounded.reason) == (2, "max_loops")


def test_what_cannot_be_promised_is_refused() -> None:
    with pytest.raises(LengthError, match="1 to 3, and the word has 4"):
        calibrated_loops(PROFILE, 4, 0.01)
    with pytest.raises(InputError, match=r"calibrated:0\.001 cannot be promised: 512 words are too few"):
        calibrated_loops(PROFILE, 3, 0.001)
    for profile in (None, dataclasses.replace(PROFILE, calibration=None)):
        with pytest.raises(InputError, match="this model has none; probe its run"):
            Halting(parse_halting("calibrated:0.01"), profile).plan(3)


def test_counts_travel_with_the_profile_and_a_profile_from_before_them_is_read() -> None:
    content = json.loads(json.dumps(PROFILE.to_json(), allow_nan=False))
    assert HaltingProfile.from_json(content) == PROFILE
    del content["calibration"]
    assert HaltingProfile.from_json(content | {"version": 1}) == dataclasses.replace(PROFILE, calibration=None)


@pytest.mark.parametrize("text", ["calibrated", "calibrated:0", "calibrated:1", "calibrated:-0.1", "calibrated:few"])
def test_a_rule_without_a_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="eps"):
        parse_halting(text)


def test_a_share_belongs_to_calibrated_alone() -> None:
    spec = parse_halting("calibrated:0.01")
    assert (spec.kind, spec.eps, spec.watches, spec.effective_threshold) == ("calibrated", 0.01, False, None)
    with pytest.raises(ValueError, match="only that rule"):
        type(spec)(kind="rule", eps=0.01)
