"""Waiting for a job or a study: a progress bar with rate and time left, or a line a change where nobody watches."""

from __future__ import annotations

import sys
import time
from typing import Any

from services.cli.client import Client, Unreachable
from services.cli.errors import Failure
from services.cli.output import say, span

__all__ = ["PATIENCE_S", "StudyBar", "StudyLines", "ending", "wait_for"]

POLL_S = 0.4  # seconds between two looks at the job
PATIENCE_S = 120.0  # seconds that the API may be away (it starts again by itself)


def wait_for(client: Client, job: int) -> dict[str, Any]:
    """Follows a job to its end, or until it is blocked, and gives it. An interrupt leaves it running and says so."""
    try:
        return _follow(client, job)
    except KeyboardInterrupt:
        say(f"job {job} goes on; see it with `loop job {job}`, end it with `loop cancel {job}`")
        raise


def ending(job: dict[str, Any]) -> Failure | None:
    """The error of a job that did not succeed."""
    number, state, reason = job["id"], job["state"], job["reason"]
    if state == "succeeded":
        return None
    why = f": {reason}" if reason else ""
    if state == "blocked":
        return Failure(f"job {number} cannot start{why}; retry the job it needs, or `loop cancel {number}`")
    if state == "cancelled":
        return Failure(f"job {number} was cancelled; `loop retry {number}` goes on from its newest checkpoint")
    return Failure(f"job {number} failed{why}; see `loop logs {number}`")


def _follow(client: Client, job: int) -> dict[str, Any]:
    show = _Bar() if sys.stderr.isatty() else _Lines()
    away_since: float | None = None
    with show:
        while True:
            try:
                found = client.get(f"/v1/jobs/{job}")
                away_since = None
            except Unreachable:
                now = time.monotonic()
                away_since = away_since or now
                if now - away_since > PATIENCE_S:
                    raise
                time.sleep(POLL_S)
                continue
            if found["state"] in ("succeeded", "failed", "cancelled", "blocked"):
                show.end(found)
                return found
            show.show(found)
            time.sleep(POLL_S)


def _title(job: dict[str, Any]) -> str:
    name = f" {job['name']}" if job["name"] else ""
    return f"job {job['id']} {job['kind']}{name}"


def _state(job: dict[str, Any]) -> str:
    if job["state"] == "queued":
        waits = f"waiting for {job['unmet']} job(s) it needs" if job["unmet"] else "queued"
        return job["reason"] or waits
    if job["cancel_requested_at"] is not None:
        return "stopping"
    lost = f", attempt {job['attempt']}" if job["attempt"] > 1 else ""
    return f"{job['state']}{lost}"


class _Lines:
    """One line whenever the job's state or reason is another."""

    def __init__(self) -> None:
        self._last = ""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, job: dict[str, Any]) -> None:
        line = f"{_title(job)}: {_state(job)}"
        if line != self._last:
            self._last = line
            say(line)

    def end(self, job: dict[str, Any]) -> None:
        self.show(job | {"cancel_requested_at": None})


class _Bar:
    """A progress bar on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[done]}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[note]}", style="dim"),
            console=Console(stderr=True, highlight=False, markup=False),
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, done="", rate="", left="", note="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, job: dict[str, Any]) -> None:
        progress = job["progress"] if job["state"] == "running" else None
        progress = progress or {}
        done, total, unit = progress.get("done"), progress.get("total"), progress.get("unit", "")
        rate, left = progress.get("rate"), progress.get("left_s")
        self._progress.update(
            self._task,
            description=f"{_title(job)}: {_state(job)}",
            total=total,
            completed=done or 0,
            done="" if done is None else f"{done:g}/{total:g} {unit}" if total is not None else f"{done:g} {unit}",
            rate="" if not rate else f"{rate:.3g}/s",
            left="" if left is None else f"{span(left)} left",
            note=progress.get("note") or "",
        )

    def end(self, job: dict[str, Any]) -> None:
        pass


class StudyLines:
    """A line whenever another job of the study has ended."""

    def __init__(self) -> None:
        self._last = ""

    def __enter__(self) -> StudyLines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, study: dict[str, Any]) -> None:
        line = _study_title(study)
        if line != self._last:
            self._last = line
            say(line)


class StudyBar:
    """A progress bar over the jobs of a study, on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}", style="dim"),
            console=Console(stderr=True, highlight=False, markup=False),
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, note="")

    def __enter__(self) -> StudyBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, study: dict[str, Any]) -> None:
        running = dict.fromkeys(one["cell"] for one in study["works"] if one["state"] == "running")
        self._progress.update(
            self._task,
            description=f"study {study['id']} {study['name']}",
            total=sum(study["jobs"].values()),
            completed=_ended(study["jobs"]),
            note=", ".join(running),
        )


def _ended(jobs: dict[str, int]) -> int:
    return sum(count for state, count in jobs.items() if state not in ("queued", "running"))


def _study_title(study: dict[str, Any]) -> str:
    jobs = study["jobs"]
    worse = "".join(f", {jobs[state]} {state}" for state in ("failed", "cancelled", "blocked") if jobs.get(state))
    return f"study {study['id']} {study['name']}: {_ended(jobs)} of {sum(jobs.values())} jobs ended{worse}"
