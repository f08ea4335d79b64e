"""Which device a run computes on, in which precision, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch

from loopcore.errors import DeviceUnavailable

__all__ = ["autocast", "autocast_dtype", "resolve_device", "seconds_of"]

DeviceName = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]


def resolve_device(name: str = "auto", *, granted_gpu: bool = True) -> torch.device:
    """The device called `name`; `auto` takes the GPU if there is one and the job was granted it (`granted_gpu`).

    Raises DeviceUnavailable, which says what is there, for a name that is none of auto, cpu, cuda and for a GPU that is missing
    or was not granted.
    """
    if name not in get_args(DeviceName):
        raise DeviceUnavailable(f"no device is called {name!r}; expected one of {', '.join(get_args(DeviceName))}")
    there = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not (there and granted_gpu)):
        return torch.device("cpu")
    if not there:
        raise DeviceUnavailable("device 'cuda' was asked for, this machine has only the CPU; set device to auto or cpu")
    if not granted_gpu:
        raise DeviceUnavailable(
            "device 'cuda' was asked for, the job was granted no GPU; ask for one in its resources (gpus: 1), or set device: auto"
        )
    return torch.device("cuda")


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """The type to compute in under autocast, or None for fp32 throughout. Weights are fp32 either way.

    `auto` is bf16 on a GPU that has it, and fp32 on the CPU: there autocast was measured no faster than fp32 at the sizes of this
    lab, since it casts the weights again at every visit. Raises DeviceUnavailable for bf16 on a GPU without it.
    """
    if precision == "fp32" or (precision == "auto" and device.type != "cuda"):
        return None
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        if precision == "auto":
            return None
        raise DeviceUnavailable(
            f"precision 'bf16' was asked for, {torch.cuda.get_device_name(device)} cannot compute in it; set precision to fp32"
        )
    return torch.bfloat16


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context to run forward passes in: autocast to `autocast_dtype`, or one that does nothing."""
    dtype = autocast_dtype(precision, device)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes. On one CPU thread the process's own: what neighbours do on the core is not part of it."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    # A step ends with its numbers on the host, but the optimizer's kernels may still be under way.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start
