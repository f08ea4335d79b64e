"""Ports of this machine that somebody else listens on."""

from __future__ import annotations

import socket

__all__ = ["free_port_near", "is_free", "listens"]


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that just ended does not count
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def listens(host: str, port: int, *, within_s: float = 1.0) -> bool:
    """Whether somebody answers there."""
    try:
        socket.create_connection((host, port), timeout=within_s).close()
    except OSError:
        return False
    return True


def free_port_near(host: str, port: int) -> int | None:
    """A free port a little above `port`."""
    return next((other for other in range(port + 10, min(port + 1000, 65536), 10) if is_free(host, other)), None)
