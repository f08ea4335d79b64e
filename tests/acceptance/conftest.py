"""One stack serves all acceptance tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.stack import Stack, environment_for


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A running stack: `loop up --detach` before the first test, `loop down` after the last."""
    home = tmp_path_factory.mktemp("stack")
    running = Stack(home, environment_for(home))
    done = running.loop("up", "--detach")
    if done.returncode:
        logs = "\n".join(f"== {path}\n{path.read_text()[-2000:]}" for path in sorted((home / "logs").glob("*.log")))
        pytest.fail(f"loop up: {done.stderr}\n{logs}")
    yield running
    ended = running.loop("down")
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def quick(tmp_path: Path) -> str:
    """The spec of a training job of a few seconds."""
    path = tmp_path / "quick.yaml"
    path.write_text(
        "kind: train\nname: quick\nmodel: {width: 16, heads: 2}\ncontract: {lengths: [2, 4]}\n"
        "steps: 20\nevaluate_every: 10\nevaluate_on: 32\ncheckpoint_every: 10\n"
    )
    return str(path)
