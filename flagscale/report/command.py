"""``flagscale report``: write the HTML page of runs."""

from __future__ import annotations

import gc
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from flagscale.errors import ConfigError
from flagscale.launcher.state import RunState
from flagscale.report.pages import write_page


def write_report(states: Sequence[RunState], output: Path | None, *, show: bool = False) -> int:
    """Write the page of these runs and print its path.

    The default is the current directory and the name of the first run. ``show`` opens it in the
    user's browser.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = output or Path(f"report_{states[0].run_id}.html")
    # The events of a long run live until the page is written, so nothing is garbage.
    gc.disable()
    try:
        write_page(states, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the report cannot be written: {error.strerror}",
            hint="--output FILE names another path",
        ) from error
    finally:
        gc.enable()
    count = f"{len(states)} runs" if len(states) > 1 else f"run {states[0].run_id}"
    print(f"report of {count}: {path} ({path.stat().st_size / 1e6:.1f} MB)", flush=True)
    if show and not webbrowser.open(path.absolute().as_uri()):
        print("note: no browser was found to show it in", file=sys.stderr)
    return 0
