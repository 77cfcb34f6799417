"""Supervision of a rank by the launcher, and resumption in later attempts of a run."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
from pathlib import Path

from flagscale import flight_reporter
from flagscale.status import (
    ATTEMPT_VARIABLE,
    RUN_ID_VARIABLE,
    STATUS_DIR_VARIABLE,
    read_events,
)
from flagscale.train.checkpoint.collective_errors import run_on_rank_0

_PR_SET_PDEATHSIG = 1


def enable_supervision() -> None:
    """Install the hooks of the launcher's agent.

    SIGUSR2 dumps the stacks of all threads to stderr. Under the launcher, a thread answers requests
    for the flight record, and the process is killed when its parent (torchrun) dies.
    """
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    flight_reporter.start()
    if os.environ.get(RUN_ID_VARIABLE):
        # Only under the launcher: a script that a user started may outlive its shell.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def resume_from_own_checkpoint(args: argparse.Namespace) -> None:
    """Load the run's own checkpoint in a later attempt of the run. All ranks call it.

    A run that started from another run's weights (``load``, ``finetune``) must not start from them
    again. ``args`` is modified only if an earlier attempt has saved a checkpoint.
    """
    if run_on_rank_0(lambda: bool(args.save) and _has_saved_checkpoint()):
        args.load = args.save
        args.finetune = args.no_load_rng = False
        args.no_load_optim = args.no_save_optim


def _has_saved_checkpoint() -> bool:
    """Return whether an earlier attempt of this run has reported a checkpoint."""
    directory = os.environ.get(STATUS_DIR_VARIABLE)
    if os.environ.get(ATTEMPT_VARIABLE, "0") == "0" or not directory:
        return False
    status_files = Path(directory).parent.glob("status*/rank_0.jsonl")
    return any(
        event.event == "checkpoint" for path in status_files for event in read_events(path)[0]
    )
