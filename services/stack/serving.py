"""The inference service where a stack comes up or goes: `python -m services.stack.serving resume|release`.

It lives in Ray, and so goes with the stack's own Ray. What was served is asked for again when the stack comes up; a service on
a cluster that was joined is taken down when it goes.
"""

from __future__ import annotations

import sys

import httpx

from services.inference.hosting import address, installation, shut_down
from services.settings import Settings


def resume(settings: Settings, api_url: str) -> None:
    """Queues a `serve` job for every model that the registry says is to be up."""
    with httpx.Client(base_url=api_url, trust_env=False, timeout=60.0) as api:
        for served in api.get("/v1/served").json()["served"]:
            body = {"model": served["model"], "replicas": served["replicas"], "key": f"resume {served['model']}"}
            answer = api.post("/v1/served", json=body)
            sys.stderr.write(f"{served['model']}: {answer.status_code} {answer.text[:500]}\n")


def release(settings: Settings) -> None:
    """Takes the service down if it is this installation's."""
    from services.dispatcher.cluster import connect

    try:
        found = httpx.get(f"{address(settings)}/v2", trust_env=False, timeout=5.0).json()
    except (httpx.HTTPError, ValueError):
        return
    if found.get("installation") == installation(settings):
        connect(settings)
        shut_down()


if __name__ == "__main__":
    if sys.argv[1] == "resume":
        resume(Settings.load(), sys.argv[2])
    else:
        release(Settings.load())
