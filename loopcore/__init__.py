"""A lab for looped (weight-tied) transformers: one block, applied T times.

from loopcore import TrainSpec, Training, correct_by_loop, measure_frontier

run = Training(TrainSpec(), threads=2)  # words of S3, one block, T = n
while not run.finished:
    run.advance()
correct = correct_by_loop(run.model, run.task, words=512, length=8, loops=12)
measure_frontier(correct).speed  # positions a loop

Names below are imported on first use: `import loopcore` and the specs load no torch. Checkpoints are the module
`loopcore.checkpoint`, studies `loopcore.studies`, further instruments `loopcore.instruments`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopcore.batching import LoopBatchEngine, ModelStepper, Request
    from loopcore.checkpoint import load_model
    from loopcore.contract import Stages
    from loopcore.errors import (
        CheckpointCorrupt,
        CheckpointError,
        CheckpointNotWritten,
        DeviceUnavailable,
        InputError,
        LengthError,
        LoopcoreError,
        QueueFull,
        Undecided,
        UnknownGroup,
        UnknownSymbol,
    )
    from loopcore.halting import Halting, HaltingProfile, measure_halting
    from loopcore.instruments import correct_by_loop, measure_accuracy, measure_frontier, measure_tau
    from loopcore.model import LoopedTransformer, Trace, build_model
    from loopcore.optim import make_optimizer, parameter_groups
    from loopcore.scaling import Multipliers, multipliers
    from loopcore.specs import (
        ContractSpec,
        FixedLoops,
        HaltingSpec,
        LogLoops,
        ModelSpec,
        OptimizerSpec,
        ProportionalLoops,
        ScalingSpec,
        TextTask,
        TrainSpec,
        WordTask,
        parse_halting,
    )
    from loopcore.tasks import Batch, Group, Task, Text, WordProblem, finite_group, load_task
    from loopcore.training import Progress, Training

__all__ = [
    "Batch",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointNotWritten",
    "ContractSpec",
    "DeviceUnavailable",
    "FixedLoops",
    "Group",
    "Halting",
    "HaltingProfile",
    "HaltingSpec",
    "InputError",
    "LengthError",
    "LogLoops",
    "LoopBatchEngine",
    "LoopcoreError",
    "LoopedTransformer",
    "ModelSpec",
    "ModelStepper",
    "Multipliers",
    "OptimizerSpec",
    "Progress",
    "ProportionalLoops",
    "QueueFull",
    "Request",
    "ScalingSpec",
    "Stages",
    "Task",
    "Text",
    "TextTask",
    "Trace",
    "TrainSpec",
    "Training",
    "Undecided",
    "UnknownGroup",
    "UnknownSymbol",
    "WordProblem",
    "WordTask",
    "build_model",
    "correct_by_loop",
    "finite_group",
    "load_model",
    "load_task",
    "make_optimizer",
    "measure_accuracy",
    "measure_frontier",
    "measure_halting",
    "measure_tau",
    "multipliers",
    "parameter_groups",
    "parse_halting",
]

# Where the names are at home. The first ones load no torch, so that a name of theirs never does.
HOMES = (
    "errors", "specs", "halting", "scaling", "contract",
    "batching", "model", "tasks", "optim", "instruments", "training", "checkpoint",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in HOMES:
            module = import_module(f"{__name__}.{home}")
            if name in module.__all__:
                globals()[name] = found = getattr(module, name)
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
