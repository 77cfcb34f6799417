"""Real runs of small programs. Whatever a test does, none of its processes outlives it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch_bench import Bench
from support.launch_lab import Lab
from support.slurm_lab import Cluster, needed_cluster

from flagscale.hosts import processes


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path, tmp_path / "exp")
    yield made
    made.clear()


@pytest.fixture
def spaced_lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab whose every path holds spaces, quotes and a dollar."""
    root = tmp_path / "a b 'c' $d"
    root.mkdir()
    made = Lab(root, root / "exp dir")
    yield made
    made.clear()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for planned in made.plans:
        processes.sweep(planned.run_id, 0, exclude=[os.getpid()])


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[Cluster]:
    """One Slurm for all tests of a file."""
    with needed_cluster() as made:
        yield made
