"""Checkpoints that are either whole and right, or not there: safetensors and JSON, never a pickle.

    step-00000123/
      tensors.safetensors   every tensor of the state
      state.json            format, spec, step, the rest of the state, size and SHA-256 of each other file, and its own digest

A checkpoint's digest is that of its state.json without the digest itself; it covers the tensors by their own. A directory
holds one run's checkpoints. Any part of a state can be saved: `{"model": ...}` alone is a checkpoint that can be served.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from loopcore.errors import CheckpointCorrupt, CheckpointNotWritten, InputError
from loopcore.model import LoopedTransformer, build_model
from loopcore.recall import RecallNet
from loopcore.specs.train import TrainSpec
from loopcore.tasks import load_task

__all__ = ["Loaded", "Saved", "checkpoints", "load", "load_model", "prune", "save"]

FORMAT, VERSION = "loopcore checkpoint", 1
STATE, TENSORS = "state.json", "tensors.safetensors"
ABANDONED_AFTER_S = 3600.0  # a temporary folder this old belongs to a process that is gone

_STEP = re.compile(r"step-([0-9]{8,})")
_TENSOR, _FLOAT = "__tensor__", "__float__"
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on disk."""

    path: Path
    digest: str
    """SHA-256, hex."""
    step: int
    bytes: int
    """Size of its files."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read and checked. Tensors are on the CPU."""

    spec: TrainSpec
    step: int
    state: dict[str, Any]
    digest: str


def save(directory: Path | str, state: dict[str, Any], *, spec: TrainSpec, step: int) -> Saved:
    """Publishes `state` as `directory/step-00000123`, in one rename after everything is on disk.

    `state` is a nested dict of tensors, lists and JSON values with text keys; floats may be infinite or NaN. A good checkpoint of
    the same run and step that is already there is kept and returned, so that a retry, or a process that was thought dead, changes
    nothing that was announced. Raises CheckpointNotWritten, and leaves nothing half-written, when the disk refuses or the
    directory holds another run's checkpoints.
    """
    directory = Path(directory)
    path = directory / f"step-{step:08d}"
    tensors: dict[str, Tensor] = {}
    content = _flatten(state, (), tensors)
    tensor_bytes = safetensors.torch.save(tensors)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        # A job's spec has fields of the queue as well.
        "spec": spec.model_dump(mode="json", include=set(TrainSpec.model_fields)),
        "state": content,
        "files": {TENSORS: {"bytes": len(tensor_bytes), "sha256": hashlib.sha256(tensor_bytes).hexdigest()}},
    }
    digest = hashlib.sha256(_encoded(document)).hexdigest()
    state_bytes = _encoded(document | {"digest": digest})
    temporary = directory / f".writing-{path.name}-{secrets.token_hex(6)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        _write(temporary / TENSORS, tensor_bytes)
        _write(temporary / STATE, state_bytes)
        _sync(temporary)
        if not _renamed(temporary, path):
            there = _standing(path, document["spec"], step)
            if there is not None:
                return there
            _remove(path)
            temporary.rename(path)
        _sync(directory)
    except OSError as problem:
        needed = len(tensor_bytes) + len(state_bytes)
        raise CheckpointNotWritten(
            f"cannot write the checkpoint {path} ({needed:,} bytes, {_free(directory)}): {problem.strerror or problem}; free "
            "some space or choose another directory, then run it again: it goes on from the checkpoint before"
        ) from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Saved(path, digest, step, len(tensor_bytes) + len(state_bytes))


def load(path: Path | str, expected_digest: str | None = None) -> Loaded:
    """Reads a checkpoint and checks every byte of it.

    Raises CheckpointCorrupt for one that is missing, truncated or changed, that is not the one of `expected_digest`, or whose
    format this version does not know.
    """
    path = Path(path)
    document, digest = _read_document(path, expected_digest)
    try:
        tensors = safetensors.torch.load(_read_tensors(path, document["files"][TENSORS]))
        state = _unflatten(document["state"], tensors)
        spec = TrainSpec.model_validate(document["spec"])
    except (SafetensorError, KeyError, TypeError, ValueError) as problem:
        raise _corrupt(path, f"its content does not fit together ({problem})") from None
    return Loaded(spec, document["step"], state, digest)


def load_model(
    path: Path | str, *, device: torch.device | str = "cpu", expected_digest: str | None = None
) -> tuple[LoopedTransformer | RecallNet, TrainSpec]:
    """The model of a checkpoint, ready to be run on `device`, and the spec it was trained by. Raises as `load` does."""
    loaded = load(path, expected_digest)
    model = build_model(loaded.spec, load_task(loaded.spec.task))
    try:
        model.load_state_dict(loaded.state["model"])
    except (KeyError, RuntimeError, TypeError) as problem:
        raise _corrupt(Path(path), f"its weights are not those of its spec ({problem})") from None
    return model.to(device).eval().requires_grad_(False), loaded.spec


