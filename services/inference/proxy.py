"""What stands in Ray Serve's proxy before every replica: an answer for requests whose replica can give none.

Serve says nothing more about a request whose replica has died, and its web server makes that a 500 in plain text. But nothing
is wrong with such a request, and a moment later another replica takes it: it is a 503, told as all others are (see
`services.inference.errors`). What a replica itself answers, its 500 included, passes as it is.

This module is all that a proxy loads of the service: no torch, and nothing of a model.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.problems import Problem

__all__ = ["RETRY_GONE_S", "ReplicaGone", "middleware"]

RETRY_GONE_S = 5  # seconds after which a replica that died may be back

GONE = Problem("the replica that had this request ended before it answered", None, "ask again; nothing of it is kept")
NONE_TAKES = Problem("no replica takes this request now", None, "ask again later")


class ReplicaGone:
    """Answers with 503 and `Retry-After` where the application behind it answers nothing, or in words that are Serve's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        await self._app(scope, receive, answer.pass_on)
        await answer.finish()


class _Answer:
    """One answer on its way through."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = self._streams = self._over = False

    async def pass_on(self, message: Message) -> None:
        if self._over:
            return  # the rest of what was said otherwise
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            kind = headers.get(b"content-type", b"")
            if message["status"] == 503 and not kind.startswith(b"application/json"):  # Serve's own words, in plain text
                await self._refuse(NONE_TAKES, headers.get(b"retry-after", str(RETRY_GONE_S).encode()))
                return
            self._begun, self._streams = True, kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            self._over = not message.get("more_body", False)
        await self._send(message)

    async def finish(self) -> None:
        """Says what is left to say once the application has returned. What breaks off that is no stream ends its connection."""
        if not self._begun and not self._over:
            await self._refuse(GONE, str(RETRY_GONE_S).encode())
        elif self._streams and not self._over:
            event = json.dumps({"status": 503} | _body(GONE))
            await self._send({"type": "http.response.body", "body": f"event: error\ndata: {event}\n\n".encode()})

    async def _refuse(self, problem: Problem, retry_after_s: bytes) -> None:
        self._over = True
        body = json.dumps(_body(problem)).encode()
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"retry-after", retry_after_s)]
        await self._send({"type": "http.response.start", "status": 503, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _body(problem: Problem) -> dict[str, Any]:
    return problem.as_dict() | {"problems": [problem.as_dict()]}


def middleware() -> list[Middleware]:
    """What Serve's proxy is to put around itself; it looks this function up by its name (see `hosting`)."""
    return [Middleware(ReplicaGone)]
