"""Eight processes at one queue: every job is done once, nobody meets a locked database, and a killed process loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from services.registry import AttemptOutcome, IllegalTransition, JobState, Registry, migrate
from tests.integration.registries import submission

PROCESSES = 8
JOBS = 5_000
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def workers(url: str, count: int, *, lease_s: float, claims: int | None = None) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ready and wait to be told to begin; the first stops at its claim number `claims`, if given."""
    command = [sys.executable, "-m", "tests.integration.queue_worker", url]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    last = [[str(claims)] if claims and at == 0 else [] for at in range(count)]
    started = [subprocess.Popen([*command, f"w{at}", str(lease_s), *last[at]], cwd=ROOT, **streams) for at in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def begin(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return json.loads(output)


def test_each_of_5000_jobs_is_done_once_by_eight_processes(registry_url: str) -> None:
    migrate(registry_url)
    with Registry.open(registry_url) as registry:
        registry.queue.submit_many([submission(priority=at % 3) for at in range(JOBS)])
        with workers(registry_url, PROCESSES, lease_s=90.0) as processes:
            begin(processes)
            reports = [finished(process) for process in processes]
        claimed = Counter(tuple(fence) for report in reports for fence in report["claimed"])
        assert claimed == {(number, 1): 1 for number in range(1, JOBS + 1)}
        assert [report["lost"] for report in reports] == [[]] * PROCESSES
        assert min(len(report["claimed"]) for report in reports) > 0
        assert registry.queue.counts() == {state: JOBS if state is JobState.SUCCEEDED else 0 for state in JobState}


def test_a_killed_process_loses_nothing(registry_url: str) -> None:
    migrate(registry_url)
    with Registry.open(registry_url) as registry:
        registry.queue.submit_many([submission() for _ in range(400)])
        with workers(registry_url, 4, lease_s=3.0, claims=20) as processes:
            killed = processes[0]
            begin([killed])
            assert killed.stdout is not None
            held = int(killed.stdout.readline().removeprefix("holding "))
            begin(processes[1:])
            killed.kill()
            assert killed.wait() == -9
            for process in processes[1:]:
                finished(process)
        assert registry.queue.counts() == {state: 400 if state is JobState.SUCCEEDED else 0 for state in JobState}
        # On a busy machine a lease of 3 s may run out under a process that lives, so others may have been lost as well.
        for number in range(1, 401):
            outcomes = [attempt.outcome for attempt in registry.queue.attempts(number)]
            assert outcomes == [AttemptOutcome.LOST] * (len(outcomes) - 1) + [AttemptOutcome.SUCCEEDED]
            assert registry.queue.job(number).losses == len(outcomes) - 1
        assert registry.queue.attempts(held)[0].dispatcher == "w0"
        assert registry.queue.job(held).losses >= 1


@pytest.mark.parametrize("needed", [1, 3])
def test_many_ends_and_submissions_around_the_same_jobs(registry_url: str, needed: int) -> None:
    """Jobs that need others are submitted, cancelled and retried while those others end: no deadlock, no wrong count."""
    migrate(registry_url)
    errors: list[BaseException] = []
    with Registry.open(registry_url) as registry:
        roots = [answer.job.id for answer in registry.queue.submit_many([submission(error_budget=0) for _ in range(40)])]

        def guarded(work: Any) -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        def end_all() -> None:
            while (job := registry.queue.claim("d", cpus=1, gpus=0, memory_gb=0)) is not None:
                if job.id % 5:
                    registry.queue.succeed(job.fence)
                else:
                    registry.queue.fail(job.fence, "boom")

        def submit_dependants() -> None:
            for at in range(0, 40, 2):
                needs = tuple(roots[(at + offset) % 40] for offset in range(needed))
                made = registry.queue.submit(submission(needs=needs)).job
                registry.queue.submit(submission(needs=(made.id, *needs)))
                if at % 8 == 0:
                    # Either may come too late: the job may be running, or have ended, by then.
                    with suppress(IllegalTransition):
                        registry.queue.cancel(made.id)
                        registry.queue.retry(made.id)

        threads = [
            threading.Thread(target=guarded, args=(work,)) for work in (end_all, submit_dependants, end_all, submit_dependants)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        end_all()
        bad = {JobState.FAILED, JobState.CANCELLED, JobState.BLOCKED}
        for job in registry.queue.jobs(limit=1000):
            states = [registry.queue.job(need).state for need in registry.queue.needs(job.id)]
            if not job.ended:
                assert job.unmet == sum(state is not JobState.SUCCEEDED for state in states)
                assert (job.state is JobState.BLOCKED) == any(state in bad for state in states)
            if job.attempt:
                assert all(state is JobState.SUCCEEDED for state in states)
        assert not registry.queue.waiting()
