"""Ranks that stay while the tests of a file use them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fsccl_ranks import Ranks, build_extension
from support.gpu_groups import GPUS


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Ranks]:
    build_extension()
    pool = Ranks(max(4, min(GPUS, 8)))
    yield pool
    pool.end()
