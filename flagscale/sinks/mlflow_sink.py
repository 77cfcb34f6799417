"""MLflow: a run of an experiment at a tracking server, in a database or in a directory."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flagscale.sinks.base import MetricsRecord, MetricsSink, Outcome, TrainingRun
from flagscale.sinks.logins import remove_logins

_TRACKING_URI_VARIABLE = "MLFLOW_TRACKING_URI"
_RUN_ID_VARIABLE = "MLFLOW_RUN_ID"
_CLIENT_VARIABLES: Mapping[str, str] = {
    # The delivery repeats calls itself. The client's defaults wait for up to 14 minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
_RUN_TAG, _CREATION_TAG = "flagscale.run_id", "flagscale.creation_id"
_STATUS: Mapping[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_METRICS, _MAX_PARAMETERS, _MAX_VALUE_CHARACTERS = 1000, 100, 500
"""Limits of a request."""
_INVALID_CHARACTERS = re.compile(r"[^\w\-./ ]")


class MlflowSink(MetricsSink):
    """Run at MLflow, new or continued."""

    name = "mlflow"
    title = "MLflow"
    key = "mlflow_experiment"
    package = "mlflow"
    _creation_tag: str | None = None

    def open(self, run: TrainingRun) -> None:
        for name, value in _CLIENT_VARIABLES.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        args = run.arguments
        uri = args["mlflow_tracking_uri"] or run.environment.get(_TRACKING_URI_VARIABLE)
        artifacts = None
        if not uri:
            directory = run.local_directory("mlflow")
            directory.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{directory}/mlflow.db", (directory / "artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        experiment_id = self._get_experiment(args["mlflow_experiment"], artifacts)
        place = {"experiment": args["mlflow_experiment"], "tracking_uri": remove_logins(uri)}
        record = run.run_record("mlflow", **place)
        run_id = run.environment.get(_RUN_ID_VARIABLE) or record.read_id()
        mlflow_run = self._find_run(run_id) if run_id else None
        if mlflow_run is None:
            mlflow_run = self._create_run(experiment_id, run)
            record.write_id(mlflow_run.info.run_id)
            if run_id:
                run.note(f"MLflow: run {run_id} is not there any more; a new one begins")
        self._run_id: str = mlflow_run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_parameters(run.hyperparameters(), mlflow_run.data.params)

    def log_batch(self, records: Sequence[MetricsRecord]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_INVALID_CHARACTERS.sub("_", key), value, round(record.time * 1000), record.step)
            for record in records
            for key, value in record.values.items()
        ]
        for part in _split(metrics, _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=part)

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._run_id, status=_STATUS[outcome])

    def _get_experiment(self, name: str, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except MlflowException as error:
                # Another run has created it meanwhile.
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _create_run(self, experiment_id: str, run: TrainingRun) -> Any:
        # The reply to an earlier attempt may have been lost.
        if self._creation_tag is not None:
            condition = f"tags.`{_CREATION_TAG}` = '{self._creation_tag}'"
            created = self._client.search_runs([experiment_id], condition, max_results=1)
            if created:
                return created[0]
        self._creation_tag = self._creation_tag or secrets.token_hex(8)
        tags = {_CREATION_TAG: self._creation_tag, **({_RUN_TAG: run.id} if run.id else {})}
        name = run.arguments["mlflow_run_name"]
        return self._client.create_run(experiment_id, tags=tags, run_name=name)

    def _find_run(self, run_id: str) -> Any:
        """Return the run to continue; None if it was deleted."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _log_parameters(self, values: Mapping[str, object], logged: Mapping[str, str]) -> None:
        """Log hyperparameters. Those that the run has already cannot be changed, and are kept."""
        from mlflow.entities import Param

        parameters = [
            Param(name, str(value)[:_MAX_VALUE_CHARACTERS])
            for name, value in values.items()
            if name not in logged and str(value)
        ]
        for part in _split(parameters, _MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=part)


def _split(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
