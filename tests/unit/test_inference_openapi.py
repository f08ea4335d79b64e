"""What is written about the service is what it is: the OpenAPI document, the metrics, the application without Ray."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loopcore.batching import Stats
from services.cli.reference import inference_document
from services.inference.metrics import Metrics

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENT = DOCS / "api" / "inference-openapi.json"


def test_the_document_checked_in_is_the_applications() -> None:
    assert DOCUMENT.read_text() == inference_document(), "docs/api/inference-openapi.json is stale: run `make docs`"


def test_every_operation_has_a_name_a_summary_and_the_shape_of_its_errors() -> None:
    document = json.loads(DOCUMENT.read_text())
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    for operation in operations:
        assert operation["description"], operation["operationId"]
        for status, answer in operation["responses"].items():
            assert status != "422"
            if int(status) >= 400:
                schema = answer["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (operation["operationId"], status)


def test_an_error_has_the_fields_that_the_document_names() -> None:
    from services.inference.errors import body_of
    from services.problems import Problem

    schemas = json.loads(DOCUMENT.read_text())["components"]["schemas"]
    body = body_of([Problem("wrong", "right", "do so", "inputs")])
    assert set(body) == set(schemas["ErrorBody"]["properties"])
    assert set(body["problems"][0]) == set(schemas["ProblemBody"]["properties"])


def test_every_metric_is_described_in_the_docs_with_its_labels() -> None:
    metrics = Metrics()
    metrics.observe("m", "1", Stats().to_json(), 0, 0)
    there: dict[str, set[str]] = {}
    for metric in metrics._registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        there[name] = {label for sample in metric.samples for label in sample.labels} - {"le"}
    rows = re.findall(r"^\| `(loop_inference_\w+)` \| ([\w, ]+) \|", (DOCS / "serving.md").read_text(), re.MULTILINE)
    told = {name: set(labels.split(", ")) for name, labels in rows}
    assert set(told) == set(there)
    for name, labels in there.items():
        assert labels <= told[name], name  # a counter that has counted nothing shows no label


def test_an_application_needs_no_ray(run_python: Callable[..., Any]) -> None:
    ran = run_python(
        "import sys; from services.inference.app import openapi_document; openapi_document();"
        "print([m for m in ('ray', 'torch', 'mlflow') if m in sys.modules])"
    )
    assert ran.stdout.strip() == "[]", ran.stderr
