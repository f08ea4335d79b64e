"""The service as an ASGI application. It needs no Ray: Ray Serve is one way to host it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.errors import may_answer
from services.api.guards import BodyLimit, KnownHosts
from services.inference import errors, native, openinference
from services.inference.metrics import Metrics
from services.inference.schemas import PredictRequest
from services.inference.service import Service
from services.inference.sources import FixedModels

__all__ = ["create_app", "openapi_document"]

BODIES = {"predict": PredictRequest, "infer": openinference.InferRequest}
GONE = 499  # what is noted, and read by nobody, where the client has left

_RESPONSES = may_answer(403, "A page of another site may not use this service.") | may_answer(
    421, "This server does not go by that name."
)


def create_app(service: Service, *, hosts: tuple[str, ...] = (), installation: str = "") -> FastAPI:
    """The application around `service`, which it opens and closes.

    `hosts` are names it answers to besides those of loopback; `installation` is told by `/v2`, so that whoever deploys the
    service knows whose it is.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.open()
        yield
        await service.close()

    app = FastAPI(
        title="Loopcore inference",
        summary="Looped models that stop when the answer is ready.",
        version=version("loopcore"),
        lifespan=lifespan,
        docs_url=None,  # its pages would load scripts from elsewhere
        redoc_url=None,
        responses=_RESPONSES,
        redirect_slashes=False,
        generate_unique_id_function=_operation,
        middleware=[
            Middleware(_Counted, metrics=service.metrics),
            Middleware(KnownHosts, names=hosts),
            Middleware(BodyLimit),
        ],
    )
    app.state.service, app.state.installation = service, installation
    errors.install(app, BODIES)
    app.add_exception_handler(native.Gone, lambda *_: Response(status_code=GONE))
    app.include_router(native.router)
    app.include_router(openinference.router)

    app.openapi = lambda: _documented(app)  # pyright: ignore[reportAttributeAccessIssue]

    @app.get("/metrics", tags=["health"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """What this replica has counted, in Prometheus' text format."""
        return Response(await service.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _documented(app: FastAPI) -> dict[str, Any]:
    """The application's own document, without the 422 that FastAPI puts in: what cannot be right is a 400 here."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(unused, None)
    return FastAPI.openapi(app)


def openapi_document() -> str:
    """The service's OpenAPI document as JSON, as it is kept in docs/api/inference-openapi.json."""
    return json.dumps(create_app(Service(FixedModels())).openapi(), indent=1, sort_keys=True) + "\n"


def _operation(route: APIRoute) -> str:
    return route.name


class _Counted:
    """Counts every request by its route's pattern and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = scope.get("route")
            self._metrics.request(getattr(route, "path", "none"), status)
