"""What a client is told where Serve's proxy has no answer of a replica; over real HTTP, before applications that break off."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from services.inference.proxy import ReplicaGone, middleware
from tests.serving import served

JSON, TEXT, STREAM = b"application/json", b"text/plain; charset=utf-8", b"text/event-stream; charset=utf-8"
GONE = "the replica that had this request ended before it answered"


def start(status: int, kind: bytes, *more: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]}


def body(text: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


# What stands behind the proxy's middleware sends for each path, then returns, as Serve's proxy does in each of these cases.
SENT: dict[str, list[Message]] = {
    "/nothing": [],
    "/answer": [start(200, JSON), body(b'{"a":', more=True), body(b"1}")],
    "/own-500": [start(500, JSON), body(b'{"error": "a fault of the service"}')],
    "/own-503": [start(503, JSON, (b"retry-after", b"1")), body(b'{"error": "the line is full"}')],
    "/pressure": [start(503, TEXT, (b"retry-after", b"3")), body(b"Request dropped due to backpressure")],
    "/no-replica": [start(503, TEXT), body(b"Deployment replica is ", more=True), body(b"unavailable")],
    "/stream": [start(200, STREAM), body(b"event: loop\ndata: {}\n\n", more=True)],
    "/whole-stream": [start(200, STREAM), body(b"event: answer\ndata: {}\n\n", more=True), body(b"")],
    "/broken": [start(200, JSON), body(b'{"a":', more=True)],
}


async def behind(scope: Scope, _: Receive, send: Send) -> None:
    if scope["type"] == "http":
        for message in SENT[scope["path"]]:
            await send(message)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    (wrapped,) = middleware()
    assert wrapped.cls is ReplicaGone
    with served(ReplicaGone(behind)) as client:
        yield client


def test_a_request_without_an_answer_is_503_with_a_time_to_come_back(client: httpx.Client) -> None:
    answer = client.get("/nothing")
    assert (answer.status_code, answer.headers["retry-after"], answer.headers["content-type"]) == (503, "5", "application/json")
    problem = {"error": GONE, "expected": None, "hint": "ask again; nothing of it is kept", "field": None}
    assert answer.json() == problem | {"problems": [problem]}
    assert client.get("/answer").json() == {"a": 1}, "the connection is as good as before"


@pytest.mark.parametrize(("path", "status"), [("/answer", 200), ("/own-500", 500), ("/own-503", 503), ("/whole-stream", 200)])
def test_what_a_replica_says_passes_as_it_is(client: httpx.Client, path: str, status: int) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.content) == (status, b"".join(message.get("body", b"") for message in SENT[path]))
    assert answer.headers.get("retry-after") == ("1" if path == "/own-503" else None)


@pytest.mark.parametrize(("path", "retry_after"), [("/pressure", "3"), ("/no-replica", "5")])
def test_a_503_of_serves_own_is_told_as_all_others_are(client: httpx.Client, path: str, retry_after: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, retry_after)
    assert answer.json()["error"] == "no replica takes this request now"
    assert set(answer.json()) == {"error", "expected", "hint", "field", "problems"}


def test_a_stream_that_breaks_off_ends_with_an_event_that_says_so(client: httpx.Client) -> None:
    answer = client.get("/stream")
    first, last = answer.text.rstrip().split("\n\n")
    assert first == "event: loop\ndata: {}"
    assert last.startswith('event: error\ndata: {"status": 503, "error": "' + GONE)


def test_an_answer_that_breaks_off_is_not_made_to_look_whole(client: httpx.Client) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        client.get("/broken")


def test_a_proxy_loads_no_model_code(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = "import sys, services.inference.proxy; print([name for name in ('torch', 'fastapi', 'mlflow') if name in sys.modules])"
    done: Any = run_python(code)
    assert done.stdout == "[]\n", done.stderr


def test_serve_finds_it_by_its_name(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """By what its proxy does with the variable that its controller is given, and by what a controller may be given."""
    code = (
        "import os; from services.inference.hosting import PROXY; os.environ |= PROXY\n"
        "from ray.serve._private.http_util import configure_http_middlewares\n"
        "from ray.serve.config import ControllerOptions, HTTPOptions\n"
        "print(ControllerOptions.model_validate({'runtime_env': {'env_vars': PROXY}}).runtime_env == {'env_vars': PROXY})\n"
        "print([one.cls.__name__ for one in configure_http_middlewares(HTTPOptions()).middlewares])\n"
    )
    done: Any = run_python(code, timeout_s=240.0)
    assert done.stdout == "True\n['ReplicaGone']\n", done.stderr
