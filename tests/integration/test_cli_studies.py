"""`loop study`, `studies` and `report` against a real API and registry; this test plays the workers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loopcore.studies import find_study
from services.api.app import create_app
from services.cli.main import _run
from services.registry import JobState, Measurement, Registry, RunState, migrate
from services.settings import Settings
from tests.serving import served
from tests.unit.made_up import speed_rows, train_figures

Out = Callable[..., tuple[int, str, str]]
CELLS = {cell.name: cell for cell in find_study("budget-law").cells("smoke")}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The registry of an API that the commands find."""
    settings = Settings(home=tmp_path)
    migrate(settings.registry_url)
    with served(create_app(settings)) as client, Registry.open(settings.registry_url) as opened:
        monkeypatch.setenv("LOOP_API_URL", str(client.base_url))
        monkeypatch.setenv("LOOP_HOME", str(tmp_path))
        yield opened


@pytest.fixture
def loop(capsys: pytest.CaptureFixture[str]) -> Out:
    """Runs a command; gives its exit code and what it wrote."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = _run(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def work_off(registry: Registry, *, fail_first: bool = False) -> None:
    """Every training learns its task and every probe finds v = demand."""
    while (job := registry.queue.claim("d", cpus=1, gpus=0, memory_gb=1)) is not None:
        cell = CELLS[(job.name or "").split()[0]]
        if fail_first:
            fail_first = False
            registry.queue.fail(job.fence, "Traceback: boom")
            continue
        run = registry.records.open_run(job.fence, kind=job.kind, spec=job.spec)
        figures = train_figures(cell.train, 1.0) if job.kind == "train" else {}
        if job.kind == "probe":
            rows = speed_rows(float(cell.axes["demand"]))
            found = [Measurement(row.instrument, dict(row.axes), row.value, row.low, row.high) for row in rows]
            registry.records.measure(job.fence, run.id, found)
        registry.records.finish_run(job.fence, run.id, RunState.FINISHED, figures)
        registry.queue.succeed(job.fence, figures)


def wait_and_work_off(registry: Registry, fail_first: bool = True) -> None:
    ends = time.monotonic() + 30
    while not registry.queue.counts()[JobState.QUEUED] and time.monotonic() < ends:
        time.sleep(0.05)
    work_off(registry, fail_first=fail_first)


def test_findings_are_listed_before_anything_was_started(registry: Registry, loop: Out) -> None:
    code, out, _ = loop("studies", "--json")
    found = json.loads(out)
    assert code == 0
    assert len(found["findings"]) == 32
    assert {one["verdict"] for one in found["findings"]} == {None}
    assert found["studies"] == []
    code, out, err = loop("studies")
    assert (code, err) == (0, "no study was started\n")
    assert "not started" in out


def test_a_study_runs_to_its_report(registry: Registry, loop: Out, tmp_path: Path) -> None:
    code, out, _ = loop("study", "budget-law")
    assert (code, out) == (0, "study 1: 24 jobs (24 new); see `loop report 1`\n")
    worker = threading.Thread(target=work_off, args=(registry,))
    worker.start()
    code, out, err = loop("study", "budget-law", "--scale", "smoke", "--wait", "--json")
    worker.join()
    assert code == 0, err
    report = json.loads(out)
    assert (report["study"], report["scale"], report["id"]) == ("budget-law", "smoke", 1)
    law = report["findings"][0]
    assert law.keys() >= {"id", "measured", "low", "high", "published", "verdict", "seeds", "seconds"}
    assert (law["id"], law["verdict"], law["seeds"]) == ("1a", "shown", 4)
    assert law["measured"] == pytest.approx(1.0)
    assert "24 of 24 jobs ended" in err

    code, out, _ = loop("report", "1", "--out", str(tmp_path / "page"), "--name", "law")
    assert code == 0
    written = [Path(line) for line in out.splitlines()]
    assert {path.suffix for path in written} == {".html", ".md", ".json"}
    assert json.loads(next(path for path in written if path.suffix == ".json").read_text())["findings"][0]["verdict"] == "shown"
    code, out, _ = loop("report", "1")
    assert code == 0
    assert "shown" in out
    code, out, _ = loop("studies", "--json")
    assert json.loads(out)["findings"][0]["verdict"] == "shown"
    assert json.loads(out)["studies"][0]["jobs"] == {"succeeded": 24}


def test_a_failed_job_is_told_and_tried_again_by_the_next_start(registry: Registry, loop: Out) -> None:
    loop("study", "budget-law")
    work_off(registry, fail_first=True)
    worker = threading.Thread(target=wait_and_work_off, args=(registry, False))
    worker.start()
    code, out, err = loop("study", "budget-law", "--wait")
    worker.join()
    assert code == 0, err
    assert "failed" not in out
    assert err.startswith("study 1: 24 jobs (1 tried again, 23 from before)")


def test_a_study_whose_jobs_fail_ends_with_its_report_and_exit_code_1(registry: Registry, loop: Out) -> None:
    worker = threading.Thread(target=wait_and_work_off, args=(registry,))
    worker.start()
    code, out, err = loop("study", "budget-law", "--wait")
    worker.join()
    assert code == 1
    assert "2 of the jobs of study 1 did not succeed, first job 1 (free/S3/n8/T16/L1/s0): failed" in err
    assert "Left out" in out


def test_a_cancelled_study_goes_on_where_it_was(registry: Registry, loop: Out) -> None:
    loop("study", "budget-law")
    job = registry.queue.claim("d", cpus=1, gpus=0, memory_gb=1)
    assert job is not None
    registry.queue.succeed(job.fence, {})
    code, out, _ = loop("study", "budget-law", "--cancel")
    assert (code, out) == (0, "study 1: 23 cancelled, 1 succeeded\n")
    assert registry.queue.counts()[JobState.CANCELLED] == 23
    code, out, _ = loop("study", "budget-law", "--json")
    answer = json.loads(out)
    assert (answer["created"], answer["retried"], answer["kept"], answer["study"]["id"]) == (0, 23, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("study", "budget"), "no study is called 'budget'"),
        (("study", "budget-law", "--scale", "huge"), "scale"),
        (("study", "budget-law", "--groups", "S3,Q8"), "Q8"),
        (("study", "budget-law", "--demands", "0.001"), "expected a demand from 1/64 to 32"),
        (("study", "budget-law", "--demands", "half"), "is not a list of numbers"),
        (("study", "budget-law", "--seeds", "0"), "--seeds"),
        (("study", "walls", "--groups", "S3"), "about groups of its own"),
        (("study", "budget-law", "--cancel"), "no study budget-law was started"),
        (("report", "7"), "there is no study 7"),
    ],
)
def test_wrong_input_queues_nothing(registry: Registry, loop: Out, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = loop(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert registry.queue.counts()[JobState.QUEUED] == 0
    assert registry.studies.studies() == []


def test_a_folder_that_cannot_be_written_is_one_line(registry: Registry, loop: Out, tmp_path: Path) -> None:
    loop("study", "budget-law")
    (tmp_path / "file").write_text("")
    code, _, err = loop("report", "1", "--out", str(tmp_path / "file"))
    assert code == 1
    assert err.startswith("loop: the report could not be written to")
