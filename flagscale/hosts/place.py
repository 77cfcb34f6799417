"""What is where a run wants to write, as :mod:`.facts` asks it of other hosts."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NOT_WRITABLE = "not writable"
NOT_A_DIRECTORY = "not a directory"


@dataclass(frozen=True)
class Place:
    """Where a run will write on a host: ``existing`` is there already, ``unfit`` says why ``user``
    can't write there. ``free``: bytes, where the host can tell."""

    existing: str
    unfit: str = ""
    user: str = ""
    free: int | None = None


def look(path: Path) -> Place:
    """The place of a directory on this machine."""
    existing = next(p for p in (path, *path.parents) if os.access(p, os.F_OK) or p == p.parent)
    if not existing.is_dir():
        return Place(str(existing), NOT_A_DIRECTORY)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Place(str(existing), NOT_WRITABLE)
    free = None
    with suppress(OSError):
        free = shutil.disk_usage(existing).free
    return Place(str(existing), free=free)
