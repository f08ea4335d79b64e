"""The API as the commands reach it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from services.cli.errors import CliError, Failure, UserError

if TYPE_CHECKING:
    import httpx

    from services.settings import Settings

__all__ = ["Client", "Unreachable", "open_client", "open_inference", "refusal"]

TIMEOUT_S = 30.0  # a request that waits for MLflow may take long


class Unreachable(CliError):
    """Nobody answers at the address, or says that its database is away."""


class Client:
    """One HTTP service; answers are JSON. `what` names it in messages."""

    def __init__(self, url: str, *, what: str, advice: str, token: str | None = None) -> None:
        import httpx

        self.url = url
        self._what = what
        self._advice = advice
        loopback = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(
            base_url=url,
            timeout=TIMEOUT_S,
            trust_env=not loopback,  # a proxy cannot reach this machine's loopback
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        weakref.finalize(self, self._http.close)

    def get(self, path: str, **params: Any) -> Any:
        return self._ask("GET", path, params={name: value for name, value in params.items() if value is not None})

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._ask("POST", path, body=body)

    def delete(self, path: str) -> Any:
        return self._ask("DELETE", path)

    def events(self, path: str, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Server-sent events of a POST: name and data of each."""
        import httpx

        try:
            headers = {"Accept": "text/event-stream", "Content-Type": "application/json"}
            with self._http.stream("POST", path, content=json.dumps(body), headers=headers) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise self._refusal(answer)
                name, data = "message", []
                for line in answer.iter_lines():
                    if line.startswith("event:"):
                        name = line.removeprefix("event:").strip()
                    elif line.startswith("data:"):
                        data.append(line.removeprefix("data:").strip())
                    elif not line and data:
                        yield name, json.loads("\n".join(data))
                        name, data = "message", []
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _ask(self, method: str, path: str, *, params: dict[str, Any] | None = None, body: dict[str, Any] | None = None) -> Any:
        import httpx

        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            answer = self._http.request(method, path, params=params, content=content, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if answer.status_code >= 400:
            raise self._refusal(answer)
        if answer.status_code == 204:
            return None
        try:
            return answer.json()
        except ValueError:
            raise Failure(f"{self._what} at {self.url} did not answer with JSON; see that the address is right") from None

    def _unreachable(self, error: Exception) -> Unreachable:
        import httpx

        why = "does not answer in time" if isinstance(error, httpx.TimeoutException) else "does not answer"
        return Unreachable(f"{self._what} at {self.url} {why}; {self._advice}")

    def _refusal(self, answer: httpx.Response) -> CliError:
        """The error that the body of an answer tells."""
        try:
            return refusal(answer.json(), answer.status_code)
        except (ValueError, KeyError, TypeError, AttributeError):
            return Failure(f"{self._what} at {self.url} answered {answer.status_code}; see that the address is right")


def refusal(body: dict[str, Any], status: int) -> CliError:
    """The error that the body of an answer of this status tells, one line a problem."""
    from services.problems import Problem

    problems = body.get("problems") or [body]
    lines = [Problem(one["error"], one.get("expected"), one.get("hint"), _field(one.get("field"))).line() for one in problems]
    text = "\n".join(lines)
    if status in (502, 503, 504):
        return Unreachable(text)
    return Failure(text) if status >= 500 else UserError(text)


def _field(path: str | None) -> str | None:
    """A field of the request as it stands in the spec's file."""
    return None if path in (None, "spec") else path.removeprefix("spec.")


def open_client(settings: Settings | None = None) -> Client:
    """The API of LOOP_API_URL, or of this home's stack."""
    from services.settings import Settings
    from services.stack import state

    settings = settings or Settings.load()
    token = settings.token.get_secret_value() if settings.token else None
    if settings.api_url:
        return Client(settings.api_url, what="the API", advice="see that LOOP_API_URL is right and that it is up", token=token)
    found = state.read(settings)
    if found is None:
        raise UserError(f"no stack of {settings.home} is up; start one with `loop up --detach`, or set LOOP_HOME or LOOP_API_URL")
    return Client(
        found["api"]["url"], what="the API", advice="start the stack with `loop up --detach`, or see `loop doctor`", token=token
    )


def open_inference(settings: Settings | None = None) -> Client:
    """The inference service of LOOP_INFERENCE_URL, or of this home's stack."""
    from services.settings import Settings
    from services.stack import state

    settings = settings or Settings.load()
    found = state.read(settings) or {}
    url = (
        settings.inference_url
        or found.get("inference", {}).get("url")
        or f"http://{settings.inference_host}:{settings.inference_port}"
    )
    return Client(url, what="the inference service", advice="bring a model up with `loop serve NAME@ALIAS`")
