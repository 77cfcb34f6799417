"""Collectives in compiled functions; two ranks, because each of them runs the compiler."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def test_functional_collectives_are_compiled_in_one_graph(ranks: Any) -> None:
    ranks.join(2)
    ranks.call(range(2), "compiled", backend="inductor", limit=120)
    ranks.leave(range(2))
