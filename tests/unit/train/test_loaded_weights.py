"""Tests of the comparison of a model's weights with those of a checkpoint."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

ADAPTERS = {"layer.lora_a", "layer.lora_b"}
BASE = {"layer.weight", "layer.bias"}


@pytest.mark.parametrize(
    ("missing", "unexpected", "loaded", "differences"),
    [
        pytest.param(set(), set(), BASE, set(), id="equal"),
        pytest.param({"layer.bias"}, set(), {"layer.weight"}, {"layer.bias"}, id="missing"),
        pytest.param(set(), {"other"}, BASE | {"other"}, {"other"}, id="unexpected"),
        pytest.param(BASE, set(), ADAPTERS, set(), id="adapters-alone"),
        pytest.param(ADAPTERS, set(), BASE, set(), id="everything-else"),
        pytest.param(BASE, {"other"}, ADAPTERS | {"other"}, {"other", *BASE}, id="foreign"),
        pytest.param(
            {*BASE, "layer.lora_b"}, set(), {"layer.lora_a"}, {"layer.lora_b"}, id="some-adapters"
        ),
        pytest.param(BASE | ADAPTERS, set(), set(), BASE | ADAPTERS, id="nothing"),
        pytest.param(set(), set(), set(), set(), id="read-later"),
    ],
)
def test_weights_of_one_side_only(
    missing: set[str], unexpected: set[str], loaded: set[str], differences: set[str]
) -> None:
    from flagscale.train.checkpoint.loading import _find_differences

    assert set(_find_differences(missing, unexpected, loaded)) == differences
