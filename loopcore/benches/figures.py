"""What a bench is asked and what it says: figures with their spread, and the machine they are of."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from loopcore.errors import InputError

__all__ = ["BenchAsk", "Figure", "cores", "heads_of", "machine", "median", "ratio"]

Tell = Callable[[str], None]


@dataclass(frozen=True)
class BenchAsk:
    """How much to time, and on what. What is left out is the bench's own choice."""

    scale: Literal["smoke", "full"] = "full"
    """`smoke` shows in seconds that the bench runs; its figures say nothing."""
    widths: tuple[int, ...] = ()
    """Model widths d."""
    rounds: int | None = None
    """Pairs that each ratio is the median of."""
    device: str = "auto"
    threads: int | None = None
    """CPU threads, or processes of one thread."""

    def __post_init__(self) -> None:
        if any(number is not None and number < 1 for number in (self.rounds, self.threads, *self.widths)):
            raise InputError(
                f"expected widths, rounds and threads of at least 1, got {self.widths}, {self.rounds}, {self.threads}"
            )


@dataclass(frozen=True)
class Figure:
    """One figure of a bench."""

    name: str
    value: float
    """Median over the rounds."""
    low: float
    """The smallest of them."""
    high: float
    """The largest of them."""
    unit: str
    against: str = ""
    """What it is compared with, or how it was taken."""

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return asdict(self)


def median(name: str, values: Sequence[float], unit: str, against: str = "") -> Figure:
    """The median of the rounds, with the smallest and the largest."""
    return Figure(name, statistics.median(values), min(values), max(values), unit, against)


def ratio(name: str, slow: Sequence[float], fast: Sequence[float], against: str) -> Figure:
    """How many times as long `slow` takes as `fast`, pair by pair: above 1 `fast` is faster."""
    return median(name, [one / other for one, other in zip(slow, fast, strict=True)], "times", against)


def heads_of(width: int, narrowest: int) -> int:
    """The most heads that divide a width evenly and are not narrower than `narrowest`."""
    return max(heads for heads in range(1, max(1, width // narrowest) + 1) if width % heads == 0)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: torch.device, threads: int) -> dict[str, Any]:
    """What the figures were measured on, and how busy it was before: `load` is the number of processes that want a core."""
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "threads": threads,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": f"{sys.platform}-{platform.machine()}",
    }


def _cpu_name() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
