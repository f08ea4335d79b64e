"""Minima of made-up curves, their brackets and their intervals."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from loopcore.statistics import mean_interval
from loopcore.studies.transfer_curve import Curve, Seeds, bootstrap, draws_of, vertex

RATES = (-7.0, -6.0, -5.0, -4.0, -3.0)


def curve(*rows: tuple[float | None, ...] | float | None, rates: tuple[float, ...] = RATES) -> Curve:
    return Curve(rates, tuple(row if isinstance(row, tuple) else (row,) for row in rows))


def parabola(at: float, *, width: float = 0.1, rates: tuple[float, ...] = RATES) -> Curve:
    return curve(*(2.0 + width * (rate - at) ** 2 for rate in rates), rates=rates)


@pytest.mark.parametrize("at", [-5.49, -5.0, -4.7, -4.5, -4.0])
def test_the_vertex_of_a_parabola_is_found(at: float) -> None:
    assert parabola(at).optimum() == pytest.approx(at)


def test_also_on_a_grid_of_uneven_steps() -> None:
    assert parabola(-4.3, rates=(-9.0, -5.5, -4.0, -3.75, 0.0)).optimum() == pytest.approx(-4.3)
    assert vertex((0.0, 1.0, 4.0), (1.0, 0.0, 9.0)) == pytest.approx(1.0)  # (x - 1)^2


def test_a_flat_curve_has_its_vertex_in_the_middle() -> None:
    assert vertex((-6.0, -5.0, -4.0), (2.0, 2.0, 2.0)) == -5.0
    assert vertex((-6.0, -5.0, -4.0), (3.0, 2.0, 2.0)) == -4.5


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ((1.0, 2.0, 3.0, 4.0, 5.0), "the lowest loss is at 2^-7, the smallest learning rate tried"),
        ((5.0, 4.0, 3.0, 2.0, 1.0), "the lowest loss is at 2^-3, the largest learning rate tried"),
        ((5.0, None, 1.0, None, None), "the lowest loss is at 2^-5, and the learning rates on both sides diverged"),
        ((None, None, None, None, None), "every learning rate diverged"),
        ((3.0, 2.0, 1.0, None, None), None),  # closed by what diverged
        ((3.0, 2.0, 1.0, 2.0, None), None),
    ],
)
def test_what_brackets_a_minimum(losses: tuple[float | None, ...], why: str | None) -> None:
    assert curve(*losses).open_because == why


def test_a_cliff_leaves_the_rate_of_the_grid() -> None:
    cliff = curve(3.0, 2.0, 1.0, None, None)
    assert (cliff.optimum(), cliff.fitted) == (-5.0, False)
    assert curve(None, None, None, None, None).optimum() is None
    assert curve(3.0, 2.0, 1.0, rates=RATES[:3]).optimum() == -5.0  # at the edge


def test_a_rate_with_one_diverged_seed_has_no_mean_in_any_draw() -> None:
    found = curve((2.0, 2.0), (0.0, None), (3.0, 1.0), rates=RATES[:3])
    assert [found.mean(at) for at in range(3)] == [2.0, None, 2.0]
    assert found.mean(1, (0, 0)) is None
    assert found.mean(2, (1, 1)) == 1.0
    assert (found.lowest(), found.lowest((1, 1))) == (0, 2)


def test_regret_is_what_the_base_s_rate_costs() -> None:
    base, other = parabola(-4.0), parabola(-6.0)
    assert other.regret(base) == pytest.approx(0.1 * 4)
    assert other.regret(other) == 0.0
    assert curve(5.0, 4.0, 3.0, rates=(-7.0, -6.0, -5.0)).regret(base) is None  # never tried there
    assert curve(3.0, 2.0, 1.0, None, None).regret(base) is None


def test_draws() -> None:
    assert draws_of(2) == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert len(set(draws_of(3))) == 27
    many = draws_of(8)
    assert len(many) == 2000
    assert statistics.mean(seed for draw in many for seed in draw) == pytest.approx(3.5, abs=0.1)


@pytest.mark.parametrize("seeds", [2, 3, 4, 5])
def test_the_interval_of_a_mean_is_student_s(seeds: int) -> None:
    values = [math.sin(7.0 * seed) for seed in range(seeds)]

    def mean(drawn: Seeds | None) -> float:
        return statistics.fmean(values if drawn is None else [values[seed] for seed in drawn])

    found = bootstrap(mean, seeds)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx(mean_interval(values))


def test_one_seed_and_unknown_draws_have_no_interval() -> None:
    assert bootstrap(lambda seeds: 1.0, 1) is not None
    alone, unknown = bootstrap(lambda seeds: 1.0, 1), bootstrap(lambda seeds: None if seeds == (0, 0) else 1.0, 2)
    for found in (alone, unknown):
        assert found is not None
        assert (found.value, found.low, found.high) == (1.0, None, None)
    assert bootstrap(lambda seeds: None, 3) is None


def test_a_bound_holds() -> None:
    found = bootstrap(lambda seeds: float(sum(seeds or (0,))), 3, least=0.0)
    assert found is not None
    assert found.low == 0.0


def test_three_seeds_cover_the_true_optimum_about_as_often_as_they_say() -> None:
    """Curves with noise of a twentieth of the depth; nominal .95, and a normal statistic would give it exactly."""
    stream, covered, studies = random.Random(1), 0, 300
    for _ in range(studies):
        noisy = curve(*(tuple(2.0 + 0.1 * (rate + 4.7) ** 2 + stream.gauss(0, 0.005) for _ in range(3)) for rate in RATES))
        found = bootstrap(noisy.optimum, 3)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= -4.7 <= found.high
    assert covered / studies >= 0.9
