"""``flagscale report``: write the page of runs."""

from __future__ import annotations

import gc
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from flagscale.errors import ConfigError
from flagscale.launcher.state import RunState
from flagscale.report.pages import write


def report(states: Sequence[RunState], output: Path | None, *, show: bool = False) -> int:
    """Write the page of these runs, into the current directory under the name of the first unless
    ``output`` is given, and tell where it is; ``show`` it in the user's browser.

    Raises:
        ConfigError: it cannot be written there.
    """
    path = output or Path(f"report_{states[0].run_id}.html")
    # What a long run's events are made of lives until the page is written: nothing is garbage.
    gc.disable()
    try:
        write(states, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the report cannot be written: {error.strerror}",
            hint="--output FILE names another place",
        ) from error
    finally:
        gc.enable()
    count = f"{len(states)} runs" if len(states) > 1 else f"run {states[0].run_id}"
    print(f"report of {count}: {path} ({path.stat().st_size / 1e6:.1f} MB)", flush=True)
    if show and not webbrowser.open(path.absolute().as_uri()):
        print("note: no browser was found to show it in", file=sys.stderr)
    return 0
