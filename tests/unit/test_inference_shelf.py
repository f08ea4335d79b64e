"""Which versions are up: following what is wanted, swapping, sleeping, and what cannot be had."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from services.inference import shelf as shelf_module
from services.inference.limits import Limits
from services.inference.loaded import Loaded
from services.inference.schemas import Answer, PredictRequest
from services.inference.service import Service
from services.inference.shelf import NotServed, Shelf, Unusable
from services.inference.sources import FixedModels, Found
from tests.published import publish, small_model, small_spec


class Engine:
    """As much of an engine's thread as the shelf knows."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def join(self, timeout_s: float) -> bool:
        return self.closed


class Loader:
    """Loads nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.broken: set[str] = set()
        self.engines: dict[str, Engine] = {}

    def __call__(self, found: Found, limits: Limits) -> Loaded:
        name = f"{found.model}:{found.version}"
        self.loads.append(name)
        if name in self.broken:
            raise OSError("the disk is gone")
        self.engines[name] = Engine()

        class Up:
            engine = self.engines[name]
            version = found.version

        Up.found = found  # pyright: ignore[reportAttributeAccessIssue]
        return cast("Loaded", Up())


def found(model: str, version: str = "1") -> Found:
    return Found(model, version, Path("/nowhere"))


def on_shelf(body: Callable[[Shelf, FixedModels, Loader], Coroutine[Any, Any, None]], *models: Found, most: int = 8) -> None:
    async def main() -> None:
        source, loader = FixedModels(*models), Loader()
        shelf = Shelf(source, Limits(models=most), load=loader)
        await body(shelf, source, loader)
        await shelf.close()
        assert all(engine.closed for engine in loader.engines.values())

    asyncio.run(asyncio.wait_for(main(), 20.0))


def test_what_is_wanted_comes_up_and_what_is_not_goes() -> None:
    async def body(shelf: Shelf, source: FixedModels, loader: Loader) -> None:
        await shelf.open()
        assert shelf.ready
        assert shelf.state("a@x")[0] == "ready"
        del source.models["a@x"]
        source.models["c@x"] = found("c@x")
        await shelf.follow()
        assert shelf.names == ["b@x", "c@x"]
        assert loader.engines["a@x:1"].closed
        assert loader.loads == ["a@x:1", "b@x:1", "c@x:1"]
        with pytest.raises(NotServed) as raised:
            await shelf.get("a@x")
        assert raised.value.known == ["b@x", "c@x"]

    on_shelf(body, found("a@x"), found("b@x"))


def test_a_new_version_takes_over_and_the_old_one_drains() -> None:
    async def body(shelf: Shelf, source: FixedModels, loader: Loader) -> None:
        await shelf.open()
        source.models["a@x"] = found("a@x", "2")
        assert (await shelf.get("a@x")).version == "1"
        await shelf.follow()
        assert (await shelf.get("a@x")).version == "2"
        assert loader.engines["a@x:1"].closed
        assert not loader.engines["a@x:2"].closed

    on_shelf(body, found("a@x"))


def test_a_new_version_that_cannot_be_loaded_leaves_the_old_one_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(shelf: Shelf, source: FixedModels, loader: Loader) -> None:
        await shelf.open()
        loader.broken.add("a@x:2")
        source.models["a@x"] = found("a@x", "2")
        await shelf.follow()
        await shelf.follow()
        assert loader.loads == ["a@x:1", "a@x:2"]  # not tried again at every look
        state, up, problem = shelf.state("a@x")
        assert (state, up) == ("ready", found("a@x", "1"))
        assert problem == "a@x version 2 cannot be brought up: the disk is gone"
        loader.broken.clear()
        monkeypatch.setattr(shelf_module, "AGAIN_S", 0.0)
        await shelf.follow()
        assert (await shelf.get("a@x")).version == "2"
        assert shelf.state("a@x")[2] is None

    on_shelf(body, found("a@x"))


def test_one_model_that_cannot_be_had_keeps_no_other_down() -> None:
    async def body(shelf: Shelf, source: FixedModels, loader: Loader) -> None:
        loader.broken.add("a@x:1")
        source.models["c@x"] = "model c has no alias 'x'"
        await shelf.open()
        assert shelf.state("b@x")[0] == "ready"
        assert shelf.state("a@x") == ("failed", found("a@x"), "a@x version 1 cannot be brought up: the disk is gone")
        with pytest.raises(Unusable, match="the disk is gone"):
            await shelf.get("a@x")
        with pytest.raises(NotServed) as raised:
            await shelf.get("c@x")
        assert raised.value.why == "model c has no alias 'x'"
        assert loader.loads == ["a@x:1", "b@x:1"]

    on_shelf(body, found("a@x"), found("b@x"))


def test_the_model_unused_longest_sleeps_and_is_woken() -> None:
    async def body(shelf: Shelf, source: FixedModels, loader: Loader) -> None:
        await shelf.open()
        assert loader.loads == ["a@x:1", "b@x:1"]
        assert shelf.state("c@x")[0] == "asleep"
        await shelf.get("a@x")
        await asyncio.gather(*(shelf.get("c@x") for _ in range(5)))
        assert loader.loads == ["a@x:1", "b@x:1", "c@x:1"]
        assert [held.found.model for held in shelf.up] == ["a@x", "c@x"]
        assert loader.engines["b@x:1"].closed
        await shelf.get("b@x")
        assert [held.found.model for held in shelf.up] == ["c@x", "b@x"]

    on_shelf(body, found("a@x"), found("b@x"), found("c@x"), most=2)


def test_a_model_that_came_to_be_wanted_since_the_last_look_is_found_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(shelf: Shelf, source: FixedModels, loader: Loader) -> None:
        await shelf.open()
        source.models["b@x"] = found("b@x")
        with pytest.raises(NotServed):
            await shelf.get("b@x")  # looked just now: an unknown name must not make it look at every request
        monkeypatch.setattr(shelf_module, "ASIDE_S", 0.0)
        assert (await shelf.get("b@x")).version == "1"

    on_shelf(body, found("a@x"))


def test_while_nobody_can_tell_what_is_wanted_everything_stays() -> None:
    async def body(shelf: Shelf, source: FixedModels, loader: Loader) -> None:
        def away() -> Any:
            raise ConnectionError("the registry is away")

        there, source.wanted = source.wanted, away  # pyright: ignore[reportAttributeAccessIssue]
        await shelf.open()
        assert not shelf.ready
        with pytest.raises(Unusable, match="the registry is away"):
            await shelf.get("a@x")
        source.wanted = there  # pyright: ignore[reportAttributeAccessIssue]
        await shelf.follow()
        assert (await shelf.get("a@x")).version == "1"
        source.wanted = away  # pyright: ignore[reportAttributeAccessIssue]
        await shelf.follow()
        assert shelf.ready
        assert (await shelf.get("a@x")).version == "1"
        assert shelf.problem == "the registry is away"

    on_shelf(body, found("a@x"))


def test_it_follows_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "FOLLOW_S", 0.02)

    async def body(shelf: Shelf, source: FixedModels, loader: Loader) -> None:
        await shelf.open()
        source.models["a@x"] = found("a@x", "2")
        for _ in range(100):
            await asyncio.sleep(0.02)
            if (await shelf.get("a@x")).version == "2":
                return
        pytest.fail("it did not follow")

    on_shelf(body, found("a@x"))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda version: (version.checkpoint / "step-00000001" / "tensors.safetensors").write_bytes(b"x"), "checkpoint"),
        (lambda version: version.profile.write_text("{"), "profile.json cannot be used"),
        (lambda version: version.profile.write_text('{"halting": {"version": 99}}'), "expected a halting profile of version 2"),
        (lambda version: version.profile.write_text("[]"), "profile.json cannot be used"),
    ],
)
def test_files_that_are_not_right_fail_with_what_is_wrong(tmp_path: Path, spoil: Callable[[Any], Any], says: str) -> None:
    version = publish(tmp_path)
    spoil(version)

    async def main() -> None:
        service = Service(FixedModels(version))
        await service.open()
        card = await service.card("s3@demo")
        assert (card.state, card.version) == ("failed", "1")
        assert says in str(card.problem)
        with pytest.raises(Unusable, match=says):
            await service.ask("s3@demo", PredictRequest(inputs=[1]))
        await service.close()

    asyncio.run(main())


def test_a_swap_under_load_loses_nothing_and_every_answer_names_its_version(tmp_path: Path) -> None:
    """Requests keep coming while the alias moves to other weights; each answer is that of the version it names."""
    torch.set_num_threads(1)
    word = [1, 2, 3, 4]
    with torch.inference_mode():
        right = {
            str(seed + 1): small_model(small_spec(seed=seed))(torch.tensor([word]), 5).argmax(-1)[0].tolist()
            for seed in (0, 1, 2)
        }
    assert len(set(map(str, right.values()))) == 3
    versions = [publish(tmp_path, version=str(seed + 1), seed=seed) for seed in (0, 1, 2)]

    async def main() -> None:
        models = FixedModels(versions[0])
        service = Service(models)
        await service.open()
        answers: list[Answer] = []
        over = False

        async def client() -> None:
            while not over:
                asked = await service.ask("s3@demo", PredictRequest(inputs=list(word)))
                await asked.accepted()
                answer = await asked.answer()
                assert isinstance(answer, Answer)
                answers.append(answer)

        clients = [asyncio.create_task(client()) for _ in range(8)]
        for version in versions[1:]:
            await asyncio.sleep(0.1)
            models.models["s3@demo"] = version
            await service.shelf.follow()
        await asyncio.sleep(0.1)
        over = True
        await asyncio.gather(*clients)
        await service.close()
        assert {answer.model_version for answer in answers} == {"1", "2", "3"}
        assert all(answer.outputs == right[answer.model_version] for answer in answers)

    asyncio.run(asyncio.wait_for(main(), 30.0))


def test_a_profile_may_stand_beside_other_figures_or_alone(tmp_path: Path) -> None:
    from services.inference.loaded import read_profile
    from tests.published import PROFILE

    assert read_profile(json.loads(json.dumps(PROFILE.to_json()))) == PROFILE
    assert read_profile({"halting": PROFILE.to_json(), "v": 1.0}) == PROFILE
    assert read_profile({"halting": None}) is None
