"""Runs in MLflow: opened once, their curves in batches, ended whatever happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.registry import CurvePoint
from services.tracking.store import Store, experiment

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun
    from mlflow.tracking import MlflowClient

__all__ = ["METRICS_A_CALL", "Runs"]

METRICS_A_CALL = 1000  # MLflow's own limit
PARAMS_A_CALL = 100  # MLflow's own limit
TAGS_A_CALL = 100  # MLflow's own limit
PARAM_LENGTH = 6000  # characters that MLflow keeps of a parameter
TAG_LENGTH = 5000  # and of a tag
RUN_TAG = "loop.run"  # says which registry run an MLflow run mirrors


class Runs(Store):
    """The part of the adapter that mirrors the registry's runs."""

    def start_run(
        self,
        name: str,
        params: dict[str, Any],
        tags: dict[str, str],
        *,
        key: str,
        parent: str | None = None,
        started_at: float = 0.0,
    ) -> str:
        """The MLflow run tagged with `key`: the one that is there, or a new one. Gives its id.

        Asking twice, also from two attempts at one job, gives one run. `parent` is the MLflow run it is shown under.
        """

        def work(client: MlflowClient) -> str:
            place = experiment(client, self.settings)
            found = client.search_runs([place], f"tags.`{RUN_TAG}` = '{key}'", max_results=1)
            if found:
                run = found[0]
                if run.info.status != "RUNNING":
                    client.update_run(run.info.run_id, status="RUNNING")
                if not params.keys() <= run.data.params.keys():  # a process that died just after it had made the run
                    _log_params(client, run.info.run_id, params)
                return run.info.run_id
            every = dict(tags) | {RUN_TAG: key} | ({"mlflow.parentRunId": parent} if parent else {})
            at = round(started_at * 1000) or None
            run = client.create_run(place, start_time=at, tags=every, run_name=name)
            _log_params(client, run.info.run_id, params)
            return run.info.run_id

        return self.call(f"open run {name}", work)

    def log_points(self, mlflow_run: str, points: Sequence[CurvePoint], *, origin_ms: int) -> None:
        """Adds curve points, METRICS_A_CALL a call. A value that was not finite shows as NaN.

        The time of a point is `origin_ms` plus its step: MLflow counts points with one time, step and value as one, so what is
        sent twice is there once.
        """
        from mlflow.entities import Metric

        metrics = [
            Metric(point.name, float("nan") if point.value is None else point.value, origin_ms + point.step, point.step)
            for point in points
        ]
        for at in range(0, len(metrics), METRICS_A_CALL):
            batch = metrics[at : at + METRICS_A_CALL]
            self.call("log a curve", lambda client, batch=batch: client.log_batch(mlflow_run, metrics=batch))

    def log_figures(self, mlflow_run: str, figures: dict[str, Any], *, step: int = 0, origin_ms: int = 0) -> None:
        """Final numbers as metrics `final.NAME`, all else as tags."""
        points: list[CurvePoint] = []
        words: dict[str, str] = {}
        for name, value in figures.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                points.append(CurvePoint(step, f"final.{name}", float(value)))
            elif value is not None:
                words[f"final.{name}"] = str(value)[:TAG_LENGTH]
        self.log_points(mlflow_run, points, origin_ms=origin_ms)
        self.set_tags(mlflow_run, words)

    def set_tags(self, mlflow_run: str, tags: dict[str, str]) -> None:
        """Sets tags of a run."""
        from mlflow.entities import RunTag

        every = [RunTag(name, value) for name, value in tags.items()]
        for at in range(0, len(every), TAGS_A_CALL):
            batch = every[at : at + TAGS_A_CALL]
            self.call("set tags", lambda client, batch=batch: client.log_batch(mlflow_run, tags=batch))

    def log_artifacts(self, mlflow_run: str, path: Path, folder: str | None = None) -> None:
        """Copies a file, or all files below a folder, to the run's artifacts (below `folder` there)."""

        def work(client: MlflowClient) -> None:
            if path.is_dir():
                client.log_artifacts(mlflow_run, str(path), folder)
            else:
                client.log_artifact(mlflow_run, str(path), folder)

        self.call(f"keep {path.name}", work)

    def end_run(self, mlflow_run: str, status: str = "FINISHED") -> None:
        """Ends a run as FINISHED, FAILED or KILLED; doing it again changes nothing."""

        def work(client: MlflowClient) -> None:
            if client.get_run(mlflow_run).info.status != status:
                client.set_terminated(mlflow_run, status)

        self.call("end a run", work)

    def running(self) -> dict[str, str]:
        """The key of every run that has not been ended, by the run's id."""

        def work(client: MlflowClient) -> dict[str, str]:
            place, found, token = experiment(client, self.settings), {}, None
            while True:
                page = client.search_runs([place], "attributes.status = 'RUNNING'", page_token=token)
                found |= {run.info.run_id: run.data.tags.get(RUN_TAG, "") for run in page}
                token = page.token
                if not token:
                    return found

        return self.call("list open runs", work)

    def run(self, mlflow_run: str) -> MlflowRun:
        """MLflow's own record of a run."""
        return self.call("read a run", lambda client: client.get_run(mlflow_run))


def _log_params(client: MlflowClient, mlflow_run: str, params: dict[str, Any]) -> None:
    from mlflow.entities import Param

    every = [Param(name, str(value)[:PARAM_LENGTH]) for name, value in params.items()]
    for at in range(0, len(every), PARAMS_A_CALL):
        client.log_batch(mlflow_run, params=every[at : at + PARAMS_A_CALL])
