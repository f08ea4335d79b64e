"""A job: one of the kinds below, with what it needs from the cluster and how often it may be tried."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, model_validator

from loopcore.specs.base import Spec
from loopcore.specs.probe import ProbeSpec
from loopcore.specs.serve import RegisterSpec, ServeSpec
from loopcore.specs.shape import shape_key
from loopcore.specs.train import TrainSpec
from loopcore.specs.tune import TuneSpec

__all__ = ["JOB_KINDS", "JobSpec", "ProbeJob", "RegisterJob", "ResourceSpec", "ServeJob", "TrainJob", "TuneJob", "parse_job"]


MOST_PACKED = 64  # jobs in one process: each has its own threads for lease and MLflow


class ResourceSpec(Spec):
    """What a job takes from the cluster while it runs, trials included."""

    cpus: float = Field(default=1.0, ge=0.0, le=1024)
    gpus: float = Field(default=0.0, ge=0.0, le=1024)
    """Whole GPUs, or a fraction of one."""
    memory_gb: float = Field(default=0.0, ge=0.0)
    """Memory in GiB that the node must have to spare; 0 does not ask."""


class BudgetSpec(Spec):
    """How often a job is tried again, apart for its own errors and for losses that are not its fault."""

    errors: int = Field(default=0, ge=0, le=100)
    """Tries after an error of the job itself."""
    losses: int = Field(default=5, ge=0, le=100)
    """Tries after a lost worker or node."""


class _Job(Spec):
    """Fields that jobs of every kind share."""

    name: str | None = Field(default=None, max_length=200)
    """A label for people."""
    resources: ResourceSpec = ResourceSpec()
    budgets: BudgetSpec = BudgetSpec()
    time_limit_s: float | None = Field(default=None, gt=0.0)
    """Most seconds one attempt may run."""

    def needs(self) -> tuple[int, ...]:
        """Jobs that this one waits for because its spec refers to them."""
        return ()


class TrainJob(_Job, TrainSpec):
    """One training run."""

    kind: Literal["train"] = "train"
    # Left out where it is 1: jobs have the digests that they had before they could be packed.
    pack: int = Field(default=1, ge=1, le=MOST_PACKED, exclude_if=lambda most: most == 1)
    """Most jobs, this one counted, that may train in one process as a population: jobs of one shape (model, task, contract,
    batch, evaluate_on, precision, device) with equal resources, which they then take together once. 1: a process of its own."""

    def needs(self) -> tuple[int, ...]:
        return () if self.start_from is None else (self.start_from,)

    @model_validator(mode="after")
    def _device_is_granted(self) -> TrainJob:
        if self.device == "cuda" and self.resources.gpus == 0:
            raise ValueError("device cuda needs resources.gpus above 0; set it, or leave device at auto")
        return self

    @model_validator(mode="after")
    def _can_be_packed(self) -> TrainJob:
        if self.pack > 1 and shape_key(self) is None:
            raise ValueError(
                f"only transformers that train without the progressive loss are packed, got architecture "
                f"{self.model.architecture!r} and progressive {self.progressive:g}; leave pack out"
            )
        return self


class ProbeJob(_Job, ProbeSpec):
    """Measurements on the run of a `train` job."""

    kind: Literal["probe"] = "probe"

    def needs(self) -> tuple[int, ...]:
        return (self.job,)


class TuneJob(_Job, TuneSpec):
    """A learning-rate transfer study by Ray Tune."""

    kind: Literal["tune"] = "tune"
    resources: ResourceSpec = ResourceSpec(cpus=2.0)

    @model_validator(mode="after")
    def _a_trial_fits(self) -> TuneJob:
        if self.trial_cpus > self.resources.cpus:
            raise ValueError(
                f"a trial of {self.trial_cpus:g} CPUs does not fit in the job's {self.resources.cpus:g}; raise resources.cpus"
            )
        return self


class RegisterJob(_Job, RegisterSpec):
    """A model version, published from a run."""

    kind: Literal["register"] = "register"

    def needs(self) -> tuple[int, ...]:
        return (self.job,) if self.probe is None else (self.job, self.probe)


class ServeJob(_Job, ServeSpec):
    """Brings a model version up on the inference service; ends when it answers."""

    kind: Literal["serve"] = "serve"
    resources: ResourceSpec = ResourceSpec(cpus=0.0)


JobSpec = Annotated[TrainJob | ProbeJob | TuneJob | RegisterJob | ServeJob, Field(discriminator="kind")]
JOB_KINDS: tuple[str, ...] = tuple(get_args(kind.model_fields["kind"].annotation)[0] for kind in get_args(get_args(JobSpec)[0]))

_ADAPTER: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)


def parse_job(content: Any) -> JobSpec:
    """Validates JSON-compatible data as a job of its `kind`. Raises pydantic's ValidationError (a ValueError)."""
    return _ADAPTER.validate_python(content)
