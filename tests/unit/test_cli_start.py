"""What starts often starts fast: help in half a second of CPU, and no torch or Ray before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HEAVY = ("torch", "ray", "mlflow", "sqlalchemy", "fastapi", "matplotlib", "numpy")


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one run of it."""
    before = os.times()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_takes_less_than_half_a_second_of_cpu() -> None:
    loop = str(Path(sys.executable).with_name("loop"))
    assert min(cpu_seconds([loop, "--help"]) for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("services.cli", HEAVY),
        ("services.dispatcher", ("torch", "ray", "mlflow", "fastapi")),
        ("services.dispatcher.loop", ("torch", "ray", "mlflow", "fastapi")),
        ("services.api.app", ("torch", "ray", "mlflow", "matplotlib")),
        ("services.stack.supervisor", ("torch", "ray", "mlflow", "fastapi")),
        ("services.settings", HEAVY),
    ],
)
def test_importing_it_loads_nothing_heavy(
    module: str, heavy: tuple[str, ...], run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    found = run_python(f"import sys, {module}; print(' '.join(name for name in {heavy!r} if name in sys.modules))")
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == ""
