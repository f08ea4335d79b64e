"""What `deploy/` says, against the code: settings and commands that exist, pinned images, nobody as root."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from services.cli.main import app
from services.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and "s3" not in path.parts)
YAMLS = [path for path in FILES if path.suffix == ".yaml"]
TEXT = {path: path.read_text() for path in FILES}


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(TEXT[path]))


def services() -> dict[str, Any]:
    return documents(DEPLOY / "compose" / "compose.yaml")[0]["services"]


def pods() -> list[dict[str, Any]]:
    """Every pod's spec below kubernetes/."""
    found = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "containers" in node:
                found.append(node)
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    for path in YAMLS:
        walk(documents(path))
    return found


def test_every_yaml_holds_something() -> None:
    assert len(YAMLS) == 6
    assert all(document for path in YAMLS for document in documents(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_loop_variable_is_a_setting(path: Path) -> None:
    known = {f"LOOP_{name.upper()}" for name in Settings.model_fields} | {"LOOP_CONFIG"}
    assert set(re.findall(r"\bLOOP_[A-Z_]*[A-Z]\b", TEXT[path])) <= known


def test_modules_that_are_started_exist() -> None:
    text = re.sub(r"[\[\],\"]", " ", "\n".join(TEXT.values()))
    modules = set(re.findall(r"-m\s+(services\.\w+)", text))
    assert modules == {"services.api", "services.dispatcher"}
    assert all(importlib.util.find_spec(f"{module}.__main__") for module in modules)


def test_loop_commands_exist() -> None:
    group = typer.main.get_command(app)
    found = set(re.findall(r"(?:command|args|CMD):? \[\"?loop\"?, \"?([\w-]+)\"?(?:, ([\w-]+))?\]", "\n".join(TEXT.values())))
    assert ("db", "upgrade") in found
    for name, below in found - {("--help", "")}:
        command = group.commands[name]  # type: ignore[attr-defined]
        assert not below or below in command.commands


def test_images_are_pinned() -> None:
    images = [service["image"] for service in services().values()]
    images += [box["image"] for pod in pods() for box in (*pod["containers"], *pod.get("initContainers", ()))]
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", TEXT[DEPLOY / "Dockerfile"], re.M))
    images += [name for name in re.findall(r"^FROM (\S+)", TEXT[DEPLOY / "Dockerfile"], re.M) if name not in stages]
    assert len(images) > 10
    assert [image for image in images if not re.search(r":(\d+\.\d+\.\d+|\d+\.\d+-|RELEASE\.\d{4})", image)] == []


def test_nobody_runs_as_root() -> None:
    assert [name for name, service in services().items() if int(service.get("user", "0").partition(":")[0]) == 0] == []
    assert len(pods()) == 4
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
    stages = re.split(r"^FROM ", TEXT[DEPLOY / "Dockerfile"], flags=re.M)[2:]  # without the base, which is no target
    assert len(stages) == 3
    assert all(re.search(r"^USER 10001:10001$", stage, re.M) for stage in stages)
    units = [text for path, text in TEXT.items() if path.suffix == ".service"]
    assert len(units) == 4
    assert all("\nUser=loop\n" in unit for unit in units)


def test_every_install_keeps_to_the_constraints() -> None:
    installs = re.findall(r"pip install .*", TEXT[DEPLOY / "Dockerfile"])
    assert len(installs) == 3
    assert all("-c constraints.txt" in line for line in installs)


def test_ray_is_the_version_of_the_constraints() -> None:
    pinned = re.search(r"^ray==(.*)$", (DEPLOY.parent / "constraints.txt").read_text(), re.M)
    assert pinned
    assert documents(DEPLOY / "kubernetes" / "raycluster.yaml")[0]["spec"]["rayVersion"] == pinned[1]


def test_only_loopback_is_published() -> None:
    ports = [port for service in services().values() for port in service.get("ports", ())]
    assert ports == ["127.0.0.1:8700:8080"]
    assert not [document for path in YAMLS for document in documents(path) if document.get("kind") in ("Service", "Ingress")]
