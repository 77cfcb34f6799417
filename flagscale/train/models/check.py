"""Check whether a host provides a model family.

The preflight checks of the launcher run it in the Python of each host:

    python -m flagscale.train.models.check NAME

It prints one line of JSON: ``found`` with the display name of the family, or ``problem`` and
``hint``. It does not import torch.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence

from flagscale.errors import ConfigError
from flagscale.train.models.base import get_model_spec


def check_family(name: str) -> dict[str, str | None]:
    """Return the record to print for the family ``name``."""
    try:
        return {"found": get_model_spec(Namespace(family=name)).display_name}
    except ConfigError as error:
        return {
            "problem": error.message,
            "hint": error.hint or "install the package that provides it on the host",
        }


def main(argv: Sequence[str]) -> int:
    """Print the result as JSON and return the exit code."""
    print(json.dumps(check_family(*argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
