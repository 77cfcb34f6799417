"""Weights & Biases: the run there that all runs of an experiment continue.

Its id is stored next to the checkpoints, because a run that continues from them is the same
training. A training that begins anew gets a new run.
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flagscale.files import read_json, write_json
from flagscale.status import ATTEMPT_VARIABLE

RUN_FILE = "wandb_run.json"
_RUN_ID_VARIABLE = "WANDB_RUN_ID"
_RESUME_VARIABLE = "WANDB_RESUME"


class WandbRun:
    """Run at Weights & Biases, new or continued."""

    def __init__(
        self, args: argparse.Namespace, iteration: int, note: Callable[[str], object]
    ) -> None:
        """Start or continue the run.

        Args:
            args: resolved arguments.
            iteration: number of the step that training continues after; 0 for a new training.
            note: prints a line.
        """
        import wandb

        scalar_args = {
            k: v for k, v in vars(args).items() if isinstance(v, (bool, int, float, str))
        }
        self._run: Any = wandb.init(
            project=args.wandb_project,
            name=args.wandb_exp_name,
            entity=args.wandb_entity,
            dir=args.wandb_save_dir,
            config=scalar_args,
            allow_val_change=True,
            id=choose_run_id(args, iteration, os.environ),
            # The user's own variable has effect if nothing is given.
            resume=None if os.environ.get(_RESUME_VARIABLE) else "allow",
        )
        # Rows can only be appended: steps that are repeated from a checkpoint stay as they are.
        self._first_step: int = self._run.step
        if self._first_step > iteration + 1:
            note(
                f"Weights & Biases: run {self._run.id} has steps up to {self._first_step - 1} "
                "already, which it keeps; it continues after them"
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write the values of a step, unless the run has later steps already."""
        if step >= self._first_step:
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """Upload what is left, and end the run."""
        self._run.finish()


def choose_run_id(
    args: argparse.Namespace, iteration: int, environment: Mapping[str, str]
) -> str | None:
    """Return the id of the run to start or continue, and store it next to the checkpoints.

    None leaves the choice to Weights & Biases: the user has set ``WANDB_RUN_ID``, or the run cannot
    be continued, because it saves no checkpoints or only evaluates.

    Args:
        args: resolved arguments.
        iteration: number of the step that training continues after; 0 for a new training.
        environment: environment of this process.
    """
    if environment.get(_RUN_ID_VARIABLE) or not args.save or args.skip_train:
        return None
    file = Path(args.save, RUN_FILE)
    location = {"project": args.wandb_project, "entity": args.wandb_entity}
    if iteration > 0 or environment.get(ATTEMPT_VARIABLE, "0") != "0":
        with suppress(OSError):
            record = read_json(file) or {}
            if isinstance(record.get("id"), str) and location.items() <= record.items():
                return str(record["id"])
    run_id = secrets.token_hex(6)
    # Without the file, the next start begins another run.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"id": run_id, **location}, durable=False)
    return run_id
