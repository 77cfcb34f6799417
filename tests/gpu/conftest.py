"""Fixtures of the tests on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fsccl_ranks import RankPool, build_extension
from support.gpu_groups import GPUS


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[RankPool]:
    build_extension()
    pool = RankPool(max(4, min(GPUS, 8)))
    yield pool
    pool.stop()
