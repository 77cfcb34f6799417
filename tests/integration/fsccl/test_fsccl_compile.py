"""Tests of collectives in compiled functions; two ranks, because each runs the compiler."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]


@pytest.mark.skipif(" " in sys.prefix, reason="torch's compiler does not quote paths with a space")
def test_functional_collectives_compile_to_one_graph(ranks: Any) -> None:
    ranks.join(2)
    ranks.call(range(2), "check_compiled_collectives", backend="inductor", limit=120)
    ranks.leave(range(2))
