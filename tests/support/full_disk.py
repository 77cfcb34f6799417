"""A small file system for tests of a full disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(parent: Path, size: str) -> Iterator[Path]:
    """Mount a directory of ``size`` (in the syntax of mount, such as ``1m``). Skips the test if
    this process may not mount.
    """
    path = parent / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill_disk(disk: Path) -> Path:
    """Fill a disk to the last byte with blocks of decreasing size, and return the file that fills
    it.
    """
    path = disk / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path
