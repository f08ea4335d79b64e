"""The Open Inference Protocol, version 2, over HTTP and JSON: `/v2`. Tensors as JSON only, no binary extension.

| tensor | datatype | shape | meaning |
|---|---|---|---|
| in `inputs` | INT64 (or another whole-number type) | [N] or [B, N] | token ids of one word, or of B words of one length |
| in `inputs` | BYTES | [B] or [B, 1] | B words as text, of any lengths |
| out `outputs` | INT64 | [B, N], N the longest | what the model says at each position, -1 past a word's end |
| out `text` | BYTES | [B] | the same as text; for words that were given as text |
| out `loops_used` | INT64 | [B] | loops each word went through |
| out `exit_reason` | BYTES | [B] | what ended each |

The request's `parameters` are the fields of `POST /v1/models/{model}/predict` besides `inputs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Literal, cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loopcore.specs.base import PositiveInt
from services.api.errors import may_answer
from services.inference.errors import Refusal
from services.inference.native import ASKING, NOT_SERVED, ModelPath, Serving, answered
from services.inference.schemas import Answers, PredictRequest
from services.problems import Problem, explain

__all__ = ["InferRequest", "router"]

router = APIRouter(prefix="/v2", tags=["open inference protocol"])

WHOLE = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
INPUT = "inputs"
OUTPUTS = ("outputs", "text", "loops_used", "exit_reason")
MOST_VALUES = 100_000  # of a tensor; a request's body has room for few more
NOT_READY = may_answer(503, "The service does not know yet what it is to serve, or this model cannot be had.")


class _Part(BaseModel):
    # The protocol lets clients send fields of extensions that a server does not know.
    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=(), extra="ignore", allow_inf_nan=False)


class TensorIn(_Part):
    """A tensor of a request."""

    name: str = Field(max_length=200)
    shape: list[PositiveInt] = Field(min_length=1, max_length=2)
    datatype: str = Field(max_length=20)
    data: list[Any]
    """The values in row-major order, flat or nested as in the shape."""


class TensorAsked(_Part):
    """A tensor that the client wants back."""

    name: str = Field(max_length=200)


class InferRequest(_Part):
    """An inference request of the protocol."""

    id: str | None = Field(default=None, max_length=200)
    parameters: dict[str, Any] = {}
    """Fields of a prediction besides `inputs`, such as `halt` or `deadline_ms`."""
    inputs: list[TensorIn] = Field(min_length=1, max_length=1)
    outputs: list[TensorAsked] | None = Field(default=None, max_length=16)


class TensorOut(_Part):
    """A tensor of an answer."""

    name: str
    datatype: str
    shape: list[int]
    data: list[int] | list[str]


class InferAnswer(_Part):
    """An answer of the protocol."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[TensorOut]


class TensorMeta(_Part):
    """A tensor that a model takes or gives; -1 stands for any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMeta(_Part):
    """A model of the protocol."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMeta]
    outputs: list[TensorMeta]


class ServerMeta(_Part):
    """This server."""

    name: str
    version: str
    extensions: list[str]
    installation: str
    """Digest of the installation that this service belongs to."""


class Live(_Part):
    live: Literal[True] = True


class Ready(_Part):
    ready: bool


class ModelReady(_Part):
    name: str
    ready: bool


@router.get("")
async def server(request: Request) -> ServerMeta:
    """What this server is."""
    return ServerMeta(name="loopcore", version=version("loopcore"), extensions=[], installation=request.app.state.installation)


@router.get("/health/live")
async def live() -> Live:
    """The process answers."""
    return Live()


@router.get("/health/ready", responses=NOT_READY)
async def ready(service: Serving) -> Ready:
    """The service knows what it is to serve."""
    if not service.shelf.ready:
        raise Refusal(503, Problem(f"the service is not ready: {service.shelf.problem}", None, "ask again later"))
    return Ready(ready=True)


@router.get("/models/{model}", responses=NOT_SERVED)
async def read_model_metadata(service: Serving, model: ModelPath) -> ModelMeta:
    """A model's tensors."""
    _, found, _ = service.shelf.state(model)
    return ModelMeta(
        name=model,
        versions=[found.version] if found else [],
        platform="loopcore",
        inputs=[TensorMeta(name=INPUT, datatype="INT64", shape=[-1, -1])],
        outputs=[
            TensorMeta(name="outputs", datatype="INT64", shape=[-1, -1]),
            TensorMeta(name="loops_used", datatype="INT64", shape=[-1]),
            TensorMeta(name="exit_reason", datatype="BYTES", shape=[-1]),
        ],
    )


