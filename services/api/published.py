"""`/v1/models` and `/v1/served`: model versions in MLflow, and what the inference service has up."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field

from loopcore.specs import RegisterJob, ServeJob
from loopcore.specs.serve import MODEL_NAME
from services.api.bodies import ModelList, PromoteRequest, ServedList, ServeRequest, SubmitAnswer
from services.api.doors import Open
from services.api.errors import Refused, may_answer
from services.api.submission import submit
from services.problems import Problem
from services.tracking import ModelVersion

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["models"])

ModelPath = Annotated[
    str, Path(description="`name@alias`, for example `s3@champion`."), Field(max_length=200, pattern=f"^{MODEL_NAME.pattern}$")
]
NOT_FOUND = may_answer(404, "There is no such job or model.")
CONFLICT = may_answer(409, "The key is held by a job with another spec.")
MLFLOW = may_answer(502, "MLflow refused the request.")


@router.get("/models", responses=MLFLOW)
def list_models(doors: Open) -> ModelList:
    """Registered models with their aliases."""
    return ModelList(doors.tracking.models())


@router.get("/models/{model}", responses=NOT_FOUND | MLFLOW)
def read_model(doors: Open, model: ModelPath) -> ModelVersion:
    """The version that an alias points at."""
    return doors.tracking.resolve(model)


@router.post("/models", status_code=202, responses=NOT_FOUND | CONFLICT)
def promote_model(doors: Open, asked: PromoteRequest) -> SubmitAnswer:
    """Queues the `register` job that publishes a job's run as a model version under an alias."""
    spec = RegisterJob(job=asked.job, probe=asked.probe, model=asked.model)
    done = submit(
        doors.registry.queue, spec, priority=asked.priority, key=asked.key, user=asked.user, provenance=asked.provenance
    )
    return SubmitAnswer(done.job, done.created)


@router.get("/served")
def list_served(doors: Open) -> ServedList:
    """What the inference service is to have up."""
    return ServedList(doors.registry.queue.served())


@router.post("/served", status_code=202, responses=NOT_FOUND | CONFLICT | MLFLOW)
def serve_model(doors: Open, asked: ServeRequest) -> SubmitAnswer:
    """Queues the `serve` job that brings a model version up; an alias that does not exist is refused at once."""
    doors.tracking.resolve(asked.model)
    spec = ServeJob(model=asked.model, replicas=asked.replicas)
    done = submit(
        doors.registry.queue, spec, priority=asked.priority, key=asked.key, user=asked.user, provenance=asked.provenance
    )
    return SubmitAnswer(done.job, done.created)


@router.delete("/served/{model}", status_code=204, responses=NOT_FOUND)
def unserve_model(doors: Open, model: ModelPath) -> None:
    """Asks the inference service to take a model down."""
    if not doors.registry.queue.unserve(model):
        up = ", ".join(served.model for served in doors.registry.queue.served()) or "none is"
        raise Refused(404, Problem(f"{model} is not being served", f"a model that is up: {up}"))
