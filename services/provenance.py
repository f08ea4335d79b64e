"""Where a figure comes from: the commit, what was changed since, the packages, the machine. Loads none of those packages."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "collect", "git_state"]

# What can change a result, by the names they are installed under.
PACKAGES = ("loopcore", "torch", "numpy", "ray", "mlflow", "safetensors", "pydantic", "sqlalchemy", "optuna")

GIT_TIMEOUT_S = 10.0  # seconds; a repository on a slow disk must not hold a submission up


def collect(directory: Path | None = None) -> dict[str, Any]:
    """JSON-compatible: `commit`, `dirty` (SHA-256 of what was changed since, or None), `packages`, `python`, `platform`, `host`,
    `cpus`.

    `directory` is any place in the repository meant; by default the one that this program runs from. Where there is no git
    or no repository, `commit` and `dirty` are None; it never raises for that.
    """
    commit, dirty = git_state(Path(__file__).parent if directory is None else directory)
    return {
        "commit": commit,
        "dirty": dirty,
        "packages": dict(_versions()),
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
    }


def git_state(directory: Path) -> tuple[str | None, str | None]:
    """The commit that `directory` is at, and a SHA-256 over what differs from it: the diff, and files git does not know.

    The digest is None for a clean tree, and the same for the same changes. Both are None outside a repository.
    """
    head = _git(directory, "rev-parse", "--verify", "HEAD")
    top = _git(directory, "rev-parse", "--show-toplevel")
    if head is None or top is None:
        return None, None
    root = Path(os.fsdecode(top).rstrip("\n"))
    diff = _git(root, "-c", "core.quotePath=false", "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD")
    unknown = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    if diff is None or unknown is None:
        return head.decode().strip(), None
    names = sorted(name for name in unknown.split(b"\0") if name)
    if not diff and not names:
        return head.decode().strip(), None
    digest = hashlib.sha256(diff)
    for name in names:
        digest.update(b"\0" + name + b"\0" + _content_digest(root / os.fsdecode(name)))
    return head.decode().strip(), digest.hexdigest()


def _content_digest(path: Path) -> bytes:
    try:
        if path.is_symlink():
            return hashlib.sha256(os.fsencode(path.readlink())).digest()
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").digest()
    except OSError:
        return b"unreadable"


def _git(directory: Path, *words: str) -> bytes | None:
    """What git says, or None where it cannot."""
    try:
        # Only reads; in particular it does not refresh the index, which would need its lock.
        # Inside a git hook the environment names another repository than the one asked about.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment["GIT_OPTIONAL_LOCKS"] = "0"
        asked = subprocess.run(
            ["git", "-C", str(directory), *words], capture_output=True, check=False, timeout=GIT_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout if asked.returncode == 0 else None


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)
