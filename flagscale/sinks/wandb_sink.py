"""Weights & Biases: the run there that all runs of an experiment continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flagscale.sinks.base import MetricsRecord, MetricsSink, Outcome, TrainingRun
from flagscale.sinks.delivery import CLOSE_SECONDS

_RUN_ID_VARIABLE = "WANDB_RUN_ID"
_RESUME_VARIABLE = "WANDB_RESUME"
_EXIT_CODES: Mapping[Outcome, int] = {"finished": 0, "stopped": 0, "failed": 1}


class WandbSink(MetricsSink):
    """Run at Weights & Biases, new or continued."""

    name = "wandb"
    title = "Weights & Biases"
    key = "wandb_project"
    package = "wandb"

    def open(self, run: TrainingRun) -> None:
        import wandb

        args = run.arguments
        settings = {}
        if hasattr(wandb.Settings(), "finish_timeout"):
            settings["finish_timeout"] = max(CLOSE_SECONDS.values())
        self._run: Any = wandb.init(
            project=args["wandb_project"],
            name=args["wandb_exp_name"],
            entity=args["wandb_entity"],
            dir=args["wandb_save_dir"],
            config=run.hyperparameters(),
            allow_val_change=True,
            id=choose_run_id(run),
            # The user's own variable has effect if nothing is given.
            resume=None if run.environment.get(_RESUME_VARIABLE) else "allow",
            settings=wandb.Settings(**settings),
        )
        # Rows can only be appended: steps that are repeated from a checkpoint stay as they are.
        self._first_step: int = self._run.step
        if self._first_step > run.iteration + 1:
            run.note(
                f"Weights & Biases: run {self._run.id} has steps up to {self._first_step - 1} "
                "already, which it keeps; it continues after them"
            )

    def log_batch(self, records: Sequence[MetricsRecord]) -> None:
        for record in records:
            if record.step >= self._first_step:
                self._run.log(dict(record.values), step=record.step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=_EXIT_CODES[outcome])


def choose_run_id(run: TrainingRun) -> str | None:
    """Return the id of the run to start or continue, and store it next to the checkpoints.

    None leaves the choice to ``WANDB_RUN_ID``, which the user has set.
    """
    if run.environment.get(_RUN_ID_VARIABLE):
        return None
    args = run.arguments
    place = {"project": args["wandb_project"], "entity": args["wandb_entity"]}
    return run.run_record("wandb", **place).read_or_create_id(6)
