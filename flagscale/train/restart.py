"""What is different when the launcher starts a failed job once more."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
from pathlib import Path

from flagscale.status import (
    ATTEMPT_VARIABLE,
    RUN_ID_VARIABLE,
    STATUS_DIR_VARIABLE,
    read_events,
)
from flagscale.train.checkpoint.agreement import on_rank_0

_PR_SET_PDEATHSIG = 1


def be_supervised() -> None:
    """Answer the launcher's agent: write the stacks of all threads to stderr when it asks, and
    end with torchrun, should that be killed together with all that watches over it."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    if os.environ.get(RUN_ID_VARIABLE):
        # Under a launcher alone: a script that a user started may outlive its shell.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def go_on_from_own_checkpoints(args: argparse.Namespace) -> None:
    """In a later attempt of a run, have ``args`` load what the run itself has saved, if it has:
    a run that began with another's weights (``load``, ``finetune``) does not begin again with
    them. All ranks call it."""
    if on_rank_0(lambda: bool(args.save) and _has_saved()):
        args.load = args.save
        args.finetune = args.no_load_rng = False
        args.no_load_optim = args.no_save_optim


def _has_saved() -> bool:
    """Whether an earlier attempt of this run has reported a checkpoint."""
    directory = os.environ.get(STATUS_DIR_VARIABLE)
    if os.environ.get(ATTEMPT_VARIABLE, "0") == "0" or not directory:
        return False
    reports = Path(directory).parent.glob("status*/rank_0.jsonl")
    return any(event.event == "checkpoint" for path in reports for event in read_events(path)[0])
