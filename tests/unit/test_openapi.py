"""The OpenAPI document that is checked in is the one the application gives."""

from __future__ import annotations

import json
from pathlib import Path

from services.cli.reference import openapi_document

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api" / "openapi.json"


def test_the_document_checked_in_is_the_applications() -> None:
    assert DOCUMENT.read_text() == openapi_document(), "docs/api/openapi.json is stale: run `make docs`"


def test_every_operation_has_a_name_a_summary_and_the_shape_of_its_errors() -> None:
    document = json.loads(DOCUMENT.read_text())
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    for operation in operations:
        assert operation["description"], operation["operationId"]
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                schema = answer["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (operation["operationId"], status)


def test_a_job_spec_is_described_field_by_field() -> None:
    schemas = json.loads(DOCUMENT.read_text())["components"]["schemas"]
    kinds = schemas["SubmitRequest"]["properties"]["spec"]["discriminator"]["mapping"]
    assert set(kinds) == {"train", "probe", "tune", "register", "serve"}
    assert schemas["OptimizerSpec"]["properties"]["lr"]["description"] == "Base learning rate."
    assert schemas["TrainJob"]["additionalProperties"] is False
