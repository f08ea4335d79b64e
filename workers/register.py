"""A `register` job: a trained run as a model version that MLflow's own tools load, under an alias.

A version is code by name and data by value: the file `workers/pyfunc_model.py`, the weights as a loopcore checkpoint and, where
the run was probed, what was measured. Nothing in it is a pickle. The alias is set last, once the version has answered.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from loopcore import checkpoint
from loopcore.errors import InputError, LoopcoreError
from loopcore.halting import HaltingProfile
from loopcore.model import LoopedTransformer
from loopcore.recall import RecallNet
from loopcore.specs import ModelName, RegisterJob, TrainSpec
from loopcore.tasks import load_task
from services.registry import Job, JobState, Run
from workers.feed import copy_key
from workers.lease import HeldJob
from workers.probe import newest_good
from workers.recording import flat, trained_run

__all__ = ["VersionDiffers", "run"]

CODE = Path(__file__).with_name("pyfunc_model.py")
REQUIRED = ("loopcore", "torch", "numpy", "safetensors", "pydantic")  # what a process that loads a version must have
EXAMPLES = 4  # words of each length that a new version is asked
PROBES_LOOKED_AT = 1000  # newest probe jobs among which the run's own is sought

_log = logging.getLogger(__name__)


class VersionDiffers(LoopcoreError):
    """The loaded version answers otherwise than the model it was made from; its alias was not set."""


def run(held: HeldJob) -> dict[str, Any]:
    """Publishes the run of `spec.job`. Done again, it finds the version that is there.

    Raises InputError for a job without a checkpoint and for a probe of another run, TrackingUnavailable, VersionDiffers.
    """
    spec = held.spec
    assert isinstance(spec, RegisterJob)
    name = ModelName.parse(spec.model)
    own = held.write(
        lambda: held.registry.records.open_run(
            held.fence, kind="register", spec=spec.resolved(), provenance=dict(held.job.provenance)
        )
    )
    held.progress(0, 3, "reads the checkpoint", unit="parts")
    trained = trained_run(held, spec.job)
    row, model, train = newest_good(held, trained, torch.device("cpu"))
    probe = _probe(held, spec, trained)
    if probe is None:
        _log.warning("the run has no probe with a decided speed: this version can halt by fixed:T and by watching, not by rule")
    held.check()

    with tempfile.TemporaryDirectory(prefix="loop-model-") as folder:
        held.progress(1, 3, "builds the version", unit="parts")
        files, examples = _build(Path(folder), model, train, row.step, _profile(probe, trained, spec))
        _verify(files, examples, spec.model)
        held.check()
        held.progress(2, 3, "publishes it", unit="parts")
        mlflow_run = held.tracking.start_run(
            f"train {trained.job}",
            flat(trained.spec),
            {"loop.job": str(trained.job)},
            key=copy_key(trained),
        )
        held.tracking.end_run(mlflow_run)
        version = held.tracking.register(
            name.name,
            files=files,
            mlflow_run=mlflow_run,
            tags=_tags(trained, row.digest, probe),
            key=f"{own.id}-{own.started_at:.0f}",
        )
    published = held.tracking.version(name.name, version)
    _verify(published.path, examples, spec.model)
    held.check()  # an attempt that was overtaken must not move the alias
    held.tracking.set_alias(name.name, name.alias, version)
    _log.info("%s is version %s", spec.model, version)
    result = {
        "model": spec.model,
        "version": version,
        "run": trained.id,
        "probe": None if probe is None else probe.id,
        "checkpoint": row.place,
        "source": str(published.path),
    }
    held.write(lambda: held.registry.records.finish_run(held.fence, own.id, "finished", result))
    held.progress(3, 3, unit="parts")
    return result


def _probe(held: HeldJob, spec: RegisterJob, trained: Run) -> Job | None:
    """The probe job whose profile the version carries. Raises InputError for one that did not measure this run."""
    queue = held.registry.queue
    if spec.probe is None:
        done = held.write(lambda: queue.jobs(state=JobState.SUCCEEDED, kind="probe", limit=PROBES_LOOKED_AT))
        return next((job for job in done if _measured(job, trained) and (job.result or {}).get("profile")), None)
    job = held.write(lambda: queue.job(spec.probe or 0))
    if not _measured(job, trained):
        raise InputError(
            f"job {job.id} is not a probe of the run of job {spec.job} that succeeded; expected the number of one, or none: "
            "then the newest is taken"
        )
    if not (job.result or {}).get("profile"):
        _log.warning("probe %d left the speed undecided: %s", job.id, (job.result or {}).get("undecided"))
        return None
    return job


def _measured(job: Job, trained: Run) -> bool:
    return job.kind == "probe" and job.state is JobState.SUCCEEDED and (job.result or {}).get("trained_run") == trained.id


def _profile(probe: Job | None, trained: Run, spec: RegisterJob) -> dict[str, Any] | None:
    """What `profile.json` holds."""
    if probe is None or probe.result is None:
        return None
    found = {name: probe.result[name] for name in ("accuracy", "exact_accuracy", "length", "v", "v_low", "v_high", "r2")}
    return {"halting": probe.result["profile"], "run": trained.id, "job": spec.job, "probe": probe.id, **found}


def _tags(trained: Run, digest: str, probe: Job | None) -> dict[str, str]:
    tags = {"loop.run": str(trained.id), "loop.train_job": str(trained.job), "loop.checkpoint": digest}
    if trained.provenance.get("commit"):
        tags["loop.commit"] = str(trained.provenance["commit"])
    if probe is not None and probe.result is not None:
        tags["loop.probe_job"] = str(probe.id)
        tags |= {name: f"{probe.result[name]:.6g}" for name in ("v", "v_low", "v_high", "r2", "burn_in", "accuracy")}
    return tags


def _build(
    folder: Path, model: LoopedTransformer | RecallNet, train: TrainSpec, step: int, profile: dict[str, Any] | None
) -> tuple[Path, dict[str, str]]:
    """A model folder of MLflow's, and words with the answers that it must give."""
    import mlflow

    weights = folder / "checkpoint"
    checkpoint.save(weights, {"model": model.state_dict()}, spec=train, step=step)
    artifacts = {"checkpoint": str(weights)}
    if profile is not None:
        (folder / "profile.json").write_text(json.dumps(profile, indent=1, allow_nan=False) + "\n")
        artifacts["profile"] = str(folder / "profile.json")
    halting = None if profile is None else HaltingProfile.from_json(profile["halting"])
    examples = _answers(model, train, halting)
    files = folder / "model"
    mlflow.pyfunc.save_model(
        str(files),
        python_model=str(CODE),
        artifacts=artifacts,
        signature=_signature(),
        input_example=list(examples)[:2],
        pip_requirements=[f"{name}=={metadata.version(name)}" for name in REQUIRED],
    )
    return files, examples


