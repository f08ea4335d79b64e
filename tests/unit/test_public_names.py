"""The public surface of loopcore: what is listed is what there is, where a type checker looks and where Python looks."""

from __future__ import annotations

import ast
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from pkgutil import iter_modules

import pytest

import loopcore


def names_for_type_checkers() -> dict[str, str]:
    """Name to module, from the imports that only a type checker sees."""
    tree = ast.parse(Path(loopcore.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: node.module or ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }  # fmt: skip


def test_the_list_is_sorted_and_what_type_checkers_see() -> None:
    assert sorted(loopcore.__all__) == sorted(names_for_type_checkers())
    assert len(set(loopcore.__all__)) == len(loopcore.__all__)


@pytest.mark.parametrize("name", loopcore.__all__)
def test_a_name_is_the_one_of_its_home(name: str) -> None:
    home = import_module(names_for_type_checkers()[name])
    assert getattr(loopcore, name) is getattr(home, name)
    assert name in home.__all__
    assert name in dir(loopcore)


def test_every_error_is_public() -> None:
    errors = import_module("loopcore.errors")
    assert set(errors.__all__) <= set(loopcore.__all__)


def test_every_instrument_is_exported() -> None:
    """What measures, sweeps or checks in a module of the package is a name of the package, with the class of its result."""
    package = import_module("loopcore.instruments")
    homes = [import_module(f"loopcore.instruments.{found.name}") for found in iter_modules(package.__path__)]
    defined = {
        name: home for home in homes for name in home.__all__ if getattr(vars(home)[name], "__module__", "") == home.__name__
    }
    measuring = {name for name in defined if name.startswith(("measure_", "sweep_", "check_"))}
    results = {get_annotations(getattr(defined[name], name))["return"] for name in measuring}
    assert {"measure_kappa", "sweep_growth", "check_coordinates", "measure_step", "measure_tau"} <= measuring
    assert measuring | (results & set(defined)) <= set(package.__all__)
    assert set(package.__all__) - {"TAIL_METRICS"} <= set(defined)
    assert all(getattr(package, name) is getattr(defined[name], name) for name in set(package.__all__) & set(defined))


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="module 'loopcore' has no attribute 'Trainer'"):
        _ = loopcore.Trainer  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError):
        from loopcore import import_module_that_is_not_there  # noqa: F401 # pyright: ignore


@pytest.mark.parametrize(
    "code",
    [
        "import loopcore; dir(loopcore)",
        "import loopcore.specs",
        "from loopcore import TrainSpec, WordTask, LoopcoreError, Halting, multipliers, Stages",
    ],
)
def test_names_without_tensors_load_no_torch(run_python, code: str) -> None:
    done = run_python(f"import sys\n{code}\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_the_notebook_of_the_docstring_runs(run_python) -> None:
    """As it stands there, on a smaller contract."""
    lines = (loopcore.__doc__ or "").split("\n\n")
    code = "\n".join([lines[1], lines[2]]).replace("TrainSpec()", "TrainSpec(steps=3, batch=4, contract={'lengths': (2,)})")
    done = run_python(code.replace(".speed  #", ".undecided  #"))
    assert done.returncode == 0, done.stderr
