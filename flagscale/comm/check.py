"""Whether this machine can use a communication backend: what a preflight asks a host's Python.

    python -m flagscale.comm.check NAME [auto or a kind of device]

prints one line of JSON: ``device``, ``version`` and, where training could not use the backend,
``problem`` and ``hint``. Imports torch, in which several backends are or are not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from flagscale.accelerators.registry import CPU, chosen
from flagscale.comm import registry
from flagscale.comm.base import TRAINING, missing_torch
from flagscale.errors import ConfigError


def check(name: str, device: str = "auto") -> dict[str, str | None]:
    """What the host answers for the backend ``name`` with ranks on ``device``."""
    if missing := missing_torch():
        return {"problem": missing, "hint": "install the `train` extra"}
    kind = device
    try:
        found = chosen(device)
        kind = CPU if found.missing() else found.name
        backend = registry.usable(name, kind, TRAINING)
    except ConfigError as error:
        message = error.message.removeprefix("distributed_backend: ")
        return {"device": kind, "problem": message, "hint": error.hint}
    said = (backend.version(), backend.origin())
    return {"device": kind, "version": ", ".join(filter(None, said)) or None}


def main(words: Sequence[str]) -> int:
    """Answer on standard output; the exit code."""
    print(json.dumps(check(*words)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
