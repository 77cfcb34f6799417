"""Fixtures for runs on hosts of the bed, whose processes all end with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bed.lab import Bed
from support.ssh_lab import SshLab, ssh_lab


@pytest.fixture
def lab(bed: Bed, tmp_path: Path) -> Iterator[SshLab]:
    with ssh_lab(bed, tmp_path / "lab") as new_lab:
        yield new_lab
