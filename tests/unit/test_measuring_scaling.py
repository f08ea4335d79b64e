"""The instruments of scaling as a probe runs them: on the run's own spec, as initialised and as trained."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from loopcore.model import build_model
from loopcore.specs import ProbeSpec, TrainSpec
from loopcore.tasks import load_task
from tests.unit.handmade import Jumping
from workers.measuring import Probed, measure

SCALING = ("perturbation", "kappa", "growth", "plateau")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def spec(rule: str = "deeploop", **model: Any) -> TrainSpec:
    norm = "post" if rule in ("deepnorm", "deeploop") else "pre"
    shape = {"width": 16, "heads": 2, "injection": "none", "readout_init": "normal", "norm": norm} | model
    return TrainSpec.model_validate(
        {
            "model": shape,
            "task": {"kind": "word", "group": "Z7"},
            "contract": {"lengths": [6], "loops": {"kind": "fixed", "count": 3}},
            "scaling": {"rule": rule, "base_width": 16},
            "batch": 8,
        }
    )


def probe(train: TrainSpec, *instruments: str, model: Any = None, trained: TrainSpec | None = None) -> Probed:
    task = load_task(train.task)
    model = model or build_model(trained or train, task).eval()
    asked = ProbeSpec.model_validate({"job": 1, "instruments": instruments, "words": 16, "loops_factor": 1.0})
    found = measure(model, task, train, asked)
    json.dumps([found.rows, found.figures, found.undecided], allow_nan=False)
    assert all(math.isfinite(row["value"]) for row in found.rows)
    assert len({json.dumps([row["instrument"], row["axes"]], sort_keys=True) for row in found.rows}) == len(found.rows)
    return found


def rows(found: Probed, instrument: str, **axes: Any) -> dict[Any, float]:
    """Loops (or visit) to value."""
    chosen = [row for row in found.rows if row["instrument"] == instrument and axes.items() <= row["axes"].items()]
    return {row["axes"].get("visit", row["axes"].get("loops")): row["value"] for row in chosen}


def test_one_step_changes_of_both_updates_tied_and_untied() -> None:
    found = probe(spec(), "perturbation")
    assert found.undecided == {}
    for tied in (True, False):
        for update in ("sgd", "sign"):
            changes = rows(found, "perturbation", of="logit_change", tied=tied, update=update)
            assert sorted(changes) == [1, 2, 4, 8, 16]
    # One loop has one visit, tied or not: the same weights, the same step.
    once = [rows(found, "perturbation", of="logit_change", tied=tied, update="sgd")[1] for tied in (True, False)]
    assert once[0] == pytest.approx(once[1], rel=1e-5)
    # p = 1/2: 2 - 4p = 0 tied, 1 - 4p = -1 untied.
    assert found.figures["perturbation"]["sgd_tied"] == pytest.approx(0.0, abs=0.25)
    assert found.figures["perturbation"]["sgd_untied"] == pytest.approx(-1.0, abs=0.25)


def test_kappa_at_the_start_and_at_the_end() -> None:
    train = spec()
    same = probe(train, "kappa")
    at = {end: rows(same, "kappa", of="norm_weighted_largest", at=end) for end in ("start", "end")}
    assert at["start"] == at["end"], "a run of no steps ends where it starts"
    assert 2.5 < at["start"][3] <= 3.0 + 1e-6  # the visits of deeploop align: kappa_R = R at R = 3
    other = probe(train, "kappa", trained=train.model_copy(update={"seed": 1}))
    assert rows(other, "kappa", of="norm_weighted_largest", at="start") == at["start"]
    assert rows(other, "kappa", of="norm_weighted_largest", at="end") != at["end"]


def test_growth_of_shared_and_of_distinct_blocks() -> None:
    found = probe(spec("standard"), "growth")
    assert sorted(rows(found, "growth", of="displacement", tied=True)) == list(range(1, 33))
    assert found.figures["growth"]["tied"]["visits"] == pytest.approx(1.0, abs=0.15)
    assert found.figures["growth"]["untied"]["visits"] == pytest.approx(0.55, abs=0.15)
    # Under standard scaling no multiplier knows of the loops, so where T loops end is where T visits are.
    ends = rows(found, "growth", of="final_displacement", tied=True)
    assert ends[16] == pytest.approx(rows(found, "growth", of="displacement", tied=True)[16], rel=1e-5)
    assert probe(spec("loop_mup"), "growth").figures["growth"]["tied"]["loops"] == pytest.approx(0.0, abs=0.1)


def test_an_untrained_model_is_on_the_plateau() -> None:
    found = probe(spec(), "plateau")
    below = next(row for row in found.rows if row["instrument"] == "plateau" and row["axes"]["of"] == "below")
    assert below["axes"]["loop"] == 3
    assert below["low"] <= below["value"] < 0.1


def test_what_has_no_scaling_is_undecided() -> None:
    train = spec("standard")
    made = probe(train, *SCALING[:3], model=Jumping(7, 2))
    assert all("this model is a Jumping" in made.undecided[name] for name in SCALING[:3])
    zero = probe(spec("standard", readout_init="zero"), "perturbation", "kappa")
    assert "exactly zero" in zero.undecided["perturbation"]
    assert "exactly zero" in zero.undecided["kappa"]
    streaming = train.resolved()
    streaming["contract"] |= {"input_schedule": "streaming", "loops": {"kind": "fixed", "count": 6}}
    streaming["model"]["injection"] = "linear"
    found = probe(TrainSpec.model_validate(streaming), *SCALING)
    assert all("streaming" in found.undecided[name] for name in SCALING)
