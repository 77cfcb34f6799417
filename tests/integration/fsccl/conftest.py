"""Ranks that stay while many tests use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.fsccl_ranks import Ranks, build_extension
from support.needs import need


@pytest.fixture(scope="session")
def built() -> None:
    """The first test of all builds the extension; ranks then only load it."""
    need("compiler")
    build_extension()


@pytest.fixture(scope="session")
def ranks(built: None) -> Iterator[Ranks]:
    """Five ranks; enough for every cluster shape under test."""
    pool = Ranks(5)
    yield pool
    pool.end()


@pytest.fixture(scope="module", params=["4", "2,2"])
def four(request: pytest.FixtureRequest, ranks: Any) -> Iterator[Any]:
    """Calls a case on four ranks, in one cluster and in two."""

    def call(case: str, **arguments: Any) -> list[Any]:
        found: list[Any] = ranks.call(range(4), case, **arguments)
        return found

    ranks.join(4, FSCCL_CLUSTERS=request.param)
    yield call
    ranks.leave(range(4))