@router.get("/models/{model}/ready", responses=NOT_SERVED | NOT_READY)
async def model_ready(service: Serving, model: ModelPath) -> ModelReady:
    """Whether a model answers; one that sleeps does, once it is asked."""
    state, _, problem = service.shelf.state(model)
    if state == "failed":
        raise Refusal(503, Problem(f"{model} is not ready: {problem}"))
    return ModelReady(name=model, ready=True)


@router.post("/models/{model}/infer", response_model=InferAnswer, responses=ASKING)
async def infer(service: Serving, model: ModelPath, body: InferRequest, request: Request) -> Response:
    """The model's answer to the words of a tensor."""
    if "inference-header-content-length" in request.headers:
        raise Refusal(400, Problem("binary tensors are not taken", "tensors as JSON", "switch the client's binary data off"))
    words, as_text = _words(body.inputs[0])
    wanted = _wanted(body, as_text)
    asked = await service.ask(model, _prediction(words, body.parameters))
    answer = cast("Answers", await answered(request, asked))  # a list of words was asked
    tensors = _tensors(answer, asked.ids)
    found = InferAnswer(
        model_name=answer.model, model_version=answer.model_version, id=body.id, outputs=[tensors[name] for name in wanted]
    )
    return JSONResponse(found.model_dump(mode="json", exclude_none=True))


def _wanted(body: InferRequest, as_text: bool) -> list[str]:
    """Names of the tensors to be answered. Raises Refusal for one that there is not."""
    known = [name for name in OUTPUTS if name != "text" or as_text]
    asked = known if body.outputs is None else [tensor.name for tensor in body.outputs]
    unknown = next((name for name in asked if name not in known), None)
    if unknown is not None:
        raise Refusal(400, Problem(f"there is no output {unknown!r}", f"one of {', '.join(known)}", field="outputs"))
    return asked


def _prediction(words: list[Any], parameters: dict[str, Any]) -> PredictRequest:
    fields = {name: value for name, value in parameters.items() if name in PredictRequest.model_fields and name != "inputs"}
    try:
        return PredictRequest.model_validate(fields | {"inputs": words})
    except ValidationError as error:
        raise Refusal(400, *explain(error, PredictRequest)) from None


def _words(tensor: TensorIn) -> tuple[list[Any], bool]:
    """The words of a tensor, and whether they are text. Raises Refusal."""

    def wrong(what: str, expected: str) -> Refusal:
        return Refusal(400, Problem(what, expected, field="inputs"))

    if tensor.name != INPUT:
        raise wrong(f"got a tensor {tensor.name!r}", f"one called {INPUT!r}")
    size = math.prod(tensor.shape)
    if size > MOST_VALUES:
        raise wrong(f"a tensor of shape {tensor.shape}", f"at most {MOST_VALUES} values")
    values = _flat(tensor.data, len(tensor.shape))
    if values is None or len(values) != size:
        raise wrong(
            f"the data are not those of a tensor of shape {tensor.shape}", f"{size} values, flat or nested as in the shape"
        )
    if tensor.datatype == "BYTES":
        if len(tensor.shape) == 2 and tensor.shape[1] != 1:
            raise wrong(f"text of shape {tensor.shape}", "shape [B] or [B, 1], a text a word")
        if not all(isinstance(value, str) for value in values):
            raise wrong("BYTES with values that are not text", "JSON strings")
        return values, True
    if tensor.datatype not in WHOLE:
        raise wrong(f"datatype {tensor.datatype!r}", f"BYTES, or one of {', '.join(WHOLE)}")
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise wrong(f"{tensor.datatype} with values that are not whole numbers", "token ids")
    width = tensor.shape[-1]
    return [values[at : at + width] for at in range(0, size, width)], False


def _flat(data: list[Any], dimensions: int) -> list[Any] | None:
    """The values in row-major order; None for another nesting than flat or that of a tensor of so many dimensions."""
    if not any(isinstance(row, list) for row in data):
        return data
    if dimensions == 1 or not all(isinstance(row, list) and len(row) == len(data[0]) for row in data):
        return None
    return [value for row in data for value in row]


def _tensors(answer: Answers, ids: list[tuple[int, ...]]) -> dict[str, TensorOut]:
    words, longest = len(ids), max(map(len, ids))
    padded = [value for row in ids for value in (*row, *[-1] * (longest - len(row)))]

    def column(name: str, values: Sequence[object]) -> TensorOut:
        return TensorOut(name=name, datatype="BYTES", shape=[words], data=[str(value) for value in values])

    return {
        "outputs": TensorOut(name="outputs", datatype="INT64", shape=[words, longest], data=padded),
        "text": column("text", answer.outputs),
        "loops_used": TensorOut(name="loops_used", datatype="INT64", shape=[words], data=answer.loops_used),
        "exit_reason": column("exit_reason", answer.exit_reason),
    }
