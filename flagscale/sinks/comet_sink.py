"""Comet: an experiment of a project, online, or offline as archives for ``comet upload``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from flagscale.sinks.base import MetricsRecord, MetricsSink, Outcome, TrainingRun

_KEY_VARIABLE = "COMET_API_KEY"
_EXPERIMENT_VARIABLE = "COMET_EXPERIMENT_KEY"
_ONLINE_VARIABLE = "COMET_START_ONLINE"


class CometSink(MetricsSink):
    """Experiment at Comet, new or continued."""

    name = "comet"
    title = "Comet"
    key = "comet_project"
    package = "comet_ml"

    def explain_unusable(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[str, str] | None:
        if not _is_online(environment) or environment.get(_KEY_VARIABLE):
            return None
        import comet_ml

        # The client also reads its configuration file.
        if comet_ml.get_config("comet.api_key"):
            return None
        return (
            f"is set, but {_KEY_VARIABLE} is not",
            f"set {_KEY_VARIABLE} in the environment, or {_ONLINE_VARIABLE}=false to write "
            "archives for `comet upload`",
        )

    def open(self, run: TrainingRun) -> None:
        # Metrics of other sinks are not logged a second time.
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
        import comet_ml

        args = run.arguments
        place = {"project": args["comet_project"], "workspace": args["comet_workspace"]}
        record = run.run_record("comet", **place)
        experiment_key = run.environment.get(_EXPERIMENT_VARIABLE) or record.read_id()
        mode = "get_or_create" if _is_online(run.environment) else "get"
        if experiment_key is None:
            experiment_key, mode = secrets.token_hex(16), "create"
            record.write_id(experiment_key)
        directory = run.local_directory("comet")
        directory.mkdir(parents=True, exist_ok=True)
        self._experiment: Any = comet_ml.start(
            project_name=args["comet_project"],
            workspace=args["comet_workspace"],
            experiment_key=experiment_key,
            mode=mode,
            online=_is_online(run.environment),
            experiment_config=comet_ml.ExperimentConfig(
                name=args["comet_experiment_name"],
                offline_directory=str(directory),
                # Neither code nor output leaves the machine unasked, and facts about the host would
                # be collected by another process.
                log_code=False,
                log_git_metadata=False,
                log_env_details=False,
                auto_output_logging=False,
            ),
        )
        self._experiment.log_parameters(run.hyperparameters())

    def log_batch(self, records: Sequence[MetricsRecord]) -> None:
        for record in records:
            self._experiment.log_metrics(dict(record.values), step=record.step)

    def close(self, outcome: Outcome) -> None:
        self._experiment.log_other("outcome", outcome)
        self._experiment.end()


def _is_online(environment: Mapping[str, str]) -> bool:
    return environment.get(_ONLINE_VARIABLE, "true").lower() not in ("false", "0", "no")
