"""Serves an application over real HTTP from a thread of the test process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

__all__ = ["served"]


@contextmanager
def served(app: Any) -> Iterator[httpx.Client]:
    """A client of `app`, which listens on a free port of loopback."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ends = time.monotonic() + 20.0
    while not server.started:
        if time.monotonic() > ends or not thread.is_alive():
            raise RuntimeError("the application did not come up")
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60.0) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(10.0)
