"""The service over real HTTP with a small real model: answers, streams, and every way to be refused."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import torch

from loopcore.tasks import WordProblem, load_task
from services.inference.app import create_app
from services.inference.limits import Limits
from services.inference.service import Service
from services.inference.sources import FixedModels
from tests.published import publish, small_model, small_spec
from tests.serving import served

PREDICT = "/v1/models/s3@demo/predict"
LIMITS = Limits(rows=4, queue=8, models=4, loops_factor=50_000)
FOREVER = "fixed:200000"  # minutes of loops: a request that ends only by being given up


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("models")
    models = FixedModels(publish(folder), publish(folder, "bare@demo", probed=False), publish(folder, "z4@demo", group="Z4"))
    models.models["gone@demo"] = "model gone has no alias 'demo'; expected one that exists: gone@old"
    torch.set_num_threads(1)
    with served(create_app(Service(models, LIMITS), installation="abc")) as client:
        yield client


def alone(word: list[int], loops: int, *, seed: int = 0) -> list[int]:
    """What the model says to a word by itself after so many loops, by its plain forward pass."""
    with torch.inference_mode():
        return small_model(small_spec(seed=seed))(torch.tensor([word]), loops).argmax(-1)[0].tolist()


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error", "expected", "hint", "field", "problems"}
    return body


def card(client: httpx.Client, model: str = "s3@demo") -> dict[str, Any]:
    return client.get(f"/v1/models/{model}").json()


def test_a_word_as_ids_is_answered_after_its_planned_loops(client: httpx.Client) -> None:
    answer = client.post(PREDICT, json={"inputs": [3, 1, 4]}).json()
    assert answer["outputs"] == alone([3, 1, 4], 4)  # ceil(3 / 1) + 1
    assert (answer["loops_used"], answer["loops_planned"], answer["loops_budget"]) == (4, 4, 4)
    assert (answer["exit_reason"], answer["model"], answer["model_version"]) == ("rule", "s3@demo", "1")
    assert answer["expected_accuracy"] == 1.0
    assert answer["queue_ms"] >= 0
    assert answer["compute_ms"] > 0
    assert client.post(PREDICT, json={"inputs": [1]}).json()["loops_used"] == 2


def test_text_is_answered_with_text(client: httpx.Client) -> None:
    task = load_task(small_spec().task)
    assert isinstance(task, WordProblem)
    word = task.decode([3, 1])
    answer = client.post(PREDICT, json={"inputs": word}).json()
    assert answer["outputs"] == task.decode(alone([3, 1], 3))


def test_several_words_are_answered_in_lists(client: httpx.Client) -> None:
    words = [[1, 2, 3, 4], [5], "1 2", [0, 0]]
    answer = client.post(PREDICT, json={"inputs": words, "halt": "fixed:3"}).json()
    assert answer["outputs"][0] == alone([1, 2, 3, 4], 3)
    assert answer["outputs"][1] == alone([5], 3)
    assert isinstance(answer["outputs"][2], str)
    assert answer["loops_used"] == [3, 3, 3, 3]
    assert answer["exit_reason"] == ["fixed"] * 4
    assert client.post(PREDICT, json={"inputs": [[1, 2]]}).json()["loops_used"] == [3]


@pytest.mark.parametrize(
    ("asked", "loops", "reason"),
    [
        ({"halt": "fixed:7"}, 7, "fixed"),
        ({"halt": {"kind": "fixed", "loops": 7}}, 7, "fixed"),
        ({"halt": "calibrated:0.01"}, 4, "calibrated"),  # T* = 5, and a loop less is promised
        ({"halt": {"kind": "calibrated", "eps": 0.01}, "inputs": [1, 2, 3, 4]}, 4, "calibrated"),
        ({"min_loops": 6}, 6, "rule"),
        ({"max_loops": 2}, 2, "max_loops"),
        ({"halt": "converged:1e9"}, 1, "converged"),
        ({"halt": "converged:1e9", "min_loops": 3}, 3, "converged"),
        ({"halt": "converged:1e-9"}, 9, "max_loops"),  # ceil(1.5 (4 + 1)) + 1
        ({"halt": {"kind": "argmax_stable", "threshold": 50.0, "max_loops": 11}}, 11, "max_loops"),
    ],
)
def test_rules_and_bounds(client: httpx.Client, asked: dict[str, Any], loops: int, reason: str) -> None:
    answer = client.post(PREDICT, json={"inputs": [1, 2, 3, 4]} | asked).json()
    assert (answer["loops_used"], answer["exit_reason"]) == (loops, reason)
    assert answer["outputs"] == alone([1, 2, 3, 4], loops)


def test_a_model_that_was_never_probed_takes_the_loops_it_was_trained_for(client: httpx.Client) -> None:
    answer = client.post("/v1/models/bare@demo/predict", json={"inputs": [1, 2, 3]}).json()
    assert (answer["loops_used"], answer["exit_reason"], answer["expected_accuracy"]) == (4, "fixed", None)
    body = refused(client.post("/v1/models/bare@demo/predict", json={"inputs": [1], "halt": "rule"}), 400)
    assert "probe" in body["error"] + str(body["hint"])
    body = refused(client.post("/v1/models/bare@demo/predict", json={"inputs": [1], "halt": "calibrated:0.01"}), 400)
    assert "needs a count of the words that stopping early loses, and this model has none; probe its run" in str(body)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "inputs: this field is missing"),
        ({"inputs": []}, "empty"),
        ({"inputs": ""}, "empty"),
        ({"inputs": "   "}, "empty"),
        ({"inputs": [[]]}, "word 0"),
        ({"inputs": [0] * 17}, "17 symbols.*1 to 16"),
        ({"inputs": "0 " * 17}, "17 symbols.*1 to 16"),
        ({"inputs": "0" * 100_000}, "100000 characters"),
        ({"inputs": [6]}, "token 6.*vocabulary.*0 to 5"),
        ({"inputs": "1 9"}, "'9' is no element of S3.*e "),
        ({"inputs": [[1], "e (9,9)"]}, "word 1.*no element of S3"),
        ({"inputs": "\ud800"}, "no element"),
        ({"inputs": [-1]}, "item 0"),
        ({"inputs": [1.5]}, "item 0"),
        ({"inputs": [True]}, "item 0"),
        ({"inputs": [[[1]]]}, "item 0"),
        ({"inputs": {"a": 1}}, "got a dict"),
        ({"inputs": None}, "got a NoneType"),
        ({"inputs": [[1]] * 9}, "9 words.*1 to 8"),
        ({"inputs": [[1]] * 10_001}, "10001"),
        ({"inputs": [10**30]}, "item 0"),
        ({"inputs": [1], "halt": "sometimes"}, "halt.*got 'sometimes'.*rule"),
        ({"inputs": [1], "halt": "fixed:0"}, "halt.*at least 1"),
        ({"inputs": [1], "halt": "fixed:many"}, "halt.*a whole number"),
        ({"inputs": [1], "halt": "fixed"}, "halt.*fixed:T"),
        ({"inputs": [1], "halt": 3}, "halt"),
        ({"inputs": [1], "halt": "calibrated"}, "halt.*calibrated:eps"),
        ({"inputs": [1], "halt": "calibrated:0.001"}, "512 words are too few.*it takes 2995"),
        ({"inputs": [1] * 5, "halt": "calibrated:0.01"}, "1 to 4, and the word has 5 symbols"),
        ({"inputs": [1], "halt": "fixed:300000"}, "300000 loops.*200000"),
        ({"inputs": [1], "halt": {"kind": "rule"}, "max_loops": 3}, "put it into halt"),
        ({"inputs": [1], "min_loops": 5, "max_loops": 3}, "at least min_loops"),
        ({"inputs": [1], "max_loops": 0}, "max_loops.*at least 1"),
        ({"inputs": [1], "deadline_ms": 0}, "deadline_ms.*more than 0"),
        ({"inputs": [1], "accuracy_floor": 0.5}, "degrade: true"),
        ({"inputs": [1], "degrade": True, "accuracy_floor": 2}, "accuracy_floor.*at most 1"),
        ({"inputs": [1], "degrade": "perhaps"}, "degrade"),
        ({"inputs": [1], "halting": "rule"}, "halting: unknown field.*did you mean halt"),
        ([1, 2], "a mapping of fields"),
        ("word", "a mapping of fields"),
    ],
)
def test_what_cannot_be_right_is_400(client: httpx.Client, body: Any, says: str) -> None:
    found = refused(client.post(PREDICT, content=json.dumps(body), headers={"content-type": "application/json"}), 400)
    told = " ".join(f"{one['field']}: {one['error']} {one['expected']} {one['hint']}" for one in found["problems"])
    assert re.search(says, told, re.DOTALL), told


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"inputs": NaN}', b'{"inputs": [1], "deadline_ms": NaN}', b"[" * 100_000, b"\xff\xfe{}"]
)
def test_what_is_no_json_is_400(client: httpx.Client, content: bytes) -> None:
    refused(client.post(PREDICT, content=content, headers={"content-type": "application/json"}), 400)


def test_a_body_that_is_too_large_is_413_before_it_is_sent(client: httpx.Client) -> None:
    assert client.post(PREDICT, content=b" " * (2**20 + 1)).status_code == 413
    host, port = client.base_url.host, client.base_url.port
    assert port is not None
    with socket.create_connection((host, port), timeout=10) as sock:
        sock.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 52428800\r\n\r\n".encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 413")  # and not one byte of the body was sent
    with socket.create_connection((host, port), timeout=10) as sock:
        sock.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        sock.sendall(b"100001\r\n" + b" " * (2**20 + 1) + b"\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413")  # whatever was to come after


def test_what_cannot_be_right_is_refused_at_once_while_the_line_is_full(
    client: httpx.Client, eventually: Callable[..., object]
) -> None:
    """Nobody waits in a line that never moves to be told what was wrong; each is refused before it asks for a place."""
    rows = {"name": "inputs", "datatype": "INT64", "shape": [10_000, 1], "data": [1] * 10_000}
    bodies = {
        "NaN": (PREDICT, b'{"inputs": [NaN]}'),
        "Infinity": (PREDICT, b'{"inputs": [1], "accuracy_floor": Infinity}'),
        "nested lists": (PREDICT, json.dumps({"inputs": [[[[1]]]]}).encode()),
        "10,000 rows": (PREDICT, json.dumps({"inputs": [[1]] * 10_000}).encode()),
        "10,000 rows of a tensor": ("/v2/models/s3@demo/infer", json.dumps({"inputs": [rows]}).encode()),
        "a wrong dtype": (
            "/v2/models/s3@demo/infer",
            json.dumps({"inputs": [rows | {"datatype": "FP64", "shape": [1, 1], "data": [1.0]}]}).encode(),
        ),
    }
    with ExitStack() as calls:
        for held in (4, 8):  # the rows, then the line
            calls.enter_context(_held(client, {"inputs": [[1, 2]] * held, "halt": FOREVER}))
            eventually(lambda due=held: card(client)["live"] == 4 and (due == 4 or card(client)["waiting"] == 8))
        for what, (path, content) in bodies.items():
            answer = client.post(path, content=content, headers={"content-type": "application/json"}, timeout=10.0)
            assert (what, answer.status_code) == (what, 400)
            assert answer.json()["error"]
    eventually(lambda: (card(client)["live"], card(client)["waiting"]) == (0, 0), what="an empty engine")


def test_an_unknown_model_is_404_and_says_which_there_are(client: httpx.Client) -> None:
    for method, path in (
        ("POST", "/v1/models/s4@demo/predict"),
        ("GET", "/v1/models/s4@demo"),
        ("GET", "/v2/models/s4@demo"),
        ("GET", "/v2/models/s4@demo/ready"),
    ):
        body = refused(client.request(method, path, json={"inputs": [1]} if method == "POST" else None), 404)
        assert "s4@demo" in body["error"]
        assert "s3@demo" in body["expected"]
        assert "loop serve s4@demo" in body["hint"]
    body = refused(client.post("/v1/models/gone@demo/predict", json={"inputs": [1]}), 404)
    assert body["error"].startswith("model gone has no alias")
    assert refused(client.get("/nothing"), 404)["error"] == "there is nothing at this address"
    refused(client.get(PREDICT), 405)


def test_names_of_other_hosts_and_pages_of_other_sites_are_refused(client: httpx.Client) -> None:
    assert client.get("/v2", headers={"host": "attacker.example"}).status_code == 421
    assert client.get("/v2", headers={"origin": "http://attacker.example"}).status_code == 403


def test_a_full_line_is_503_at_once_and_cancelled_words_make_room(
    client: httpx.Client, eventually: Callable[..., object]
) -> None:
    with ExitStack() as calls:
        for held in range(1, 13):  # one after another: the line alone has no room for twelve at once
            calls.enter_context(_held(client, {"inputs": [1, 2], "halt": FOREVER}))
            rows_and_line = (min(held, 4), max(held - 4, 0))
            eventually(lambda due=rows_and_line: (card(client)["live"], card(client)["waiting"]) == due, what=f"{rows_and_line}")
        answer = client.post(PREDICT, json={"inputs": [1]})  # would never come, were it not refused: nothing leaves the line
        assert "8 words are waiting" in refused(answer, 503)["error"]
        assert int(answer.headers["retry-after"]) >= 1
    eventually(lambda: card(client)["live"] == 0 and card(client)["waiting"] == 0, what="an empty engine")
    assert client.post(PREDICT, json={"inputs": [1]}).status_code == 200


@contextmanager
def _held(client: httpx.Client, body: dict[str, Any]) -> Iterator[None]:
    """A request that waits for its answer as long as the block lasts, and then hangs up."""
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=60.0)
    try:
        connection.request("POST", PREDICT, json.dumps(body), {"content-type": "application/json"})
        yield
    finally:
        connection.close()


def test_a_request_of_many_words_is_taken_whole_or_not_at_all(client: httpx.Client, eventually: Callable[..., object]) -> None:
    with _held(client, {"inputs": [[1]] * 8, "halt": FOREVER}):
        eventually(lambda: card(client)["live"] == 4)
        assert card(client)["waiting"] == 4
        refused(client.post(PREDICT, json={"inputs": [[1]] * 5}), 503)
        assert card(client)["waiting"] == 4
    eventually(lambda: card(client)["live"] == 0)


def test_the_deadline_is_504_and_frees_the_row(client: httpx.Client, eventually: Callable[..., object]) -> None:
    began = time.monotonic()
    body = refused(client.post(PREDICT, json={"inputs": [1, 2], "halt": FOREVER, "deadline_ms": 100}), 504)
    assert time.monotonic() - began >= 0.1
    assert "deadline" in body["error"]
    body = refused(client.post(PREDICT, json={"inputs": [[1], [2]], "halt": FOREVER, "deadline_ms": 50}), 504)
    assert re.match("word [01] had no answer", body["error"])
    eventually(lambda: card(client)["live"] == 0)


def test_a_stream_tells_every_loop_and_ends_with_the_same_answer(client: httpx.Client) -> None:
    events = list(stream(client, {"inputs": [3, 1, 4]}))
    assert [name for name, _ in events] == ["loop"] * 4 + ["answer"]
    loops = [data for _, data in events[:-1]]
    assert [data["loop"] for data in loops] == [1, 2, 3, 4]
    assert [data["prediction"] for data in loops] == [alone([3, 1, 4], loop) for loop in (1, 2, 3, 4)]
    assert loops[0]["frontier"] == 0
    for before, now in itertools.pairwise(loops):
        same = [a == b for a, b in zip(before["prediction"], now["prediction"], strict=True)]
        assert now["frontier"] == (same.index(False) if False in same else 3)
    assert all(data["residual"] > 0 for data in loops)
    timeless = {name: value for name, value in events[-1][1].items() if not name.endswith("_ms")}
    plain = client.post(PREDICT, json={"inputs": [3, 1, 4]}).json()
    assert timeless == {name: value for name, value in plain.items() if not name.endswith("_ms")}


def test_a_stream_of_several_words_says_whose_loop_it_is(client: httpx.Client) -> None:
    events = list(stream(client, {"inputs": ["1 2", [3]], "halt": "fixed:2"}))
    assert sorted((data["word"], data["loop"]) for name, data in events if name == "loop") == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert events[-1][0] == "answer"
    assert events[-1][1]["loops_used"] == [2, 2]


def test_a_stream_is_refused_before_it_begins_and_ends_with_what_went_wrong_after(client: httpx.Client) -> None:
    for body, status in (({"inputs": [9]}, 400), ({"inputs": [1], "halt": "fixed:300000"}, 400)):
        refused(client.post(PREDICT, json=body, headers={"accept": "text/event-stream"}), status)
    *loops, (name, last) = stream(client, {"inputs": [1], "halt": FOREVER, "deadline_ms": 50})
    assert loops
    assert (name, last["status"]) == ("error", 504)
    assert "deadline" in last["error"]


def test_a_stream_that_nobody_reads_frees_its_row(client: httpx.Client, eventually: Callable[..., object]) -> None:
    with client.stream("POST", PREDICT, json={"inputs": [1], "halt": FOREVER}, headers={"accept": "text/event-stream"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines) == "event: loop"
        assert card(client)["live"] == 1
    eventually(lambda: card(client)["live"] == 0, what="the row of a stream that was left")


def stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    with client.stream("POST", PREDICT, json=body, headers={"accept": "text/event-stream"}) as answer:
        assert answer.status_code == 200
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


def test_words_that_share_batches_are_answered_as_if_alone(client: httpx.Client) -> None:
    """Eight clients, words of 1 to 9, loops of 1 to 12: the plain forward pass of each word by itself says the same."""
    drawn = torch.Generator().manual_seed(5)
    words = [
        torch.randint(6, (int(length),), generator=drawn).tolist() for length in torch.randint(1, 10, (120,), generator=drawn)
    ]
    loops = torch.randint(1, 13, (120,), generator=drawn).tolist()

    def ask(which: int) -> list[int]:
        return client.post(PREDICT, json={"inputs": words[which], "halt": f"fixed:{loops[which]}"}).json()["outputs"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(len(words))))
    assert answers == [alone(word, count) for word, count in zip(words, loops, strict=True)]


def test_shedding_needs_permission_and_keeps_the_floor(client: httpx.Client, eventually: Callable[..., object]) -> None:
    """With half of the line waiting, a word that allows it leaves at the first loop whose measured accuracy is at its floor."""
    calm = client.post(PREDICT, json={"inputs": [1, 2, 3, 4], "degrade": True, "accuracy_floor": 0.6}).json()
    assert (calm["loops_used"], calm["exit_reason"]) == (5, "rule")
    with _held(client, {"inputs": [[1]] * 3, "halt": FOREVER}):
        eventually(lambda: card(client)["live"] == 3)
        degrading = {"inputs": [[1, 2, 3, 4]] * 6, "degrade": True, "accuracy_floor": 0.6}
        answer = client.post(PREDICT, json=degrading).json()
    # Five of six wait behind the one place that is free: the first is shed, the last finds no pressure.
    assert (answer["loops_used"][0], answer["exit_reason"][0], answer["expected_accuracy"][0]) == (2, "shed", 0.7)
    assert (answer["loops_used"][-1], answer["exit_reason"][-1]) == (5, "rule")
    assert "shed" not in client.post(PREDICT, json={"inputs": [[1, 2, 3, 4]] * 8}).json()["exit_reason"]


def test_cards_say_what_a_model_takes(client: httpx.Client) -> None:
    found = card(client)
    assert (found["state"], found["version"], found["vocabulary"], found["longest_trained"]) == ("ready", "1", 6, 4)
    assert (found["max_length"], found["max_words"], found["halt"], found["loops_budget"]) == (16, 8, "rule", 4)
    assert (found["v"], found["burn_in"], found["live"], found["waiting"]) == (1.0, 1, 0, 0)
    assert card(client, "bare@demo")["halt"] == "fixed"
    listed = client.get("/v1/models").json()["models"]
    assert [one["model"] for one in listed] == ["bare@demo", "gone@demo", "s3@demo", "z4@demo"]
    assert [one["state"] for one in listed] == ["ready", "failed", "ready", "ready"]


def test_metrics_count_what_happened(client: httpx.Client) -> None:
    def value(sample: str) -> float:
        text = client.get("/metrics").text
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    ready = 'loop_inference_words_finished_total{exit_reason="rule",model="z4@demo",version="1"}'
    loops = 'loop_inference_exit_loops_bucket{le="3.0",model="z4@demo"}'
    work = 'loop_inference_useful_token_loops_total{model="z4@demo",version="1"}'
    requests = 'loop_inference_requests_total{route="/v1/models/{model}/predict",status="400"}'
    before = [value(sample) for sample in (ready, loops, work, requests)]
    client.post("/v1/models/z4@demo/predict", json={"inputs": [[1, 2], [1, 2, 3]]})  # 3 and 4 loops
    client.post("/v1/models/z4@demo/predict", json={"inputs": [9]})
    now = [value(sample) for sample in (ready, loops, work, requests)]
    assert [after - first for after, first in zip(now, before, strict=True)] == [2, 1, 2 * 3 + 3 * 4, 1]
    assert value('loop_inference_live_words{model="z4@demo",version="1"}') == 0


def test_open_inference_metadata(client: httpx.Client) -> None:
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    about = client.get("/v2").json()
    assert (about["name"], about["extensions"], about["installation"]) == ("loopcore", [], "abc")
    assert client.get("/v2/models/s3%40demo").json()["versions"] == ["1"]
    assert client.get("/v2/models/s3@demo/ready").json() == {"name": "s3@demo", "ready": True}
    refused(client.get("/v2/models/gone@demo/ready"), 503)


def test_open_inference_ids(client: httpx.Client) -> None:
    tensor = {"name": "inputs", "datatype": "INT64", "shape": [2, 3], "data": [3, 1, 4, 0, 0, 5]}
    request = {"id": "7", "inputs": [tensor], "parameters": {"halt": "fixed:2", "binary_data_output": True}}
    flat = client.post("/v2/models/s3@demo/infer", json=request).json()
    assert (flat["model_name"], flat["model_version"], flat["id"]) == ("s3@demo", "1", "7")
    tensors = {tensor["name"]: tensor for tensor in flat["outputs"]}
    assert set(tensors) == {"outputs", "loops_used", "exit_reason"}
    assert tensors["outputs"] | {"data": None} == {"name": "outputs", "datatype": "INT64", "shape": [2, 3], "data": None}
    assert tensors["outputs"]["data"] == alone([3, 1, 4], 2) + alone([0, 0, 5], 2)
    assert tensors["loops_used"]["data"] == [2, 2]
    request["inputs"] = [tensor | {"data": [[3, 1, 4], [0, 0, 5]]}]
    assert client.post("/v2/models/s3@demo/infer", json=request).json() == flat
    request["inputs"] = [tensor | {"shape": [3], "data": [3, 1, 4]}]
    request["outputs"] = [{"name": "loops_used"}]
    one = client.post("/v2/models/s3@demo/infer", json=request).json()
    assert one["outputs"] == [{"name": "loops_used", "datatype": "INT64", "shape": [1], "data": [2]}]


def test_open_inference_text(client: httpx.Client) -> None:
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": [2], "data": ["3 1 4", "5"]}
    answer = client.post("/v2/models/s3@demo/infer", json={"inputs": [tensor]}).json()
    tensors = {tensor["name"]: tensor for tensor in answer["outputs"]}
    assert tensors["outputs"]["shape"] == [2, 3]
    assert tensors["outputs"]["data"] == [*alone([3, 1, 4], 4), *alone([5], 2), -1, -1]
    task = load_task(small_spec().task)
    assert tensors["text"]["data"] == [task.decode(alone([3, 1, 4], 4)), task.decode(alone([5], 2))]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"datatype": "FP32"}, "datatype 'FP32'"),
        ({"shape": [2, 2]}, "not those of a tensor"),
        ({"shape": [-1, 3]}, "shape"),
        ({"shape": [1000, 1000]}, "at most 100000 values"),
        ({"name": "x"}, "one called 'inputs'"),
        ({"data": [1, 2, 3.5]}, "whole numbers"),
        ({"data": [[1], [2, 3]]}, "not those of a tensor"),
        ({"data": [1, [2], 3]}, "not those of a tensor"),
        ({"data": [1, 2, 6]}, "token 6"),
        ({"datatype": "BYTES", "shape": [3]}, "JSON strings"),
        ({"datatype": "BYTES", "shape": [1, 3], "data": ["1", "2", "3"]}, r"\[B, 1\]"),
    ],
)
def test_open_inference_refusals(client: httpx.Client, change: dict[str, Any], says: str) -> None:
    tensor = {"name": "inputs", "datatype": "INT64", "shape": [1, 3], "data": [1, 2, 3]} | change
    body = refused(client.post("/v2/models/s3@demo/infer", json={"inputs": [tensor]}), 400)
    assert re.search(says, f"{body['field']} {body['error']} {body['expected']}"), body


def test_open_inference_refuses_other_outputs_and_parameters(client: httpx.Client) -> None:
    tensor = {"name": "inputs", "datatype": "INT64", "shape": [1], "data": [1]}
    for more in ({"outputs": [{"name": "text"}]}, {"parameters": {"halt": "sometimes"}}, {"inputs": []}):
        refused(client.post("/v2/models/s3@demo/infer", json={"inputs": [tensor]} | more), 400)
    headers = {"inference-header-content-length": "10"}
    refused(client.post("/v2/models/s3@demo/infer", json={"inputs": [tensor]}, headers=headers), 400)
