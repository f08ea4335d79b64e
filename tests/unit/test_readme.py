"""What the README shows is what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import loopcore

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def calls(code: str) -> list[str]:
    """The calls of a piece of code, without print, which a notebook does not need."""
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return sorted({ast.unparse(node) for node in found if ast.unparse(node.func) != "print"})


def test_its_notebook_is_the_one_that_is_tested() -> None:
    """The docstring of loopcore is run by a test of its own; the README shows the same calls, and its figures besides."""
    [shown] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    tested = (loopcore.__doc__ or "").split("\n\nNames below")[0].partition("\n\n")[2]
    assert calls(shown) == sorted({*calls(tested), "run.figures()"})
    assert len([line for line in shown.splitlines() if line.strip()]) <= 10


def test_its_links_and_pictures_exist() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if not target.startswith("http")]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("line", re.findall(r"^loop (.*?)(?:\s{2,}#.*)?$", README, re.MULTILINE))
def test_its_commands_exist(line: str) -> None:
    from services.cli.main import app

    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    commands = [part.strip().removeprefix("loop ").split()[0] for part in line.split(";")]
    assert [command for command in commands if command not in known] == []


def test_its_examples_exist() -> None:
    named = re.findall(r"examples/\w+\.yaml", README)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
