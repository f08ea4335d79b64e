"""Every error that loopcore raises on purpose.

LoopcoreError
├── InputError                the caller asked for something that cannot be (also a ValueError)
│   ├── UnknownGroup          no finite group of this name
│   ├── UnknownSymbol         a token outside the task's vocabulary
│   ├── LengthError           an input that is empty, or longer than the model can take
│   └── DeviceUnavailable     a device that this machine does not have
├── CheckpointError           a checkpoint that cannot be trusted or written
│   ├── CheckpointCorrupt     missing files, a digest that is not right, or an unknown format
│   └── CheckpointNotWritten  the disk refused it; nothing half-written is left
├── QueueFull                 the batching engine's waiting line is full; ask again later
└── Undecided                 a measurement that the data do not support, with the reason
"""

from __future__ import annotations

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointNotWritten",
    "DeviceUnavailable",
    "InputError",
    "LengthError",
    "LoopcoreError",
    "QueueFull",
    "Undecided",
    "UnknownGroup",
    "UnknownSymbol",
]


class LoopcoreError(Exception):
    """Base of all of them; the message says what was wrong, what was expected and what to do."""


class InputError(LoopcoreError, ValueError):
    """The caller asked for something that cannot be."""


class UnknownGroup(InputError):
    """No finite group of this name."""


class UnknownSymbol(InputError):
    """A token outside the task's vocabulary."""


class LengthError(InputError):
    """An input that is empty, or longer than the model can take."""


class DeviceUnavailable(InputError):
    """A device that this machine does not have."""


class CheckpointError(LoopcoreError):
    """A checkpoint that cannot be trusted or written."""


class CheckpointCorrupt(CheckpointError):
    """Missing files, a digest that is not right, or an unknown format."""


class CheckpointNotWritten(CheckpointError):
    """The disk refused it; nothing half-written is left behind."""


class QueueFull(LoopcoreError):
    """The batching engine's waiting line is full; ask again later."""


class Undecided(LoopcoreError):
    """A measurement that the data do not support; the message is the reason."""
