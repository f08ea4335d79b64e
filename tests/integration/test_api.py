"""The API over a real registry: what it takes, what it refuses and how, and that it does what its document says."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.api.app import create_app
from services.api.guards import MOST_BYTES
from services.registry import CurvePoint, Measurement, Registry, migrate
from services.settings import Settings
from tests.serving import served

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of MLflow, in this process

TRAIN = {"kind": "train", "seed": 3}


@pytest.fixture
def settings(tmp_path: Path, registry_url: str) -> Settings:
    migrate(registry_url)
    return Settings(home=tmp_path, registry_url=registry_url)


@pytest.fixture
def registry(settings: Settings) -> Iterator[Registry]:
    with Registry.open(settings.registry_url) as opened:
        yield opened


@pytest.fixture
def api(settings: Settings) -> Iterator[httpx.Client]:
    with served(create_app(settings)) as client:
        yield client


@pytest.fixture
def plain_api(tmp_path: Path) -> Iterator[httpx.Client]:
    """On SQLite only, for what has nothing to do with the database."""
    settings = Settings(home=tmp_path)
    migrate(settings.registry_url)
    with served(create_app(settings)) as client:
        yield client


def submit(api: httpx.Client, spec: dict[str, Any], **rest: Any) -> dict[str, Any]:
    answer = api.post("/v1/jobs", json={"spec": spec, **rest})
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def test_a_submitted_job_is_a_row_with_all_defaults_written_out(api: httpx.Client, registry: Registry) -> None:
    where_from = {
        "commit": "abc",
        "dirty": None,
        "packages": {"torch": "2.13.0"},
        "python": "3.11",
        "platform": "linux",
        "host": "h",
        "cpus": 4,
    }
    answer = submit(api, TRAIN | {"name": "first"}, priority=5, user="ada", provenance=where_from)
    assert answer["created"] is True
    job = registry.queue.job(answer["job"]["id"])
    assert (job.kind, job.name, job.priority, job.user, job.cpus, job.loss_budget) == ("train", "first", 5, "ada", 1.0, 5)
    assert job.spec["optimizer"]["lr"] == 1e-3
    assert job.spec["seed"] == 3
    assert job.provenance == where_from
    read = api.get(f"/v1/jobs/{job.id}").json()
    assert read["state"] == "queued"
    assert read["needs"] == []
    assert read["digest"] == job.digest


def test_the_same_key_gives_the_same_job_and_another_spec_is_a_conflict(api: httpx.Client) -> None:
    first = api.post("/v1/jobs", json={"spec": TRAIN, "key": "a"})
    again = api.post("/v1/jobs", json={"spec": TRAIN, "key": "a"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["created"] is False
    assert again.json()["job"]["id"] == first.json()["job"]["id"]
    other = api.post("/v1/jobs", json={"spec": TRAIN | {"seed": 4}, "key": "a"})
    assert other.status_code == 409
    assert other.json()["error"] == "key 'a' is held by job 1, whose spec is another one"
    assert other.json()["expected"] == "the same spec or a free key"
    assert len(api.get("/v1/jobs").json()["jobs"]) == 1


def test_a_probe_waits_for_the_job_it_names_and_for_those_given(api: httpx.Client) -> None:
    first, second = (submit(api, TRAIN)["job"]["id"] for _ in range(2))
    probe = submit(api, {"kind": "probe", "job": first}, after=[second, first])["job"]
    assert probe["unmet"] == 2
    assert api.get(f"/v1/jobs/{probe['id']}").json()["needs"] == [first, second]


def test_a_reference_to_a_job_of_another_kind_is_refused_at_once(api: httpx.Client) -> None:
    train = submit(api, TRAIN)["job"]["id"]
    probe = submit(api, {"kind": "probe", "job": train})["job"]["id"]
    answer = api.post("/v1/jobs", json={"spec": {"kind": "probe", "job": probe}})
    assert answer.status_code == 422
    assert answer.json()["field"] == "spec.job"
    assert answer.json()["error"] == f"job {probe} is of kind probe"
    answer = api.post("/v1/models", json={"job": train, "probe": train, "model": "s3@a"})
    assert answer.json()["field"] == "spec.probe"
    answer = api.post("/v1/jobs", json={"spec": TRAIN | {"start_from": probe}})
    assert (answer.status_code, answer.json()["field"]) == (422, "spec.start_from")
    assert len(api.get("/v1/jobs").json()["jobs"]) == 2


def test_pages_go_back_from_the_newest_without_gap_or_repeat(api: httpx.Client) -> None:
    numbers = [submit(api, TRAIN | {"seed": seed})["job"]["id"] for seed in range(5)]
    seen, before = [], None
    while True:
        page = api.get("/v1/jobs", params={"limit": 2} | ({"before": before} if before else {})).json()
        seen += [job["id"] for job in page["jobs"]]
        before = page["next"]
        if before is None:
            break
    assert seen == numbers[::-1]


def test_filters_are_by_state_kind_and_user(api: httpx.Client) -> None:
    mine = submit(api, TRAIN, user="ada")["job"]["id"]
    submit(api, TRAIN, user="bob")
    probe = submit(api, {"kind": "probe", "job": mine}, user="ada")["job"]["id"]
    api.post(f"/v1/jobs/{probe}/cancel")

    def found(**params: str) -> list[int]:
        return [job["id"] for job in api.get("/v1/jobs", params=params).json()["jobs"]]

    assert found(user="ada", state="queued") == [mine]
    assert found(kind="probe") == [probe]
    assert found(state="cancelled") == [probe]


def test_cancel_retry_and_what_they_refuse(api: httpx.Client) -> None:
    job = submit(api, TRAIN)["job"]["id"]
    refused = api.post(f"/v1/jobs/{job}/retry")
    assert refused.status_code == 409
    assert refused.json()["error"] == f"cannot retry job {job}: it is queued"
    assert refused.json()["expected"] == "failed or cancelled"
    assert api.post(f"/v1/jobs/{job}/cancel").json()["state"] == "cancelled"
    again = api.post(f"/v1/jobs/{job}/retry")
    assert again.status_code == 201
    assert again.json()["retry_of"] == job


def test_logs_are_read_in_pieces_and_say_when_no_more_will_come(api: httpx.Client, registry: Registry) -> None:
    job = submit(api, TRAIN)["job"]["id"]
    claimed = registry.queue.claim("here", cpus=1, gpus=0, memory_gb=1)
    assert claimed is not None
    for text in ("one\n", "two\n", "three\n"):
        registry.queue.log(claimed.fence, text)
    page = api.get(f"/v1/jobs/{job}/logs", params={"limit": 2}).json()
    assert [chunk["text"] for chunk in page["chunks"]] == ["one\n", "two\n"]
    rest = api.get(f"/v1/jobs/{job}/logs", params={"after": page["next"]}).json()
    assert [chunk["text"] for chunk in rest["chunks"]] == ["three\n"]
    assert rest["ended"] is False
    registry.queue.succeed(claimed.fence, {})
    last = api.get(f"/v1/jobs/{job}/logs", params={"after": rest["next"]}).json()
    assert last == {"chunks": [], "next": rest["next"], "ended": True}


def test_a_run_is_read_with_its_curve_and_measurements(api: httpx.Client, registry: Registry) -> None:
    job = submit(api, TRAIN)["job"]["id"]
    claimed = registry.queue.claim("here", cpus=1, gpus=0, memory_gb=1)
    assert claimed is not None
    run = registry.records.open_run(claimed.fence, kind="train", spec=claimed.spec, provenance={})
    points = [CurvePoint(0, "loss", 1.5), CurvePoint(10, "loss", float("nan")), CurvePoint(10, "lr", 1e-3)]
    registry.records.add_points(claimed.fence, run.id, points)
    registry.records.measure(claimed.fence, run.id, [Measurement("frontier", {"loop": 1}, 1.0, 0.9, 1.1)])
    registry.records.add_checkpoint(claimed.fence, run.id, 10, "/data/step-10", "d" * 64)
    assert [found["id"] for found in api.get("/v1/runs", params={"job": job}).json()["runs"]] == [run.id]
    assert api.get(f"/v1/runs/{run.id}").json()["checkpoint_step"] == 10
    assert api.get(f"/v1/runs/{run.id}/curve", params={"name": "loss"}).json()["points"] == [
        {"step": 0, "name": "loss", "value": 1.5},
        {"step": 10, "name": "loss", "value": None},
    ]
    assert api.get(f"/v1/runs/{run.id}/measurements").json()["measurements"] == [
        {"instrument": "frontier", "axes": {"loop": 1}, "value": 1.0, "low": 0.9, "high": 1.1, "run": run.id}
    ]
    assert api.get(f"/v1/runs/{run.id}/checkpoints").json()["checkpoints"][0]["place"] == "/data/step-10"


def test_ready_means_that_a_dispatcher_with_a_cluster_spoke_lately(api: httpx.Client, registry: Registry) -> None:
    assert api.get("/health/live").json() == {"status": "ok"}
    answer = api.get("/health/ready")
    assert (answer.status_code, answer.json()["error"]) == (503, "no dispatcher is up")
    registry.queue.announce("d", "host", 1, {"ray": "down", "problem": "it is gone"})
    assert api.get("/health/ready").json()["error"] == "the dispatcher has no cluster: it is gone"
    registry.queue.announce("d", "host", 1, {"ray": "up", "nodes": []})
    assert api.get("/health/ready").status_code == 200
    submit(api, TRAIN)
    cluster = api.get("/v1/cluster").json()
    assert cluster["counts"] == {"queued": 1, "blocked": 0, "running": 0, "succeeded": 0, "failed": 0, "cancelled": 0}
    assert [row["id"] for row in cluster["dispatchers"]] == ["d"]


def test_a_model_that_does_not_exist_is_not_queued_for_serving(plain_api: httpx.Client) -> None:
    answer = plain_api.post("/v1/served", json={"model": "s3@champion"})
    assert answer.status_code == 404
    assert answer.json()["error"] == "there is no model s3@champion"
    assert plain_api.get("/v1/jobs").json()["jobs"] == []
    assert plain_api.get("/v1/models").json() == {"models": []}
    assert plain_api.delete("/v1/served/s3@champion").status_code == 404


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/jobs/7", "there is no job 7"),
        ("/v1/jobs/9223372036854775807", "there is no job 9223372036854775807"),
        ("/v1/jobs/7/logs", "there is no job 7"),
        ("/v1/runs/7", "there is no run 7 in the registry"),
        ("/v1/runs/7/curve", "there is no run 7 in the registry"),
        ("/v1/runs?job=7", "there is no job 7"),
        ("/v2/jobs", "there is nothing at this address"),
    ],
)
def test_what_is_not_there_is_404_with_what_to_do(plain_api: httpx.Client, path: str, told: str) -> None:
    answer = plain_api.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"] == told
    assert answer.json()["expected"]


@pytest.mark.parametrize(
    ("body", "field", "told"),
    [
        ({"spec": {"kind": "train", "sede": 1}}, "spec.sede", "unknown field"),
        ({"spec": {"kind": "train", "batch": "many"}}, "spec.batch", "got 'many'"),
        ({"spec": {"kind": "train", "contract": {"loops": {"kind": "fixed", "count": 0}}}}, "spec.contract.loops.count", "got 0"),
        ({"spec": {"kind": "train", "optimizer": {"lr": 1e999}}}, "spec.optimizer.lr", "got inf"),
        ({"spec": {"kind": "drain"}}, "spec.kind", "got 'drain'"),
        ({"spec": {}}, "spec.kind", "this field is missing"),
        ({"spec": [1]}, "spec", "got [1]"),
        ({}, "spec", "this field is missing"),
        ({"spec": TRAIN, "priority": 10**9}, "priority", "got 1000000000"),
        ({"spec": TRAIN, "key": ""}, "key", "got ''"),
        ({"spec": TRAIN, "key": "a\nb"}, "key", "got 'a\\nb'"),
        ({"spec": TRAIN, "after": [0]}, "after.0", "got 0"),
        ({"spec": TRAIN, "delay_s": -1}, "delay_s", "got -1"),
        ({"spec": TRAIN, "who": "me"}, "who", "unknown field"),
        ({"spec": TRAIN | {"name": "\ud800"}}, "spec.name", "got '\\ud800'"),
    ],
)
def test_a_bad_field_is_named_with_what_was_expected_and_nothing_is_queued(
    plain_api: httpx.Client, body: dict[str, Any], field: str, told: str
) -> None:
    import json

    answer = plain_api.post("/v1/jobs", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["field"] == field
    assert answer.json()["error"] == told
    assert answer.json()["expected"]
    assert plain_api.get("/v1/jobs").json()["jobs"] == []


def test_every_bad_field_has_its_entry(plain_api: httpx.Client) -> None:
    answer = plain_api.post("/v1/jobs", json={"spec": {"kind": "train", "batch": 0, "steps": 0}, "priority": "high"})
    assert {problem["field"] for problem in answer.json()["problems"]} == {"spec.batch", "spec.steps", "priority"}


@pytest.mark.parametrize("query", ["state=done", "limit=0", "limit=5000", "before=x", "stat=queued", "kind=drain"])
def test_a_bad_filter_is_named(plain_api: httpx.Client, query: str) -> None:
    answer = plain_api.get(f"/v1/jobs?{query}")
    assert answer.status_code == 422
    assert answer.json()["field"] == query.partition("=")[0]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"spec": NaN}', "null"])
def test_a_body_that_is_no_json_object_is_refused(plain_api: httpx.Client, text: str) -> None:
    answer = plain_api.post("/v1/jobs", content=text, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]


def test_a_form_of_another_site_cannot_submit_or_cancel(plain_api: httpx.Client) -> None:
    submit(plain_api, TRAIN)
    foreign = {"origin": "https://evil.example"}
    assert plain_api.post("/v1/jobs/1/cancel", headers=foreign).status_code == 403
    assert (
        plain_api.post("/v1/jobs", content='{"spec": {"kind": "train"}}', headers={"content-type": "text/plain"}).status_code
        == 422
    )
    assert plain_api.get("/v1/jobs/1").json()["state"] == "queued"
    assert plain_api.post("/v1/jobs/1/cancel", headers={"origin": str(plain_api.base_url)}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.7:8700", "[::1"])
def test_a_name_that_was_made_to_point_here_is_refused(plain_api: httpx.Client, host: str) -> None:
    assert plain_api.get("/v1/jobs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:8700"])
def test_every_name_of_loopback_is_answered(plain_api: httpx.Client, host: str) -> None:
    assert plain_api.get("/v1/jobs", headers={"host": host}).status_code == 200


def test_a_large_body_is_refused_whether_or_not_it_says_how_large_it_is(plain_api: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    assert plain_api.post("/v1/jobs", content=b"x" * (MOST_BYTES + 1), headers=headers).status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(3):
            yield b"x" * (MOST_BYTES // 2)

    assert plain_api.post("/v1/jobs", content=chunks(), headers=headers).status_code == 413


def test_a_method_that_an_address_does_not_take_is_told_those_it_does(plain_api: httpx.Client) -> None:
    answer = plain_api.put("/v1/jobs")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")


def test_a_registry_that_is_away_is_503_and_comes_back_by_itself(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, registry_url="postgresql://nobody:hunter2@127.0.0.1:9/loop")
    with served(create_app(settings)) as client:
        answer = client.get("/v1/jobs")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert "hunter2" not in answer.text
        assert client.get("/health/live").status_code == 200
    settings = Settings(home=tmp_path)
    with served(create_app(settings)) as client:
        assert "run `loop db upgrade`" in client.get("/v1/jobs").text
        migrate(settings.registry_url)
        assert client.get("/v1/jobs").status_code == 200


def test_a_registry_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    migrate(settings.registry_url)
    with sqlite3.connect(tmp_path / "registry.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    with served(create_app(settings)) as client:
        answer = client.get("/v1/jobs")
    assert answer.status_code == 503
    assert "has schema 9999; this version knows up to" in answer.json()["error"]


def test_mlflow_that_is_down_is_503_and_nothing_else_minds(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, mlflow_url="http://127.0.0.1:9")
    migrate(settings.registry_url)
    with served(create_app(settings)) as client:
        answer = client.get("/v1/models")
        assert answer.status_code == 503
        assert "MLflow at http://127.0.0.1:9" in answer.json()["error"]
        assert client.get("/v1/jobs").status_code == 200
