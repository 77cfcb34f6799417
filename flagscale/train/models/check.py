"""Check of a host for a model family, run by the preflight in the host's Python.

    python -m flagscale.train.models.check NAME

prints one line of JSON: ``found`` with the display name of the family, or ``problem`` and ``hint``.
Does not import torch.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence

from flagscale.errors import ConfigError
from flagscale.train.models.base import get_model_spec


def check_family(name: str) -> dict[str, str | None]:
    """Return the result of the check for the family ``name``."""
    try:
        return {"found": get_model_spec(Namespace(family=name)).shown}
    except ConfigError as error:
        return {
            "problem": error.message,
            "hint": error.hint or "install the package that brings it there",
        }


def main(argv: Sequence[str]) -> int:
    """Print the result as JSON and return the exit code."""
    print(json.dumps(check_family(*argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