def checkpoints(directory: Path | str) -> list[Path]:
    """Published checkpoints of a directory, newest first; none where there is no directory. They are not read."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def prune(directory: Path | str, keep: int = 2) -> list[Path]:
    """Removes all but the newest `keep` checkpoints, and what dead processes left behind; returns the checkpoints removed."""
    if keep < 1:
        raise InputError(f"expected to keep at least 1 checkpoint, got {keep}")
    removed = checkpoints(directory)[keep:]
    for path in removed:
        _remove(path)
    for path in Path(directory).glob(".*-step-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)
    return removed


def _flatten(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go to `tensors`, named by their path."""
    match value:
        case Tensor():
            name = "/".join(path)
            tensors[name] = value.detach().cpu().contiguous()
            return {_TENSOR: name}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_FLOAT: str(value)}
        case list():
            return [_flatten(item, (*path, str(index)), tensors) for index, item in enumerate(value)]
        case dict():
            for key in value:
                if not isinstance(key, str) or "/" in key or key in (_TENSOR, _FLOAT):
                    raise TypeError(f"a state's keys are text without '/', got {key!r} at {'/'.join(path) or 'the top'}")
            return {key: _flatten(item, (*path, key), tensors) for key, item in value.items()}
    raise TypeError(f"a state holds tensors, lists, dicts and JSON values, got {type(value).__name__} at {'/'.join(path)}")


def _unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    match value:
        case dict() if _TENSOR in value:
            return tensors[value[_TENSOR]]
        case dict() if _FLOAT in value:
            return _FLOATS[value[_FLOAT]]
        case dict():
            return {key: _unflatten(item, tensors) for key, item in value.items()}
        case list():
            return [_unflatten(item, tensors) for item in value]
    return value


def _encoded(document: dict[str, Any]) -> bytes:
    """The one way a document is written, so that it can be checked byte by byte."""
    return (json.dumps(document, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _read_document(path: Path, expected_digest: str | None) -> tuple[dict[str, Any], str]:
    content = _read(path, STATE)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _corrupt(path, f"{STATE} is cut off, or no state of a {FORMAT}")
    if document.get("version") != VERSION:
        raise _corrupt(path, f"its format has version {document.get('version')!r}, this program reads version {VERSION}")
    digest = document.pop("digest", None)
    if digest != hashlib.sha256(_encoded(document)).hexdigest() or content != _encoded(document | {"digest": digest}):
        raise _corrupt(path, f"{STATE} was changed or cut off: its digest is not right")
    if expected_digest is not None and digest != expected_digest:
        raise _corrupt(path, f"its digest is {digest[:12]}..., expected {expected_digest[:12]}...")
    files = document.get("files")
    if not isinstance(files, dict) or set(files) != {TENSORS}:
        raise _corrupt(path, f"it names the files {files!r:.100}, expected {TENSORS} alone")
    return document, digest


def _read_tensors(path: Path, expected: dict[str, Any]) -> bytes:
    content = _read(path, TENSORS)
    if len(content) != expected["bytes"]:
        raise _corrupt(path, f"{TENSORS} has {len(content):,} bytes, expected {expected['bytes']:,}")
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise _corrupt(path, f"{TENSORS} was changed: its digest is not right")
    return content


def _read(path: Path, name: str) -> bytes:
    """The bytes of one of a checkpoint's own files; never through a link, which could lead out of it."""
    try:
        with os.fdopen(os.open(path / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read()
    except OSError as problem:
        raise _corrupt(path, f"{name} cannot be read ({problem.strerror or problem})") from None


def _corrupt(path: Path, problem: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"the checkpoint {path} cannot be used: {problem}; go on from an older one")


def _standing(path: Path, spec: dict[str, Any], step: int) -> Saved | None:
    """The checkpoint that is at `path` already, or None if it is a broken one."""
    try:
        there = load(path)
    except CheckpointCorrupt:
        return None
    if there.spec.resolved() != spec or there.step != step:
        raise CheckpointNotWritten(f"{path} is a checkpoint of another run; give every run a directory of its own")
    return Saved(path, there.digest, step, sum((path / name).stat().st_size for name in (STATE, TENSORS)))


def _renamed(temporary: Path, path: Path) -> bool:
    """Renames unless something is in the way. An empty folder in the way is replaced, as rename(2) does."""
    try:
        temporary.rename(path)
    except OSError as problem:
        if problem.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    return True


def _remove(path: Path) -> None:
    """Takes a checkpoint away in one rename, then deletes it: a half-deleted one is never seen under its name."""
    gone = path.with_name(f".removing-{path.name}-{secrets.token_hex(6)}")
    path.rename(gone)
    if gone.is_dir() and not gone.is_symlink():
        shutil.rmtree(gone, ignore_errors=True)
    else:
        gone.unlink()


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(directory: Path) -> str:
    for place in (directory, *directory.parents):
        with suppress(OSError):
            return f"{shutil.disk_usage(place).free:,} bytes free"
    return "free space unknown"
