"""`/v1/models`: predictions, as JSON or as a stream of events, and what is up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Annotated, Any, TypeVar, cast

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import Response, StreamingResponse

from services.api.errors import may_answer
from services.inference.errors import Refusal, body_of, refusal
from services.inference.schemas import Answer, Answers, LoopNews, ModelCard, ModelCards, PredictRequest
from services.inference.service import Asked, Service
from services.problems import Problem

__all__ = ["ASKING", "NOT_SERVED", "Gone", "ModelPath", "Serving", "answered", "router"]

PULSE_S = 15.0  # seconds without an event after which a stream says that it is still there

Value = TypeVar("Value")

router = APIRouter(prefix="/v1/models", tags=["models"])

ModelPath = Annotated[str, Path(description="`name@alias`, for example `s3@champion`.", max_length=200)]
NOT_SERVED = may_answer(404, "This model is not served.") | may_answer(
    400, "The request cannot be right; every problem is named."
)
ASKING = (
    NOT_SERVED
    | may_answer(413, "The request is too large.")
    | may_answer(500, "A word could not be computed.")
    | may_answer(503, "The line is full, or the model cannot be had now. `Retry-After` says when to ask again.")
    | may_answer(504, "A word had no answer at the deadline.")
)
STREAM = "text/event-stream"

log = logging.getLogger("inference")


class Gone(Exception):
    """The client went away: nobody hears the answer."""


def _service(request: Request) -> Service:
    return cast("Service", request.app.state.service)


Serving = Annotated[Service, Depends(_service)]


@router.get("")
async def list_models(service: Serving) -> ModelCards:
    """Every model that the service is to have up."""
    return ModelCards(models=[await service.card(model) for model in service.shelf.names])


@router.get("/{model}", responses=NOT_SERVED)
async def read_model(service: Serving, model: ModelPath) -> ModelCard:
    """One model: its version, what it takes, how busy it is."""
    return await service.card(model)


@router.post(
    "/{model}/predict",
    response_model=Answer | Answers,
    responses=ASKING
    | {
        200: {
            "description": (
                "The answer. One word gives single values, a list of words gives a list in each field. With `Accept: "
                "text/event-stream`: an event `loop` for each word after each loop, then `answer` with the same content, or "
                "`error`."
            ),
            "content": {STREAM: {"schema": {"type": "string"}}},
        }
    },
)
async def predict(service: Serving, model: ModelPath, body: PredictRequest, request: Request) -> Response:
    """The model's answer to a word or to several, each with the loops it took."""
    streaming = STREAM in request.headers.get("accept", "")
    asked = await service.ask(model, body, trace=streaming)
    if not streaming:
        answer = await answered(request, asked)
        return Response(answer.model_dump_json(), media_type="application/json")
    try:
        await asked.accepted()
    except BaseException:
        asked.abandon()
        raise
    return StreamingResponse(_events(asked), media_type=STREAM, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def answered(request: Request, asked: Asked) -> Answer | Answers:
    """The answer, unless the client goes away before: its words leave at the next tick then. Raises Gone."""

    async def whole() -> Answer | Answers:
        await asked.accepted()
        return await asked.answer()

    try:
        return await _while_connected(request, whole())
    finally:
        asked.abandon()


async def _while_connected(request: Request, work: Coroutine[Any, Any, Value]) -> Value:
    """The result of `work`, which is given up as soon as the client is gone."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, listening):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(asked: Asked) -> AsyncIterator[str]:
    news = asked.news()
    try:
        async for item in _with_pulse(news):
            if item is None:
                yield ": still here\n\n"
            else:
                yield _event("loop" if isinstance(item, LoopNews) else "answer", item.model_dump_json())
    except Exception as error:
        found = refusal(error)
        if found is None:
            log.exception("a stream failed")
            found = Refusal(500, Problem("the inference service failed at this request", None, "see its log"))
        yield _event("error", json.dumps({"status": found.status} | body_of(found.problems)))
    finally:
        asked.abandon()


async def _with_pulse(news: AsyncIterator[Value]) -> AsyncIterator[Value | None]:
    """The items, and None for every `PULSE_S` seconds in which none came."""
    upcoming: asyncio.Future[Value] = asyncio.ensure_future(anext(news))  # pyright: ignore[reportArgumentType]
    try:
        while True:
            done, _ = await asyncio.wait((upcoming,), timeout=PULSE_S)
            if not done:
                yield None
                continue
            try:
                item = upcoming.result()
            except StopAsyncIteration:
                return
            yield item
            upcoming = asyncio.ensure_future(anext(news))  # pyright: ignore[reportArgumentType]
    finally:
        upcoming.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
            await upcoming


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"
