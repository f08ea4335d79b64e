"""Where a figure comes from: the commit and what was changed since, seen in repositories made for the test."""

from __future__ import annotations

import json
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from services.provenance import collect, git_state


def git(directory: Path, *words: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = {f"GIT_{role}_{what}": "tester" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**clean, **who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    asked = subprocess.run(
        ["git", "-C", str(directory), *words], check=True, capture_output=True, text=True, timeout=30, env=environment
    )
    return asked.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "code.py").write_text("a = 1\n")
    (tmp_path / ".gitignore").write_text("*.log\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_a_clean_tree_has_a_commit_and_no_digest(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    (repository / "noise.log").write_text("ignored")
    assert git_state(repository) == (head, None)
    assert git_state(repository / "sub") == (head, None)


def test_the_digest_is_that_of_the_changes(repository: Path) -> None:
    def change(name: str, text: str) -> str | None:
        (repository / name).write_text(text)
        return git_state(repository / "sub")[1]

    edited = change("sub/code.py", "a = 2\n")
    assert edited is not None
    assert len(edited) == 64
    other = change("sub/code.py", "a = 3\n")
    added = change("new näme.py", "b = 1\n")
    filled = change("new näme.py", "b = 2\n")
    assert len({edited, other, added, filled}) == 4
    (repository / "new näme.py").unlink()
    assert change("sub/code.py", "a = 2\n") == edited
    git(repository, "add", ".")
    assert git_state(repository)[1] == edited
    assert change("sub/code.py", "a = 1\n") is None


def test_a_broken_link_does_not_matter(repository: Path) -> None:
    (repository / "link").symlink_to("nowhere")
    assert git_state(repository)[1] is not None


def test_outside_a_repository_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path / "missing") == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == (None, None)
    assert collect(tmp_path)["commit"] is None


def test_a_repository_without_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) == (None, None)


def test_git_variables_of_a_hook_do_not_mislead(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert git_state(repository) == (head, None)


def test_all_of_it_is_json_and_names_versions(repository: Path) -> None:
    found = collect(repository)
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == {"commit", "dirty", "packages", "python", "platform", "host", "cpus"}
    assert found["cpus"] == os.cpu_count()
    assert found["packages"]["torch"] == metadata.version("torch")
    assert found["packages"]["loopcore"] == metadata.version("loopcore")


def test_it_loads_none_of_what_it_names(run_python: Any) -> None:
    done = run_python(
        "import sys; from services.provenance import collect; collect(); "
        "print(sorted({'torch', 'ray', 'mlflow', 'numpy', 'sqlalchemy'} & sys.modules.keys()))"
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
