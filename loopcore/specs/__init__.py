"""What a user may ask for, as frozen data: one source for YAML files, CLI, API, registry and docs. Imports no torch."""

from loopcore.specs.base import Spec
from loopcore.specs.contract import ContractSpec, FixedLoops, LogLoops, ProportionalLoops
from loopcore.specs.halting import HaltingSpec, parse_halting
from loopcore.specs.job import JOB_KINDS, JobSpec, ProbeJob, RegisterJob, ResourceSpec, ServeJob, TrainJob, TuneJob, parse_job
from loopcore.specs.model import ModelSpec, ScalingSpec
from loopcore.specs.probe import ProbeSpec
from loopcore.specs.serve import ModelName, RegisterSpec, ServeSpec
from loopcore.specs.shape import shape_key
from loopcore.specs.task import (
    ChessTask,
    IncrementTask,
    InstalledTask,
    MazeTask,
    ParityTask,
    PrefixSumTask,
    TaskSpec,
    TextTask,
    WordTask,
)
from loopcore.specs.train import OptimizerSpec, TrainSpec
from loopcore.specs.tune import TrialPoint, TuneSpec

__all__ = [
    "JOB_KINDS",
    "ChessTask",
    "ContractSpec",
    "FixedLoops",
    "HaltingSpec",
    "IncrementTask",
    "InstalledTask",
    "JobSpec",
    "LogLoops",
    "MazeTask",
    "ModelName",
    "ModelSpec",
    "OptimizerSpec",
    "ParityTask",
    "PrefixSumTask",
    "ProbeJob",
    "ProbeSpec",
    "ProportionalLoops",
    "RegisterJob",
    "RegisterSpec",
    "ResourceSpec",
    "ScalingSpec",
    "ServeJob",
    "ServeSpec",
    "Spec",
    "TaskSpec",
    "TextTask",
    "TrainJob",
    "TrainSpec",
    "TrialPoint",
    "TuneJob",
    "TuneSpec",
    "WordTask",
    "parse_halting",
    "parse_job",
    "shape_key",
]
