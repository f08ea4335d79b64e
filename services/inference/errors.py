"""How the service answers what it cannot do: a status, and a body that says what was wrong, what was expected, what to do.

| status | when |
|---|---|
| 400 | a word, a rule or a body that cannot be right |
| 404 | a model that is not served, an address that is not there |
| 413 | a body that is too large (see `services.api.guards`) |
| 500 | a fault of the service's own |
| 503 | the line is full, or the model cannot be had now; `Retry-After` says when to ask again |
| 504 | the request's deadline passed |
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from loopcore.errors import InputError, QueueFull
from services.inference.engine_loop import EngineFailed, FellBehind
from services.inference.shelf import NotServed, Unusable
from services.problems import Problem, explain_errors

__all__ = ["Refusal", "body_of", "install", "refusal"]

RETRY_FULL_S = 1  # seconds after which a full line is worth another try
RETRY_UNUSABLE_S = 5

log = logging.getLogger("inference")


class Refusal(Exception):
    """A request that gets no answer, and what is said instead."""

    def __init__(self, status: int, *problems: Problem, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(problems[0].line())
        self.status, self.problems, self.headers = status, problems, dict(headers or {})


def refusal(error: Exception) -> Refusal | None:
    """What to say to an error that the service raises on purpose; None for any other."""
    match error:
        case Refusal():
            return error
        case NotServed():
            known = f"one of {', '.join(error.known)}" if error.known else "a model that is served; none is"
            what = error.why or f"{error.model!r} is not served here"
            return Refusal(404, Problem(what, known, f"bring it up with `loop serve {_shown(error.model)}`"))
        case Unusable():
            return Refusal(503, told(str(error)), headers={"Retry-After": str(RETRY_UNUSABLE_S)})
        case QueueFull():
            problem = Problem(str(error).partition(";")[0], "room in the line", "ask again later")
            return Refusal(503, problem, headers={"Retry-After": str(RETRY_FULL_S)})
        case InputError():
            return Refusal(400, told(str(error)))
        case FellBehind():
            return Refusal(503, told(str(error)))
        case EngineFailed():
            return Refusal(500, Problem(str(error), None, "ask again; the service's log has the traceback"))
    return None


def told(text: str) -> Problem:
    """A message of the form `what was wrong; expected ...; what to do` in its parts."""
    error, found, rest = text.partition("; expected ")
    expected, _, hint = rest.partition("; ")
    return Problem(error, expected or None, hint or None) if found else Problem(text)


def body_of(problems: Sequence[Problem]) -> dict[str, Any]:
    """The body that tells them: the first, and all of them."""
    return problems[0].as_dict() | {"problems": [problem.as_dict() for problem in problems]}


def install(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Makes `app` answer errors this way. `bodies` has the model of each route's body, by the route's name."""

    def invalid(request: Request, error: Exception) -> Response:
        problems: list[Problem] = []
        model = bodies.get(getattr(request.scope.get("route"), "name", ""))
        for one in cast("RequestValidationError", error).errors():
            where, *loc = one["loc"]
            if one["type"] == "json_invalid":
                problems.append(Problem("the request's body is not JSON", "a JSON object", str(one["ctx"].get("error", ""))))
            elif not loc and where == "body" and one["type"] == "missing":
                problems.append(Problem("the request has no body", "a JSON object with the content type application/json"))
            else:
                problems += explain_errors([one | {"loc": tuple(loc)}], model if where == "body" else None)
        return _answer(Refusal(400, *problems))

    def http(request: Request, error: Exception) -> Response:
        raised = cast("HTTPException", error)
        where = "one of the paths in /openapi.json"
        problem = {
            400: Problem("the request's body is not JSON", "a JSON object"),
            404: Problem("there is nothing at this address", where),
            405: Problem("this address does not take that method", "one of the methods in /openapi.json"),
        }.get(raised.status_code, Problem(str(raised.detail)))
        return _answer(Refusal(raised.status_code, problem, headers=raised.headers))

    def known(request: Request, error: Exception) -> Response:
        return _answer(cast("Refusal", refusal(error)))

    def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _answer(Refusal(500, Problem("the inference service failed at this request", None, "see its log")))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (Refusal, NotServed, Unusable, QueueFull, InputError, EngineFailed, FellBehind):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(Exception, unexpected)


def _answer(found: Refusal) -> Response:
    # In ASCII: what was sent may hold what cannot be written as UTF-8.
    return Response(json.dumps(body_of(found.problems)), found.status, found.headers, "application/json")


def _shown(model: str) -> str:
    return model if len(model) <= 80 and model.isprintable() else "NAME@ALIAS"
