"""Ranks that stay while the tests of a file use them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from fsccl_ranks import ROOT, Ranks
from gpu_groups import GPUS


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Ranks]:
    build = "import flagscale.comm.fsccl as f; f.load_extension()"
    subprocess.run([sys.executable, "-c", build], check=True, cwd=ROOT)
    pool = Ranks(max(4, min(GPUS, 8)))
    yield pool
    pool.end()
