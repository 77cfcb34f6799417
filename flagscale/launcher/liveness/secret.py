"""The secret that the agents of one run share, and the one that its ranks share.

The agents' secret is generated when a run of several hosts is started. It is passed in the
environment of the hosts' scripts, which hand it to the agent alone: neither the user's commands nor
the ranks get it. Each agent stores it in a file of its run's directory that only its user can read,
so that the script can be run by hand later, together with its peers.

The ranks' secret is derived from the agents', so that all hosts have the same one and it does not
reveal the other. Each agent puts it into the environment of the processes that it starts, and
nowhere else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from flagscale.files import make_private_directory, write_atomic

SECRET_VARIABLE = "FLAGSCALE_RUN_SECRET"
"""Variable with the agents' secret, in the environment of the hosts' scripts."""
RANK_SECRET_VARIABLE = "FSCCL_SECRET"
"""Variable with the ranks' secret, from which fsccl derives the keys of its groups."""
SECRET_FILE = "secret"
"""Name of the file with the agents' secret in a run's directory."""
MIN_SECRET_CHARACTERS = 32


def generate_secret() -> str:
    """Generate a secret for one run."""
    return secrets.token_hex(32)


def take_secret(run_dir: Path) -> bytes | None:
    """Return the run's secret, and remove it from the environment.

    Without the variable, the secret comes from the file of an earlier start; None if there is none.
    """
    secret = os.environ.pop(SECRET_VARIABLE, "")
    path = run_dir / SECRET_FILE
    if not secret:
        try:
            secret = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
    elif not path.exists():
        # If the disk is full, only a later start by hand is impossible.
        with suppress(OSError):
            make_private_directory(run_dir)
            write_atomic(path, secret + "\n")
    return secret.encode() if len(secret) >= MIN_SECRET_CHARACTERS else None


def rank_secret_variables(agent_secret: bytes | None) -> dict[str, str]:
    """Return the environment variable with the ranks' secret.

    It is derived from ``agent_secret``, or generated for a run of one host. A value set by the user
    is kept.
    """
    if os.environ.get(RANK_SECRET_VARIABLE):
        return {}
    digest = (
        hmac.new(agent_secret, b"ranks", hashlib.sha256).hexdigest()
        if agent_secret
        else secrets.token_hex(32)
    )
    return {RANK_SECRET_VARIABLE: digest[:32]}
