"""What a job's process writes to its standard streams and loggers, kept for the registry and still written where it was."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TextIO

__all__ = ["Captured", "Divided"]

PENDING_MOST = 1024 * 1024  # characters held while the registry cannot be reached; what comes beyond is counted, not kept
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Captured:
    """While it is entered, takes what is printed and logged at INFO or above; `take` gives it away.

    The process's streams are exchanged, so there is one of these in a process at a time; `Divided` is for several.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: list[str] = []
        self._size = 0
        self._dropped = 0
        self._tap = _Tap(self.write)

    def write(self, text: str) -> None:
        """Keeps a piece of output."""
        with self._lock:
            if self._size + len(text) > PENDING_MOST:
                self._dropped += len(text)
                return
            self._pieces.append(text)
            self._size += len(text)

    def take(self) -> str:
        """All that came since the last call."""
        with self._lock:
            text = "".join(self._pieces)
            if self._dropped:
                text += f"\n[{self._dropped} characters left out here: they came faster than they could be kept]\n"
            self._pieces, self._size, self._dropped = [], 0, 0
        return text

    def put_back(self, text: str) -> None:
        """Takes back what could not be kept elsewhere, before all that came since."""
        with self._lock:
            self._pieces.insert(0, text)
            self._size += len(text)

    def __enter__(self) -> Captured:
        self._tap.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._tap.close()


# The part that the running thread's output belongs to. A thread that is begun for an attempt runs in a copy of its context.
_MINE: ContextVar[Captured | None] = ContextVar("captured", default=None)


class Divided:
    """The output of a process with several attempts: each `part` takes what was written for it, and what was for none goes to
    all that are entered."""

    def __init__(self) -> None:
        self._tap = _Tap(self._write)
        self._entered: list[Captured] = []

    def part(self) -> Captured:
        """The output of one attempt, to be entered by its thread."""
        return _Part(self._entered)

    def _write(self, text: str) -> None:
        mine = _MINE.get()
        for part in list(self._entered) if mine is None else [mine]:
            part.write(text)

    def __enter__(self) -> Divided:
        self._tap.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._tap.close()


class _Part(Captured):
    """A part of what a `Divided` takes."""

    def __init__(self, entered: list[Captured]) -> None:
        super().__init__()
        self._entered = entered

    def __enter__(self) -> Captured:
        self._entered.append(self)
        _MINE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.remove(self)


class _Tap:
    """The process's streams and loggers; between `open` and `close` what is written there is given to `keep` too."""

    def __init__(self, keep: Callable[[str], None]) -> None:
        self._keep = keep
        self._handler = logging.StreamHandler(_Stream(keep))
        self._handler.setFormatter(logging.Formatter(FORMAT))

    def open(self) -> None:
        self._before = sys.stdout, sys.stderr, logging.root.level
        sys.stdout, sys.stderr = _Stream(self._keep, sys.stdout), _Stream(self._keep, sys.stderr)
        logging.root.addHandler(self._handler)
        logging.root.setLevel(min(logging.INFO, logging.root.level))

    def close(self) -> None:
        logging.root.removeHandler(self._handler)
        sys.stdout, sys.stderr, level = self._before
        logging.root.setLevel(level)


class _Stream(io.TextIOBase):
    """Gives what is written to a function, and to a stream that was there before."""

    encoding = "utf-8"

    def __init__(self, keep: Callable[[str], None], also: TextIO | None = None) -> None:
        self._keep = keep
        self._also = also

    def write(self, text: str, /) -> int:
        self._keep(text)
        if self._also is not None:
            self._also.write(text)
        return len(text)

    def flush(self) -> None:
        if self._also is not None:
            self._also.flush()

    def fileno(self) -> int:
        if self._also is None:
            raise io.UnsupportedOperation("fileno")
        return self._also.fileno()

    def isatty(self) -> bool:
        return False
