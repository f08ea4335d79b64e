"""A model version as MLflow's own tools load it, with pickles forbidden."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from loopcore.tasks import WordProblem, load_task
from services.settings import Settings
from services.tracking import Tracking
from tests.published import PROFILE, publish, small_model, small_spec

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def alone(word: list[int], loops: int) -> list[int]:
    with torch.inference_mode():
        return small_model(small_spec())(torch.tensor([word]), loops).argmax(-1)[0].tolist()


def text(tokens: list[int]) -> str:
    task = load_task(small_spec().task)
    assert isinstance(task, WordProblem)
    return task.decode(tokens)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as the `register` job makes it."""
    from workers.register import _build

    spec = small_spec()
    return _build(tmp_path_factory.mktemp("model"), small_model(spec), spec, 1, {"halting": PROFILE.to_json()})[0]


@pytest.fixture(scope="module")
def loaded(files: Path) -> Iterator[Any]:
    import mlflow

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
        yield mlflow.pyfunc.load_model(str(files))


def test_no_file_of_it_is_a_pickle(files: Path) -> None:
    names = sorted(path.suffix for path in files.rglob("*") if path.is_file() and path.name != "MLmodel")
    assert set(names) == {".safetensors", ".json", ".py", ".yaml", ".txt"}
    needed = (files / "requirements.txt").read_text().split()
    assert all("==" in line for line in needed)
    assert {"loopcore", "torch"} <= {line.partition("==")[0] for line in needed}


@pytest.mark.parametrize("form", ["list", "frame", "other frame", "series"])
def test_text_is_answered_with_text_and_the_loops_it_took(loaded: Any, form: str) -> None:
    words = [text([3, 1, 4]), text([5])]
    given = {
        "list": words,
        "frame": pd.DataFrame({"word": words}),
        "other frame": pd.DataFrame({"anything": words}),
        "series": pd.Series(words),
    }[form]
    told = loaded.predict(given)
    assert told["answer"].tolist() == [text(alone([3, 1, 4], 4)), text(alone([5], 2))]
    assert told["loops"].tolist() == [4, 2]  # ceil(n / 1) + 1
    assert told["loops_planned"].tolist() == [4, 2]
    assert told["exit_reason"].tolist() == ["rule", "rule"]


def test_a_rule_may_be_asked_for(loaded: Any) -> None:
    assert loaded.predict([text([1, 2])], params={"halt": "fixed:7"})["loops"].tolist() == [7]
    told = loaded.predict([text([1, 2])], params={"halt": "converged:1e9"})
    assert (told["loops"].tolist(), told["loops_planned"].tolist(), told["exit_reason"].tolist()) == ([1], [None], ["converged"])
    with pytest.raises(ValueError, match="halt is 'sometimes'; expected rule"):
        loaded.predict([text([1])], params={"halt": "sometimes"})


def test_ids_are_answered_with_ids(loaded: Any) -> None:
    frame = pd.DataFrame({"word": [[3, 1, 4], [5]]})
    assert loaded.predict(frame)["answer"].tolist() == [alone([3, 1, 4], 4), alone([5], 2)]
    model = loaded.unwrap_python_model()
    assert model.predict(None, np.array([[3, 1], [0, 5]]))["answer"].tolist() == [alone([3, 1], 3), alone([0, 5], 3)]
    assert model.predict(None, [[3, 1], [5]])["answer"].tolist() == [alone([3, 1], 3), alone([5], 2)]
    assert model.predict(None, pd.DataFrame({"a": [3, 0], "b": [1, 5]}))["answer"].tolist() == [
        alone([3, 1], 3),
        alone([0, 5], 3),
    ]


def test_what_is_no_word_is_refused(loaded: Any) -> None:
    with pytest.raises(ValueError, match="'9' is no element of S3"):
        loaded.predict(["1 9"])
    with pytest.raises(ValueError, match="expected tokens from 0 to 5, got 6"):
        loaded.predict(pd.DataFrame({"word": [[6]]}))
    with pytest.raises(ValueError, match="empty"):
        loaded.predict([""])
    model = loaded.unwrap_python_model()
    for wrong in ([3, 1], [1.5], [[True]], [None]):
        with pytest.raises(ValueError, match=r"word 0 is .*; expected text"):
            model.predict(None, wrong)


def test_a_model_that_was_never_probed_takes_the_trained_loops(tmp_path: Path) -> None:
    import mlflow

    from workers.register import _build

    spec = small_spec()
    files, _ = _build(tmp_path, small_model(spec), spec, 1, None)
    told = mlflow.pyfunc.load_model(str(files)).predict([text([1, 2])])
    assert (told["loops"].tolist(), told["exit_reason"].tolist()) == ([4], ["fixed"])
    assert told["answer"].tolist() == [text(alone([1, 2], 4))]


def test_the_stock_scoring_server_answers(loaded: Any) -> None:
    from mlflow.pyfunc.scoring_server import init
    from starlette.testclient import TestClient

    client = TestClient(init(loaded))
    answer = client.post("/invocations", json={"inputs": [text([3, 1])], "params": {"halt": "fixed:2"}})
    expected = {"answer": text(alone([3, 1], 2)), "loops": 2, "loops_planned": 2, "exit_reason": "fixed"}
    assert answer.json() == {"predictions": [expected]}


def test_another_process_loads_it_by_its_alias(files: Path, tmp_path: Path) -> None:
    """As in the README: nothing but MLflow's own calls, the database's URL, and pickles off."""
    settings = Settings(home=tmp_path)
    tracking = Tracking(settings)
    run = tracking.start_run("model", {}, {}, key="model")
    tracking.set_alias("s3", "demo", tracking.register("s3", files=files, mlflow_run=run, tags={}, key="1"))
    code = (
        f"import mlflow, json; mlflow.set_tracking_uri({settings.mlflow_url!r});"
        f"print(json.dumps(mlflow.pyfunc.load_model('models:/s3@demo').predict([{text([3, 1, 4])!r}]).to_dict('records')))"
    )
    environment = os.environ | {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.strip().splitlines()[-1])
    assert told == [{"answer": text(alone([3, 1, 4], 4)), "loops": 4, "loops_planned": 4, "exit_reason": "rule"}]


def test_what_the_service_and_mlflow_read_is_the_same(tmp_path: Path, files: Path) -> None:
    """One folder, read by both: the service's own reader finds the profile beside the figures of the probe."""
    from services.inference.limits import Limits
    from services.inference.loaded import bring_up
    from services.inference.sources import Found

    found = Found("s3@demo", "1", files / "artifacts" / "checkpoint", files / "artifacts" / "profile.json")
    up = bring_up(found, Limits())
    try:
        assert up.profile == PROFILE
        assert up.max_length == 16
    finally:
        up.engine.close()
        assert up.engine.join(5.0)
    assert publish(tmp_path).checkpoint.is_dir()
