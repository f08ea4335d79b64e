"""How errors are answered: a status, and a body that says what was wrong, what was expected and what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from services.api.bodies import BODIES
from services.problems import Problem, explain_errors
from services.registry import IllegalTransition, JobNotFound, KeyConflict, RegistryUnavailable, RunNotFound, StudyNotFound
from services.tracking import ModelNotFound, TrackingError, TrackingUnavailable

__all__ = ["ErrorBody", "Refused", "Responses", "install", "may_answer"]

Responses = dict[int | str, dict[str, Any]]

log = logging.getLogger("api")

RETRY_AFTER_S = 5  # told to clients while a database is away

_STATUS: dict[type[Exception], int] = {
    JobNotFound: 404,
    RunNotFound: 404,
    StudyNotFound: 404,
    ModelNotFound: 404,
    KeyConflict: 409,
    IllegalTransition: 409,
    RegistryUnavailable: 503,
    TrackingUnavailable: 503,
    TrackingError: 502,
}

_BY_STATUS = {
    404: ("there is nothing at this address", "one of the paths in /openapi.json"),
    405: ("this address does not take that method", "one of the methods in /openapi.json"),
    400: ("the request's body is not JSON", "a JSON object"),
}


class ProblemBody(BaseModel):
    """One thing that was wrong."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    field: str | None = None
    """Dotted path of the field."""
    error: str
    """What was wrong."""
    expected: str | None = None
    """What was expected."""
    hint: str | None = None
    """What to do."""


class ErrorBody(ProblemBody):
    """The body of every answer that is an error: the first thing that was wrong, and all of them."""

    problems: list[ProblemBody] = []


def may_answer(status: int, description: str) -> Responses:
    """What a route says about an error it may answer with, for the OpenAPI document."""
    return {status: {"model": ErrorBody, "description": description}}


class Refused(Exception):
    """A request that was understood and cannot be done."""

    def __init__(self, status: int, problem: Problem) -> None:
        super().__init__(problem.line())
        self.status = status
        self.problem = problem


def _answer(status: int, problems: Sequence[Problem], headers: dict[str, str] | None = None) -> JSONResponse:
    content = problems[0].as_dict() | {"problems": [problem.as_dict() for problem in problems]}
    return JSONResponse(_clean(content), status, headers)


def _clean(value: object) -> object:
    """A name that was sent may hold what cannot be written as UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {name: _clean(inner) for name, inner in value.items()}
    return [_clean(inner) for inner in value] if isinstance(value, list) else value


def _split(text: str) -> Problem:
    """A message of the form `what was wrong; expected ...; what to do` in its three parts."""
    error, found, rest = text.partition("; expected ")
    if not found:
        return Problem(text)
    expected, _, hint = rest.partition("; ") if "; " in rest else rest.partition(": ")
    return Problem(error, expected, hint or None)


def _validation(request: Request, error: Exception) -> JSONResponse:
    invalid = cast("RequestValidationError", error)
    route = request.scope.get("route")
    model = BODIES.get(getattr(route, "name", ""))
    problems: list[Problem] = []
    for one in invalid.errors():
        where, *loc = one["loc"]
        if one["type"] == "json_invalid":
            problems.append(Problem("the request's body is not JSON", "a JSON object", str(one["ctx"].get("error", ""))))
        elif not loc and where == "body" and one["type"] == "missing":
            problems.append(Problem("the request has no body", "a JSON object with the content type application/json"))
        else:
            problems += explain_errors([one | {"loc": tuple(loc)}], model if where == "body" else None)
    return _answer(422, problems)


def _known(request: Request, error: Exception) -> JSONResponse:
    status = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
    if status >= 500:
        log.warning("%s %s: %s", request.method, request.url.path, error)
    return _answer(status, [_split(str(error))], {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None)


def _refused(request: Request, error: Exception) -> JSONResponse:
    refused = cast("Refused", error)
    return _answer(refused.status, [refused.problem])


def _http(request: Request, error: Exception) -> JSONResponse:
    raised = cast("HTTPException", error)
    what, expected = _BY_STATUS.get(raised.status_code, (str(raised.detail), None))
    headers = dict(raised.headers or {})
    if raised.status_code == 405:  # each route knows its own method only
        headers["Allow"] = ", ".join(_methods(request))
    return _answer(raised.status_code, [Problem(what, expected)], headers)


def _methods(request: Request) -> list[str]:
    """The methods that the address of this request takes."""
    found: set[str] = set()
    for path, operations in request.app.openapi()["paths"].items():
        pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))
        if re.fullmatch(pattern, request.url.path):
            found |= {method.upper() for method in operations}
    return sorted(found)


def _unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(500, [Problem("the API failed at this request", None, "see api.log of the stack")])


def install(app: FastAPI) -> None:
    """Makes `app` answer errors this way."""
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http)
    for kind in _STATUS:
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(Exception, _unexpected)
