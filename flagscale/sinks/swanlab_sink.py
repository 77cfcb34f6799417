"""SwanLab: an experiment of a project, in the cloud, at an own server, or offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.sinks.base import MetricsRecord, MetricsSink, Outcome, TrainingRun

_KEY_VARIABLE = "SWANLAB_API_KEY"
_MODE_VARIABLE = "SWANLAB_MODE"
_RUN_ID_VARIABLE = "SWANLAB_RUN_ID"
_MODES_WITHOUT_LOGIN = ("offline", "local", "disabled")
_STATES: Mapping[Outcome, str] = {"finished": "success", "stopped": "aborted", "failed": "crashed"}


class SwanLabSink(MetricsSink):
    """Experiment at SwanLab, new or continued."""

    name = "swanlab"
    title = "SwanLab"
    key = "swanlab_project"
    package = "swanlab"

    def explain_unusable(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[str, str] | None:
        home = environment.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab"
        if (
            environment.get(_MODE_VARIABLE) in _MODES_WITHOUT_LOGIN
            or environment.get(_KEY_VARIABLE)
            or Path(home, ".netrc").exists()  # written by `swanlab login`
        ):
            return None
        return (
            f"is set, but {_KEY_VARIABLE} is not",
            f"set {_KEY_VARIABLE} in the environment, or {_MODE_VARIABLE}=offline to write files "
            "for `swanlab sync`",
        )

    def open(self, run: TrainingRun) -> None:
        import swanlab

        args = run.arguments
        directory = run.local_directory("swanlab")
        directory.mkdir(parents=True, exist_ok=True)
        self._run: Any = swanlab.init(
            # An earlier attempt may have started a run before it failed.
            reinit=True,
            project=args["swanlab_project"],
            workspace=args["swanlab_workspace"],
            name=args["swanlab_exp_name"],
            log_dir=str(directory),
            id=_choose_run_id(run),
            resume="allow",
            config=run.hyperparameters(),
            settings=swanlab.Settings(interactive=False),
        )

    def log_batch(self, records: Sequence[MetricsRecord]) -> None:
        for record in records:
            self._run.log(dict(record.values), step=record.step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(_STATES[outcome])


def _choose_run_id(run: TrainingRun) -> str:
    """Return the id of the run to start or continue, and store it next to the checkpoints."""
    if run_id := run.environment.get(_RUN_ID_VARIABLE):
        return run_id
    args = run.arguments
    place = {"project": args["swanlab_project"], "workspace": args["swanlab_workspace"]}
    return run.run_record("swanlab", **place).read_or_create_id(8)
