"""Fixtures with rank processes that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.fsccl_ranks import RankPool, build_extension
from support.needs import require


@pytest.fixture(scope="session")
def built_extension() -> None:
    """Build the extension once, so that ranks only have to load it."""
    require("compiler")
    build_extension()


@pytest.fixture(scope="session")
def ranks(built_extension: None) -> Iterator[RankPool]:
    """Five ranks, enough for all tested node layouts."""
    pool = RankPool(5)
    yield pool
    pool.stop()


@pytest.fixture(scope="module", params=["4", "2,2"])
def run_on_four_ranks(request: pytest.FixtureRequest, ranks: Any) -> Iterator[Any]:
    """Return a function that runs a case on four ranks, on one node and on two."""

    def call(case: str, **arguments: Any) -> list[Any]:
        results: list[Any] = ranks.call(range(4), case, **arguments)
        return results

    ranks.join(4, FSCCL_CLUSTERS=request.param)
    yield call
    ranks.leave(range(4))
