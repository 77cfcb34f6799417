"""The secret that the agents of one run share, and the one that its ranks do.

It is made when a run of several hosts is started and travels in the environment of the hosts'
scripts, which hand it to the agent alone: neither the user's commands nor the ranks see it. Each
agent keeps it in a file of its run's directory that only its user can read, so that the script also
runs by hand, later, with its peers.

The ranks' is made of the agents', so that all hosts have the same and it tells nobody the other;
each agent puts it into the environment of what it starts, and nowhere else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from flagscale.files import make_private_directory, write_atomic

VARIABLE = "FLAGSCALE_RUN_SECRET"
OF_RANKS = "FSCCL_SECRET"
"""The variable that ranks find theirs in: what the keys of fsccl's groups are made of."""
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


def of_ranks(key: bytes | None) -> dict[str, str]:
    """The variable that a host's ranks get: of a run with ``key``, or of one host alone. What the
    user has given stays."""
    if os.environ.get(OF_RANKS):
        return {}
    made = hmac.new(key, b"ranks", hashlib.sha256).hexdigest() if key else secrets.token_hex(32)
    return {OF_RANKS: made[:32]}
