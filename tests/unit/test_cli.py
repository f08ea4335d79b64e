"""The command line by itself: spec files and changes to them, how mistakes end, what is printed, the pages made from it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loopcore.specs import parse_job
from services.cli.errors import UserError
from services.cli.main import _run
from services.cli.output import number, span
from services.cli.reference import cli_page, settings_page, specs_page
from services.cli.specfile import override, read_spec
from services.cli.waiting import ending

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("LOOP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LOOP_HOME", str(tmp_path / "home"))


def spec_of(text: str, tmp_path: Path, *changes: str, kind: str | None = None) -> dict:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return read_spec(str(path), changes, kind=kind)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_valid_job(path: Path) -> None:
    assert parse_job(read_spec(str(path), [])).name or path.name in ("register.yaml", "serve.yaml")


def test_there_is_an_example_of_every_kind() -> None:
    from loopcore.specs import JOB_KINDS

    assert {read_spec(str(path), [])["kind"] for path in EXAMPLES} == set(JOB_KINDS)


@pytest.mark.parametrize(
    "page", [("cli.md", cli_page), ("specs.md", specs_page), ("settings.md", settings_page)], ids=lambda p: p[0]
)
def test_a_page_made_from_the_code_is_not_stale(page: tuple) -> None:
    name, make = page
    assert (ROOT / "docs" / name).read_text() == make(), f"docs/{name} is stale: run `make docs`"


def test_numbers_are_numbers_and_dates_are_text(tmp_path: Path) -> None:
    found = spec_of("a: 1e-3\nb: .5\nc: 2026-01-01\nd: 10\ne: -2.5E+3\nf: yes\ng: 1_000\nh: 1.2.3\ni: '1e-3'\n", tmp_path)
    assert found == {
        "a": 1e-3,
        "b": 0.5,
        "c": "2026-01-01",
        "d": 10,
        "e": -2500.0,
        "f": True,
        "g": 1000,
        "h": "1.2.3",
        "i": "1e-3",
    }
    assert [type(found[name]) for name in "ad"] == [float, int]


def test_changes_go_to_any_depth_and_are_yaml(tmp_path: Path) -> None:
    found = spec_of(
        "kind: train\noptimizer:\n  lr: 1\n", tmp_path, "optimizer.lr=2e-3", "contract.lengths=[2, 4]", "name=", "a.b.c=x=y"
    )
    assert found == {
        "kind": "train",
        "optimizer": {"lr": 2e-3},
        "contract": {"lengths": [2, 4]},
        "name": None,
        "a": {"b": {"c": "x=y"}},
    }


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("optimizer.lr", "cannot read 'optimizer.lr'; expected a change of the form field=value, such as optimizer.lr=1e-3"),
        ("=3", "cannot read '=3'; expected a change of the form field=value, such as optimizer.lr=1e-3"),
        ("a..b=3", "cannot read 'a..b=3'; expected a change of the form field=value, such as optimizer.lr=1e-3"),
        ("seed.x=3", "cannot set seed.x: seed holds 1; expected a mapping of fields there"),
        ("a=[1", "the value of a is no YAML: expected ',' or ']', but got '<stream end>'; expected lines such as `kind: train`"),
    ],
)
def test_a_change_that_cannot_be_read_says_what_one_looks_like(change: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        override({"seed": 1}, change)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- 1\n- 2\n", "holds a list; expected a mapping of fields, such as `kind: train`"),
        ("train\n", "holds text; expected a mapping of fields, such as `kind: train`"),
        ("", "holds nothing; expected a mapping of fields, such as `kind: train`"),
        ("kind: train\n a: [\n", "is no YAML, line 2, column 3: mapping values are not allowed here; expected lines such as"),
        (
            "kind: train\nseed: 1\nseed: 2\n",
            "is no YAML, line 3, column 1: the field 'seed' stands twice; expected lines such as",
        ),
        ("a: !!python/object/apply:os.system [true]\n", "is no YAML"),
    ],
)
def test_a_file_that_holds_no_spec_says_what_it_holds(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        spec_of(text, tmp_path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file nowhere\.yaml; expected the path of a YAML file"):
        read_spec("nowhere.yaml", [])
    with pytest.raises(UserError, match="Is a directory; expected the path of a YAML file"):
        read_spec(str(tmp_path), [])
    (tmp_path / "weights").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="it is no UTF-8 text"):
        read_spec(str(tmp_path / "weights"), [])


def test_tune_takes_studies_only(tmp_path: Path) -> None:
    assert spec_of("rules: [standard]\n", tmp_path, kind="tune")["kind"] == "tune"
    with pytest.raises(UserError, match="is of kind 'train'; expected 'tune': use `loop submit` for it"):
        spec_of("kind: train\n", tmp_path, kind="tune")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["submt"], "No such command 'submt'"),
        (["job", "twelve"], "Invalid value for 'job'"),
        (["job", "0"], "Invalid value for 'job'"),
        (["submit"], "Missing argument 'FILE'"),
        (["jobs", "--stat", "queued"], "No such option: --stat"),
        (["jobs"], "no stack of "),
        (["run", "1", "--csv"], "--csv prints curves or measurements"),
        (["promote", "1", "s3"], "expected a model as name@alias, for example s3@champion, got 's3'"),
        (["predict", "s3@a", "1 2", "--halt", "sometimes"], "--halt sometimes: kind: got 'sometimes'; expected 'rule', 'fixed'"),
        (["predict", "s3@a", "1 2", "--halt", "fixed"], "the rule 'fixed' takes loops"),
        (["predict", "s3@a", "1 2", "--halt", "fixed:0"], "--halt fixed:0: loops: got '0'; expected at least 1"),
    ],
)
def test_a_mistake_is_one_line_on_standard_error_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(arguments) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert err.startswith("loop: ")
    assert len(err.splitlines()) == 1
    assert out == ""


def test_a_bad_setting_is_a_users_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOOP_API_PORT", "x")
    assert _run(["jobs"]) == 2
    assert capsys.readouterr().err == "loop: setting api_port (LOOP_API_PORT): got 'x'; expected a whole number\n"


def test_an_api_that_does_not_answer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: object
) -> None:
    port = free_port()  # type: ignore[operator]
    monkeypatch.setenv("LOOP_API_URL", f"http://127.0.0.1:{port}")
    assert _run(["jobs"]) == 1
    assert capsys.readouterr().err.startswith(f"loop: the API at http://127.0.0.1:{port} does not answer; see that LOOP_API_URL")


def test_a_fault_of_the_program_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from services.cli import client

    def broken() -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(client, "open_client", broken)
    assert _run(["jobs"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("loop: RuntimeError: nobody thought of this; this is a fault of loop itself")
    assert "Traceback" not in err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    import subprocess

    loop = Path(sys.executable).with_name("loop")
    found = subprocess.run(f"{loop} --help | head -n 1", shell=True, capture_output=True, text=True, check=False)
    assert found.stderr == ""


def test_help_and_version_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["--help"]) == 0
    assert "submit" in capsys.readouterr().out
    assert _run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (45, "45 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, shown: str) -> None:
    assert span(seconds) == shown


def test_numbers_have_four_digits() -> None:
    assert [number(value) for value in (1, 0.123456, None, True, "x", 1e-9)] == ["1", "0.1235", "", "True", "x", "1e-09"]


@pytest.mark.parametrize(
    ("state", "reason", "told"),
    [
        ("succeeded", None, None),
        ("failed", "lost 6 times", "job 3 failed: lost 6 times; see `loop logs 3`"),
        ("cancelled", None, "job 3 was cancelled; `loop retry 3` goes on from its newest checkpoint"),
        ("blocked", "job 2 failed", "job 3 cannot start: job 2 failed; retry the job it needs, or `loop cancel 3`"),
    ],
)
def test_how_a_job_ended_is_told_in_one_line(state: str, reason: str | None, told: str | None) -> None:
    failure = ending({"id": 3, "state": state, "reason": reason})
    assert (str(failure) if failure else None) == told