def _signature() -> Any:
    """Words as text, in a list or in the one column of a DataFrame whatever its name, and the parameter `halt`."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    # Without a name: MLflow takes a plain list for it too, and refuses an array of ids instead of dropping its columns.
    told = [("string", "answer"), ("long", "loops"), ("long", "loops_planned"), ("string", "exit_reason")]
    return ModelSignature(
        inputs=Schema([ColSpec("string")]),
        outputs=Schema([ColSpec(kind, name, required=name != "loops_planned") for kind, name in told]),
        params=ParamSchema([ParamSpec("halt", "string", "")]),
    )


@torch.inference_mode()
def _answers(model: LoopedTransformer | RecallNet, train: TrainSpec, halting: HaltingProfile | None) -> dict[str, str]:
    """Held-out words of the trained lengths and what the model says to them after the loops it is planned to take."""
    task = load_task(train.task)
    found: dict[str, str] = {}
    for length in train.contract.lengths:
        batch = task.random_batch(seed=train.seed, split="held_out", index=0, size=EXAMPLES, length=length)
        loops = train.contract.loops.loops(length) if halting is None else halting.planned_loops(length)
        answers_BN = model(batch.tokens, loops).argmax(-1)
        for tokens_N, answer_N in zip(batch.tokens.tolist(), answers_BN.tolist(), strict=True):
            found[task.decode(tokens_N)] = task.decode(answer_N)
    return found


def _verify(files: Path, examples: dict[str, str], model: str) -> None:
    """Loads a version as anybody would, with pickles forbidden. Raises VersionDiffers."""
    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"
    import mlflow
    import pandas as pd

    loaded = mlflow.pyfunc.load_model(str(files))
    told = loaded.predict(pd.DataFrame({"word": list(examples)}))
    wrong = [
        f"{word!r}: {got!r} instead of {expected!r}"
        for (word, expected), got in zip(examples.items(), told["answer"], strict=True)
        if got != expected
    ]
    if wrong:
        raise VersionDiffers(
            f"the new version of {model} answers otherwise than the run it was made from ({len(wrong)} of {len(examples)} words; "
            f"{wrong[0]}); the alias stays where it was. The installation that loads it may be another one than trained it"
        )
