"""Requests that nobody would think of, drawn from the service's OpenAPI document: no 5xx, all answers as documented."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from services.inference.app import create_app, openapi_document
from services.inference.service import Service
from services.inference.sources import FixedModels
from tests.published import publish
from tests.serving import served

schema = schemathesis.openapi.from_dict(json.loads(openapi_document()))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    # The name that drawn paths can hit beside one that they cannot.
    with served(create_app(Service(FixedModels(publish(folder), publish(folder, "0"))))) as client:
        yield str(client.base_url)


@schema.parametrize()
@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_service_does_what_its_document_says(case: schemathesis.Case, url: str) -> None:
    if "model" in case.path_parameters and len(case.path_parameters["model"]) % 2 == 0:
        case.path_parameters["model"] = "s3@demo"
    # Words have a vocabulary and bounds have an order, which JSON schema cannot say; "3" is taken for 3, as everywhere here.
    loose = [positive_data_acceptance, negative_data_rejection]
    case.call_and_validate(base_url=url, excluded_checks=loose)
