"""Whether this machine has a family of models: what a preflight asks a host's Python.

    python -m flagscale.train.models.check NAME

prints one line of JSON: ``found``, what sentences call it, or ``problem`` and ``hint``. Imports
no torch.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence

from flagscale.errors import ConfigError
from flagscale.train.models.base import spec_of


def check(name: str) -> dict[str, str | None]:
    """What the host answers for the family ``name``."""
    try:
        return {"found": spec_of(Namespace(family=name)).shown}
    except ConfigError as error:
        return {
            "problem": error.message,
            "hint": error.hint or "install the package that brings it there",
        }


def main(words: Sequence[str]) -> int:
    """Answer on standard output; the exit code."""
    print(json.dumps(check(*words)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
