"""Check whether a host has the packages of metrics sinks.

The preflight checks of the launcher run it in the Python of the host:

    python -m flagscale.sinks.check NAME…

It prints one line of JSON: ``found`` with the names of the sinks, or ``problem`` and ``hint``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from flagscale.errors import ConfigError
from flagscale.sinks.registry import load_sink


def check_sinks(names: Sequence[str]) -> dict[str, str | None]:
    """Return the record to print for these sinks."""
    try:
        sinks = [load_sink(name) for name in names]
    except ConfigError as error:
        hint = error.hint or "install the package that provides it on the host"
        return {"problem": error.message, "hint": hint}
    return {"found": ", ".join(sink.display_name for sink in sinks)}


if __name__ == "__main__":
    print(json.dumps(check_sinks(sys.argv[1:])))
