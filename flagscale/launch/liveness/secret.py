"""The secret that the agents of one run share.

It is made when a run of several hosts is started and travels in the environment of the hosts'
scripts, which hand it to the agent alone: neither the user's commands nor the ranks see it. Each
agent keeps it in a file of its run's directory that only its user can read, so that the script also
runs by hand, later, with its peers.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from flagscale.files import make_private_directory, write_atomic

VARIABLE = "FLAGSCALE_RUN_SECRET"
FILE = "secret"
_LEAST_CHARACTERS = 32


def new() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


def take(run_dir: Path) -> bytes | None:
    """The run's secret, from the environment, where it does not stay, or from the file of an
    earlier start; None where there is none."""
    given = os.environ.pop(VARIABLE, "")
    path = run_dir / FILE
    if not given:
        try:
            given = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
    elif not path.exists():
        # It is here for now; what a full disk costs is another start by hand.
        with suppress(OSError):
            make_private_directory(run_dir)
            write_atomic(path, given + "\n")
    return given.encode() if len(given) >= _LEAST_CHARACTERS else None
