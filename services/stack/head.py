"""What Ray calls (`RAY_START_HOOK`) before it starts the head node of the stack."""

from __future__ import annotations

from typing import Any

__all__ = ["prepare"]


def prepare(params: Any, head: bool) -> None:
    """Takes out the Ray Client server: nobody uses it, it costs 90 MB, and its port is the same for every cluster of a host."""
    params.ray_client_server_port = None
