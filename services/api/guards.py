"""What every request passes first: names this host is known by, no foreign web pages, bodies of a bounded size."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.problems import Problem

__all__ = ["MOST_BYTES", "BodyLimit", "KnownHosts"]

MOST_BYTES = 2**20  # of a request's body; the longest sensible spec has a few kilobytes


def _name(authority: str) -> str:
    """The host of `host:port`, `[v6]:port` or `host`, lower case; empty where it is none."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _refuse(send: Send, status: int, problem: Problem) -> None:
    body = json.dumps(problem.as_dict() | {"problems": []}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class KnownHosts:
    """Answers only requests that name this machine, and none that a page of another site makes a browser send.

    Loopback is reached by every program of the machine, a browser among them: a page could have a name of its own resolve to
    127.0.0.1 (DNS rebinding), or send a form here.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    def _knows(self, authority: str) -> bool:
        name = _name(authority)
        return name in self._names or _is_loopback(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not self._knows(host):
            problem = Problem(f"this server does not go by the name {host[:80]!r}", "a loopback name such as 127.0.0.1")
            await _refuse(send, 421, problem)
        elif origin and urlsplit(origin).netloc.lower() != host.lower():
            await _refuse(send, 403, Problem(f"a page of {origin[:80]!r} may not use this API", "a request of its own pages"))
        else:
            await self._app(scope, receive, send)


class BodyLimit:
    """Refuses a body above `MOST_BYTES` before it is read into memory."""

    def __init__(self, app: ASGIApp, most_bytes: int = MOST_BYTES) -> None:
        self._app = app
        self._most = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        problem = Problem("the request is too large", f"at most {self._most} bytes", "send less at a time")
        if not declared.isdigit() or int(declared) > self._most:
            await _refuse(send, 413, problem)
            return
        # A chunked body declares no length: it is counted as it comes, and read in full before the application runs.
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._most:
                await _refuse(send, 413, problem)
                return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)
