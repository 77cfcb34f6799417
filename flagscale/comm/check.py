"""Check whether this machine can use a communication backend. A preflight runs it on every host.

    python -m flagscale.comm.check NAME [auto or a kind of device]

It prints one line of JSON: ``device``, ``version`` and, if training could not use the backend,
``problem`` and ``hint``. It imports torch, because several backends depend on torch's build.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from flagscale.accelerators.registry import CPU, choose_accelerator
from flagscale.comm import registry
from flagscale.comm.base import TRAINING_OPERATIONS, explain_missing_torch
from flagscale.errors import ConfigError


def check_backend(name: str, device: str = "auto") -> dict[str, str | None]:
    """Return the result of the check for the backend ``name`` with ranks on ``device``."""
    if problem := explain_missing_torch():
        return {"problem": problem, "hint": "install the `train` extra"}
    kind = device
    try:
        accelerator = choose_accelerator(device)
        kind = CPU if accelerator.explain_unavailable() else accelerator.name
        backend = registry.get_usable_backend(name, kind, TRAINING_OPERATIONS)
    except ConfigError as error:
        message = error.message.removeprefix("distributed_backend: ")
        return {"device": kind, "problem": message, "hint": error.hint}
    version_parts = (backend.version(), backend.origin())
    return {"device": kind, "version": ", ".join(filter(None, version_parts)) or None}


def main(arguments: Sequence[str]) -> int:
    """Print the result of the check and return the exit code."""
    print(json.dumps(check_backend(*arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
