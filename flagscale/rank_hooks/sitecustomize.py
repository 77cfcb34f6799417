"""Module that Python imports at the start of every process of another program's ranks.

Once the program has imported torch, a thread answers the launcher's requests for its latest
collectives (:mod:`flagscale.flight_reporter`). Nothing here may disturb the program: errors are
ignored, and the ``sitecustomize`` that Python would have imported otherwise is imported.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def _report_flight_records() -> None:
    if not (os.environ.get("RANK") and os.environ.get("FLAGSCALE_STATUS_DIR")):
        return
    from flagscale.after_torch import call_after_torch

    call_after_torch(_start_reporter)


def _start_reporter() -> None:
    # The program may have a package of this name.
    with suppress(Exception):
        from flagscale import flight_reporter

        flight_reporter.start()


def _import_replaced_module() -> None:
    """Import the next ``sitecustomize`` on the path, such as that of a Linux distribution."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    own_directory = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - at each start
    path = [entry for entry in sys.path if os.path.abspath(entry) != own_directory]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


with suppress(Exception):
    _report_flight_records()
_import_replaced_module()
