"""Fixtures for real runs of small programs. No process of a test outlives it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch_bench import Bench
from support.launch_lab import Lab
from support.slurm_lab import Cluster, require_cluster

from flagscale.hosts import processes


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    new_lab = Lab(tmp_path, tmp_path / "exp")
    yield new_lab
    new_lab.kill_processes()


@pytest.fixture
def spaced_lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab whose paths contain spaces, quotes and a dollar sign."""
    root = tmp_path / "a b 'c' $d"
    root.mkdir()
    new_lab = Lab(root, root / "exp dir")
    yield new_lab
    new_lab.kill_processes()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    new_bench = Bench(tmp_path)
    yield new_bench
    for planned in new_bench.plans:
        processes.kill_run_processes(planned.run_id, 0, exclude=[os.getpid()])


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[Cluster]:
    """One Slurm cluster for all tests of a file."""
    with require_cluster() as cluster:
        yield cluster
