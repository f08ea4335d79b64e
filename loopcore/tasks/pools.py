"""Finite sets of examples: streams that go through them epoch by epoch, and a folder that keeps what was generated.

Shapes: B rows of a batch, M examples of a set.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from loopcore.errors import InputError
from loopcore.tasks.task import generator

__all__ = ["kept", "rows_of_batch"]

_DIGEST = "digest"


def rows_of_batch(examples: int, *key: int | str, index: int, size: int) -> Tensor:
    """rows_B, long: which examples are in batch `index` of the stream `key`.

    The stream is one shuffled pass over all examples after another, each pass shuffled by itself; batch `index` is its entries
    from index * size on. So a run sees every example equally often, and the stream is resumed by its index alone.
    """
    at_B = torch.arange(index * size, (index + 1) * size)
    passes_B = at_B // examples
    rows_B = torch.empty_like(at_B)
    for epoch in passes_B.unique().tolist():
        here_B = passes_B == epoch
        rows_B[here_B] = _shuffled(examples, *key, epoch)[at_B[here_B] % examples]
    return rows_B


@functools.lru_cache(maxsize=4)
def _shuffled(examples: int, *key: int | str) -> Tensor:
    return torch.randperm(examples, generator=generator("pass", *key))


def kept(folder: Path | None, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `make` gives, from `folder` if it is there: file `name`.safetensors, with a SHA-256 digest of what is in it.

    A file that is damaged or of another format is made again: it holds nothing that cannot be. A new file appears whole or not
    at all, whoever else is writing it. Raises InputError where the folder cannot be written.
    """
    if folder is None:
        return make()
    path = folder / f"{name}.safetensors"
    if (found := _read(path)) is not None:
        return found
    tensors = {key: tensor.contiguous() for key, tensor in make().items()}
    content = save(tensors, metadata={_DIGEST: _digest(tensors)})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _publish(path, content)
    except OSError as problem:
        raise InputError(
            f"cannot keep generated examples in {folder}: {problem.strerror or problem}; name a folder that can be written and "
            f"has {len(content) / 1e6:.0f} MB free, or leave the task's folder empty to generate them anew in every process"
        ) from None
    return tensors


def _publish(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            expected = (file.metadata() or {}).get(_DIGEST)
    except (OSError, SafetensorError):
        return None
    return tensors if _digest(tensors) == expected else None


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
