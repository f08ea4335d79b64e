"""The house has four floors and an import only ever goes down; proven from the imports themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The first prefix that fits a module decides its floor, so the narrower ones stand first.
FLOORS: tuple[tuple[str, int], ...] = (
    ("services.registry", 2),
    ("services.tracking", 2),
    ("services.settings", 2),
    ("services.studies", 2),
    ("services.provenance", 2),
    ("services.problems", 2),
    ("services", 4),
    ("workers", 3),
    ("loopcore", 1),
)

# Third-party packages that a part never imports, directly or through what it imports inside the house.
FORBIDDEN: tuple[tuple[str, frozenset[str]], ...] = (
    ("loopcore.specs", frozenset({"torch", "ray", "mlflow", "sqlalchemy", "fastapi"})),
    ("loopcore.studies", frozenset({"torch", "ray", "mlflow", "sqlalchemy", "fastapi"})),
    ("loopcore.figures", frozenset({"torch", "ray", "mlflow", "sqlalchemy", "fastapi"})),
    ("loopcore.reports", frozenset({"torch", "ray", "mlflow", "sqlalchemy", "fastapi"})),
    ("loopcore", frozenset({"ray", "mlflow", "sqlalchemy", "fastapi"})),
    ("services.registry", frozenset({"ray", "fastapi", "torch"})),
    ("services.tracking", frozenset({"ray", "fastapi", "torch"})),
    ("services.settings", frozenset({"ray", "fastapi", "torch"})),
    ("services.provenance", frozenset({"ray", "fastapi", "torch"})),
    ("services.studies", frozenset({"ray", "fastapi", "torch"})),
    ("services.problems", frozenset({"ray", "fastapi", "torch"})),
)

HOUSE = ("loopcore", "workers", "services")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    return {module_name(path): path for top in HOUSE for path in sorted((ROOT / top).rglob("*.py"))}


def waits_for_a_call(node: ast.AST) -> bool:
    """Whether the node's insides do not run when the module is imported."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def imports(path: Path, *, at_import_time: bool = False) -> Iterator[tuple[int, str]]:
    """Absolute names a file imports, with their lines; `at_import_time` leaves out those in functions and type checks."""
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                yield child.lineno, ".".join([*base, *([child.module] if child.module else [])])
                # `from services import registry` imports a module too.
                yield from (
                    (child.lineno, ".".join([*base, *([child.module] if child.module else []), alias.name]))
                    for alias in child.names
                )
            elif at_import_time and waits_for_a_call(child):
                continue
            else:
                yield from visit(child)

    yield from visit(ast.parse(path.read_text(), str(path)))


def floor(module: str) -> int | None:
    return next((number for prefix, number in FLOORS if module == prefix or module.startswith(prefix + ".")), None)


def test_an_import_only_goes_down() -> None:
    upward = [
        f"{path.relative_to(ROOT)}:{line} (floor {floor(name)}) imports {imported} (floor {floor(imported)})"
        for name, path in modules().items()
        for line, imported in imports(path)
        if (floor(imported) or 0) > (floor(name) or 0)
    ]
    assert not upward, "\n".join(upward)


def test_services_never_import_workers() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for name, path in modules().items()
        if name.split(".")[0] == "services"
        for line, imported in imports(path)
        if imported.split(".")[0] == "workers"
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("part", "packages"), FORBIDDEN, ids=[part for part, _ in FORBIDDEN])
def test_a_floor_keeps_to_its_packages(part: str, packages: frozenset[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for name, path in modules().items()
        if name == part or name.startswith(part + ".")
        for line, imported in imports(path)
        if imported.split(".")[0] in packages
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", ["loopcore.specs", "loopcore.studies", "loopcore.reports"])
def test_data_and_arithmetic_reach_no_torch_through_others(part: str) -> None:
    """Follows what is imported at import time: a spec that imports a module that imports torch would be slow all the same."""
    known = modules()
    waiting = [name for name in known if name == part or name.startswith(part + ".")]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for line, imported in imports(known[name], at_import_time=True):
            assert imported.split(".")[0] != "torch", f"{name} (reached from {part}) imports torch at line {line}"
            if imported in known:
                waiting.append(imported)


def test_no_circles_among_modules() -> None:
    """No module is reached again from what it imports at import time."""
    known = modules()
    edges = {
        name: {imported for _, imported in imports(path, at_import_time=True) if imported in known and imported != name}
        for name, path in known.items()
    }
    state: dict[str, int] = {}
    trail: list[str] = []

    def visit(name: str) -> None:
        state[name] = 1
        trail.append(name)
        for imported in sorted(edges[name]):
            # A package's own __init__ gathers what its modules define; they do not import it back.
            if state.get(imported) == 1:
                pytest.fail("circle of imports: " + " -> ".join([*trail[trail.index(imported) :], imported]))
            if imported not in state:
                visit(imported)
        trail.pop()
        state[name] = 2

    for name in known:
        if name not in state:
            visit(name)
    assert set(state) == set(known)


def test_every_module_has_a_floor() -> None:
    assert [name for name in modules() if floor(name) is None and name not in ("services",)] == []


def test_the_reader_finds_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every test above could pass on nothing."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    source = tmp_path / "loopcore" / "tasks" / "words.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "import ray.tune\nfrom services import registry\nfrom .text import Text\ndef f():\n    from workers.lease import held\n"
    )
    assert {"ray.tune", "services.registry", "loopcore.tasks.text", "workers.lease"} <= {name for _, name in imports(source)}
    assert "workers.lease" not in {name for _, name in imports(source, at_import_time=True)}
