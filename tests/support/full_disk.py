"""A small file system of its own, for what happens when a disk is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(parent: Path, size: str) -> Iterator[Path]:
    """A new directory with room for ``size`` (as mount has it: ``1m``). Skips the test where this
    process may not mount one."""
    path = parent / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte, by pieces that get smaller as they do not fit; the file that takes it all."""
    path = disk / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path
