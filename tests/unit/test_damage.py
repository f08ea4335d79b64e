"""Damage maps and cones, on models whose cones are known."""

from __future__ import annotations

import json
import weakref

import numpy as np
import pytest
import torch

from loopcore.errors import InputError, Undecided
from loopcore.instruments.cones import fit_cone, measure_cones
from loopcore.instruments.damage import Damage, DamageMap, damage_maps
from loopcore.model import LoopedTransformer
from loopcore.scaling import Multipliers
from loopcore.specs import ModelSpec, WordTask
from loopcore.tasks import WordProblem
from tests.unit.handmade import Jumping, Restless

Z5 = WordProblem(WordTask(group="Z5"))
N = 13
MEASURE = {"words": 100, "length": N, "loops": 8, "batch": 40}


def transformer(**fields: object) -> LoopedTransformer:
    spec = ModelSpec.model_validate({"width": 16, "heads": 2, "readout_init": "normal"} | fields)
    return LoopedTransformer(
        spec, vocabulary=5, classes=5, multipliers=Multipliers(), untied_loops=None if spec.tied else 4, seed=1
    )


def test_two_positions_a_loop_are_a_cone_of_two() -> None:
    result = measure_cones(Jumping(5, 2), Z5, bootstrap=100, **MEASURE)
    assert result.undecided == {}
    # Behind p every second position depends on it and changes one loop after the one before; the others are locked or fed apart.
    assert result.edge == tuple((p, d, d / 2) for p in (1, 2) for d in range(2, N - p, 2))
    speed = result.speed
    assert (speed.v, speed.r2, speed.low, speed.high) == pytest.approx((2.0, 1.0, 2.0, 2.0))
    # tau is 1 1 2 2 3 3 ...: a staircase whose slope over positions 1..12 is 1/2 up to its ends.
    stairs = np.polyfit(np.arange(1, N), (np.arange(N) // 2 + 1)[1:], 1)[0]
    assert result.speeds["tau_mean"].v == pytest.approx(1 / stairs)
    assert result.ratio == pytest.approx((2 * stairs, 2 * stairs, 2 * stairs))
    assert result.ratio[0] == pytest.approx(1.0, abs=0.05)


def test_the_map_shows_the_cone_entry_by_entry() -> None:
    (damage,) = damage_maps(Jumping(5, 2), Z5, positions=(1,), after=5, **MEASURE)
    assert damage.map.at is None
    assert len(damage.map.changed_SN) == 6
    for s, shares in enumerate(damage.map.changed_SN):
        assert [i for i, share in enumerate(shares) if share == 1.0] == [1 + 2 * k for k in range(s + 1)]
        assert set(shares) <= {0.0, 1.0}
        # A state is (known, value): what has changed has moved, what has not has not.
        assert [moved > 0 for moved in damage.map.moved_SN[s]] == [share == 1.0 for share in shares]
    # A donor with another answer is found for every word but by chance: 39 others, of which one in five agrees.
    assert damage.map.damaged == 100
    assert damage.onset_BN[:, 5].tolist() == [2] * 100
    assert damage.onset_BN[:, 4].tolist() == [-1] * 100


@pytest.mark.parametrize("jump", [1, 3])
def test_other_speeds(jump: int) -> None:
    result = measure_cones(Jumping(5, jump), Z5, words=64, length=N, loops=N, bootstrap=0)
    assert result.speed.v == pytest.approx(jump)
    assert result.speed.low is None
    assert result.ratio is not None
    assert result.ratio[1:] == (None, None)


def test_a_state_that_heals_is_seen_in_passing_and_gives_no_cone() -> None:
    result = measure_cones(Jumping(5, 2, heals=True), Z5, bootstrap=10, **MEASURE)
    pulse = result.maps[0].changed_SN
    assert [[i for i, share in enumerate(shares) if share] for shares in pulse[:4]] == [[1], [3], [5], [7]]
    assert "it heals" in result.undecided["cone"]
    with pytest.raises(Undecided, match="damage stays at 0 distance"):
        _ = result.speed
    assert result.ratio is None
    assert "tau_mean" in result.speeds


def test_a_model_that_never_converges_cannot_be_damaged() -> None:
    result = measure_cones(Restless(5, 2), Z5, **(MEASURE | {"loops": 9}))
    assert set(result.undecided) == {"cone", "ratio"}
    assert "0 at position 1" in result.undecided["cone"]
    assert result.maps[0].changed_SN == ()
    assert json.loads(json.dumps(result.to_json()))["maps"][0]["damaged"] == 0


def test_behind_the_front_solved_states_are_locked() -> None:
    (damage,) = damage_maps(Jumping(5, 2), Z5, positions=(1,), at=4, after=6, **MEASURE)
    assert damage.map.at == 4
    # 8 positions are solved; position 1 feeds only position 3, which is locked: nothing but p itself changes.
    assert all(shares == tuple(float(i == 1) for i in range(N)) for shares in damage.map.changed_SN)


def test_a_flipped_token_before_the_first_loop_is_the_flipped_word() -> None:
    (damage,) = damage_maps(Jumping(5, 2), Z5, positions=(3,), kind="flip", at=0, after=7, **MEASURE)
    for s, shares in enumerate(damage.map.changed_SN):
        assert [i for i, share in enumerate(shares) if share == 1.0] == [i for i in range(N) if 3 <= i < 2 * s]
    later = damage_maps(Jumping(5, 2), Z5, positions=(3,), kind="flip", at=2, after=7, **MEASURE)[0].map.changed_SN
    # After two loops positions 0..3 are locked, 4 and 5 are not; what leads to 5 by way of 3 does not see token 3 again.
    assert {i for i, share in enumerate(later[-1]) if share} == {4, 6, 8, 10, 12}


def test_noise_is_seeded_and_moves_the_state() -> None:
    def run(seed: int) -> Damage:
        return damage_maps(Jumping(5, 1), Z5, positions=(2,), kind="noise", **(MEASURE | {"loops": N, "seed": seed}))[0]

    assert run(0).map == run(0).map
    assert run(0).map != run(1).map
    first = run(0).map.moved_SN[0]
    assert first[2] > 0
    assert sum(first) == first[2]


@pytest.mark.parametrize("kind", ["donor", "noise", "flip"])
def test_a_causal_transformer_is_damaged_from_p_on_only(kind: str) -> None:
    model = transformer()
    (damage,) = damage_maps(model, Z5, words=20, length=6, loops=4, positions=(2,), kind=kind, at=1, after=3)  # type: ignore[arg-type]
    moved = torch.tensor(damage.map.moved_SN)
    assert moved.shape == (4, 6)
    assert moved[:, :2].abs().max() == 0.0
    assert moved[1:, 2:].min() > 0.0  # attention carries it to every later position within a loop
    assert moved[0].count_nonzero() == (0 if kind == "flip" else 1)


def test_a_donors_state_by_hand() -> None:
    """The first loops of a damaged run, taken step by step."""
    model = transformer(causal=False)
    (damage,) = damage_maps(model, Z5, words=2, length=4, loops=2, positions=(1,), at=1, after=1)
    batch = Z5.random_batch(seed=0, split="held_out", index=0, size=2, length=4)
    with torch.no_grad():
        e = model.embed(batch.tokens)
        h = model.loop(model.start(e), e, 0)
        hurt = h.clone()
        hurt[:, 2] = h.flip(0)[:, 2]  # position 1 is the state's third, BOS being its first; the donor is the other word
        apart = (model.loop(hurt, e, 1) - model.loop(h, e, 1))[:, 1:].norm(dim=-1) / model.loop(h, e, 1)[:, 1:].norm(dim=-1)
    assert batch.targets[0, 1] != batch.targets[1, 1]
    assert damage.map.damaged == 2
    assert damage.map.moved_SN[1] == pytest.approx(apart.mean(0).tolist(), rel=1e-5)


def test_memory_is_flat_in_loops() -> None:
    class Counting(Jumping):
        most, states = 0, weakref.WeakSet()

        def loop(self, h_BPD: torch.Tensor, e_BPD: torch.Tensor, t: int) -> torch.Tensor:
            new_BPD = super().loop(h_BPD, e_BPD, t)
            self.states.add(new_BPD)
            Counting.most = max(self.most, len(self.states))
            return new_BPD

    model = Counting(5, 1)
    damage_maps(model, Z5, words=10, length=5, loops=30, positions=(1, 2), at=20, after=30)
    assert model.alive == 3 * 50
    assert Counting.most <= 6  # the undamaged run and two damaged ones, before and after a loop


def test_an_untied_model_has_no_more_loops_than_weights() -> None:
    model = transformer(tied=False)
    result = measure_cones(model, Z5, words=20, length=6, loops=3)
    assert "needs 6 loops and this untied model has weights for 4" in result.undecided["cone"]
    assert result.rows() == []
    assert damage_maps(model, Z5, words=20, length=6, loops=3, at=1, after=3)


def test_states_that_are_not_finite_are_no_map() -> None:
    class Exploding(Jumping):
        def loop(self, h_BPD: torch.Tensor, e_BPD: torch.Tensor, t: int) -> torch.Tensor:
            return super().loop(h_BPD, e_BPD, t) / (t < 2)

    result = measure_cones(Exploding(5, 2), Z5, words=20, length=6, loops=2)
    assert "not finite" in result.undecided["cone"]


@pytest.mark.parametrize(
    "arguments",
    [{"positions": (13,)}, {"positions": ()}, {"positions": (1, 1)}, {"after": 0}, {"at": -1}, {"words": 0}],
    ids=str,
)
def test_bad_requests(arguments: dict[str, object]) -> None:
    with pytest.raises(InputError, match="expected"):
        damage_maps(Jumping(5, 2), Z5, **(MEASURE | arguments))  # type: ignore[arg-type]


def made_up(onset_BN: torch.Tensor, p: int) -> Damage:
    return Damage(DamageMap("donor", p, None, len(onset_BN), len(onset_BN), (), ()), onset_BN)


def test_the_fit_is_least_squares_over_both_positions_and_its_interval_holds_the_truth() -> None:
    """Onsets of distance / 1.25 plus noise; one in ten words heals."""
    generator = np.random.default_rng(0)
    found, points = [], []
    for p in (1, 2):
        onset = np.full((200, 12), -1)
        d = np.arange(1, 12 - p)
        onset[:, p + 1 :] = np.rint(d / 1.25 + 3 + generator.normal(0, 1, (200, len(d)))).astype(int).clip(0)
        onset[generator.random((200, 12)) < 0.1] = -1
        points += [(i - p, onset[onset[:, i] >= 0, i].mean()) for i in range(p + 1, 12)]
        found.append(made_up(torch.from_numpy(onset), p))
    correct_TBN = torch.arange(1, 15)[:, None, None] >= torch.arange(1, 13)  # v = 1 in every word
    result = fit_cone(found, correct_TBN.expand(14, 200, 12), bootstrap=400)
    slope = np.polyfit(*zip(*points, strict=True), 1)[0]
    assert result.speed.v == pytest.approx(1 / slope)
    assert result.speed.points == len(points)
    assert result.speed.low is not None
    assert result.speed.high is not None
    assert result.speed.low < 1.25 < result.speed.high
    assert result.speed.high - result.speed.low < 0.1
    assert result.ratio == pytest.approx((1 / slope, result.speed.low, result.speed.high))  # tau says exactly 1
    again = fit_cone(found, correct_TBN.expand(14, 200, 12), bootstrap=400)
    assert again == result
    rows = result.rows()
    assert {row["instrument"] for row in rows} == {"damage_onset", "speed", "speed_r2", "cone_ratio"}
    assert json.loads(json.dumps(result.to_json()))["speeds"]["cone"]["v"] == result.speed.v


def test_too_few_words_that_stay_changed_make_no_point() -> None:
    onset = torch.full((20, 12), -1)
    onset[:7, 2:] = 3  # seven words, where eight are needed
    correct_TBN = (torch.arange(1, 15)[:, None, None] >= torch.arange(1, 13)).expand(14, 20, 12)
    assert "damage stays at 0 distance" in fit_cone([made_up(onset, 1)], correct_TBN).undecided["cone"]
    onset[:8, 2:] = 3
    assert "no cone" in fit_cone([made_up(onset, 1)], correct_TBN).undecided["cone"]
    onset[:8, 2:] = torch.arange(10)
    result = fit_cone([made_up(onset, 1)], correct_TBN, bootstrap=50)
    assert result.speed.v == pytest.approx(1.0)
    unsolved = fit_cone([made_up(onset, 1)], torch.zeros(14, 20, 12, dtype=torch.bool), bootstrap=50)
    assert unsolved.speed.v == pytest.approx(1.0)
    assert "0 of 20 words are solved" in unsolved.undecided["ratio"]
    assert unsolved.ratio is None
