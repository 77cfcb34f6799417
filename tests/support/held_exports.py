"""Exports of checkpoints (``export_each_checkpoint``) that wait while training goes on."""

from __future__ import annotations

from pathlib import Path

from support.waiting import PATIENCE_SECONDS

_START_FILE = """\
import pathlib, sys, time
if "flagscale.train.checkpoint.formats.export" in sys.orig_argv:
    end = time.monotonic() + {seconds}
    while not pathlib.Path({path!r}).exists() and time.monotonic() < end:
        time.sleep(0.05)
"""


def hold_exports(site: Path, released_by: str | Path) -> None:
    """Hold the export processes of programs with the directory ``site`` on their PYTHONPATH.

    They go on when the file ``released_by`` exists, a path for their working directory.
    """
    site.mkdir()
    text = _START_FILE.format(seconds=PATIENCE_SECONDS, path=str(released_by))
    (site / "sitecustomize.py").write_text(text)
