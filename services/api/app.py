"""Builds the application from its routers, guards and error handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware import Middleware

from services.api import errors, health, jobs, published, runs, studies
from services.api.doors import Doors
from services.api.errors import may_answer
from services.api.guards import BodyLimit, KnownHosts
from services.settings import Settings

__all__ = ["create_app"]

# What any request may get; routes add their own.
_RESPONSES = (
    may_answer(400, "The request's body is not JSON.")
    | may_answer(403, "A page of another site may not use this API.")
    | may_answer(413, "The request is too large.")
    | may_answer(421, "This server does not go by that name.")
    | may_answer(422, "A field is not right; every one is named.")
    | may_answer(503, "A database is away; try again later.")
)


def create_app(settings: Settings) -> FastAPI:
    """The API of one installation. Connects to nothing until a request needs it."""
    doors = Doors(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        doors.close()

    app = FastAPI(
        title="Loopcore",
        summary="Jobs, runs and models of one installation. A job spec is data, never code.",
        version=version("loopcore"),
        lifespan=lifespan,
        docs_url=None,  # its pages would load scripts from elsewhere
        redoc_url=None,
        responses=_RESPONSES,
        redirect_slashes=False,
        generate_unique_id_function=_operation,
        middleware=[Middleware(KnownHosts, names=(settings.api_host,)), Middleware(BodyLimit)],
    )
    app.state.doors = doors
    errors.install(app)
    for part in (jobs, runs, studies, published, health):
        app.include_router(part.router)
    return app


def _operation(route: APIRoute) -> str:
    return route.name
