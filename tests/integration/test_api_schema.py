"""Requests that nobody would think of, drawn from the OpenAPI document by schemathesis: no 5xx, all answers as documented."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from services.api.app import create_app
from services.registry import Registry, migrate
from services.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of MLflow, in this process

_FOLDER = tempfile.TemporaryDirectory(prefix="loop-api-")  # the document is needed when tests are collected
_SETTINGS = Settings(home=Path(_FOLDER.name))
_HOST = {"Host": "127.0.0.1"}

app = create_app(_SETTINGS)
schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=_HOST)


@pytest.fixture(scope="module", autouse=True)
def _a_registry_with_something_in_it() -> None:
    from services.api.submission import submit

    logging.getLogger("httpx").setLevel(logging.WARNING)
    migrate(_SETTINGS.registry_url)
    with Registry.open(_SETTINGS.registry_url) as registry:
        from loopcore.specs import parse_job

        submit(registry.queue, parse_job({"kind": "train"}))
        claimed = registry.queue.claim("here", cpus=1, gpus=0, memory_gb=1)
        assert claimed is not None
        registry.records.open_run(claimed.fence, kind="train", spec=claimed.spec, provenance={})


@schema.parametrize()
@hypothesis_settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_api_does_what_its_document_says(case: schemathesis.Case) -> None:
    app.state.doors.registry.queue.announce("here", "host", 1, {"ray": "up"})  # or /health/ready rightly says 503
    # Specs have rules across fields that JSON schema cannot say, and take "3" for 3 as YAML files and overrides need.
    loose = [positive_data_acceptance, negative_data_rejection] if case.method == "POST" else []
    case.call_and_validate(headers=_HOST, excluded_checks=loose)
