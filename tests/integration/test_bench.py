"""`loop bench` as typed, at the scale that takes seconds. Timing decides nothing here: figures are there, and of equal work."""

from __future__ import annotations

import json
import math

import pytest

from services.cli.main import _run

Figures = dict[str, dict]


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> Figures:
    """The figures by name; all of them finite, in order and with a unit."""
    assert _run(["bench", *arguments, "--scale", "smoke", "--threads", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said.keys() == {"bench", "machine", "figures"}
    assert said["bench"] == arguments[0]
    assert said["machine"]["threads"] == 1
    assert said["machine"]["cores"] >= 1
    for figure in said["figures"]:
        assert figure.keys() == {"name", "value", "low", "high", "unit", "against"}
        assert math.isfinite(figure["value"])
        assert figure["low"] <= figure["value"] <= figure["high"]
        assert figure["unit"]
    found = {figure["name"]: figure for figure in said["figures"]}
    assert len(found) == len(said["figures"])
    return found


def test_training_is_timed_against_a_plain_block(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "train", "--width", "32")
    assert found.keys() >= {
        "ratio_eager_d32",
        "ratio_eager_fp32_d32",
        "ratio_training_d32",
        "ceiling_share_d32",
        "loss_difference",
    }
    assert found["ceiling_share_d32"]["low"] > 0.0
    assert abs(found["loss_difference"]["value"]) < 0.1  # of two steps: bf16 is close to fp32, whatever was timed


def test_a_population_is_timed_against_its_members_and_processes(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "population")
    assert found.keys() >= {"ratio_sequential_d16", "ratio_processes_d16", "ratio_study_d16"}
    assert min(found[f"ratio_{name}_d16"]["low"] for name in ("sequential", "processes", "study")) > 0.0
    assert found["loss_apart_d16"]["value"] < 1e-5  # both sides trained the same


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "there is no bench 'nothing'; expected one of"),
        (["train", "--scale", "large"], "expected the scale smoke or full, got 'large'"),
        (["train", "--rounds", "0"], "expected widths, rounds and threads of at least 1"),
        (["train", "--device", "tpu"], "tpu"),
        ([], "NAME"),
    ],
    ids=str,
)
def test_a_mistake_ends_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert _run(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
