"""Restored padding of buckets that megatron.core leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("flat", "sizes", "expected"),
    [
        pytest.param([1, 2, 3], [(3, 4)], [1, 2, 3], id="one-bucket"),
        pytest.param([1, 2, 3], [(2, 2), (1, 4)], [1, 2, 3], id="even-buckets"),
        pytest.param([1, 2, 3], [(1, 3), (2, 2)], [1, 0, 0, 2, 3], id="padded"),
        pytest.param([1, 2, 3, 4], [(1, 2), (1, 2), (2, 3)], [1, 0, 2, 0, 3, 4, 0], id="three"),
    ],
)
def test_insert_padding(flat: list[int], sizes: list[tuple[int, int]], expected: list[int]) -> None:
    from flagscale.train.checkpoint.bucket_padding import insert_padding

    assert insert_padding(torch.tensor(flat), sizes).tolist() == expected


def test_only_gathering_inside_the_context_is_changed() -> None:
    from flagscale.train.checkpoint.bucket_padding import keep_bucket_padding

    def bucket(bare: int, full: int) -> Any:
        return SimpleNamespace(numel_unpadded=bare, grad_data=torch.empty(full))

    class Optimizer:
        buffers = (SimpleNamespace(buckets=(bucket(1, 2), bucket(1, 1))),)

        def get_parameter_state_dp_zero(self, *, absent: bool = False) -> Any:
            flat = torch.tensor([5.0, 6.0])
            return None if absent else {0: {"fp32": {"param": flat, "numel_unpadded": 2}}}

    part = Optimizer()
    plain = SimpleNamespace()  # an optimizer that is not distributed
    with keep_bucket_padding(SimpleNamespace(chained_optimizers=[part, plain])):
        gathered = part.get_parameter_state_dp_zero()[0]["fp32"]
        assert gathered["param"].tolist() == [5, 0, 6]
        assert gathered["numel_unpadded"] == 2
        assert part.get_parameter_state_dp_zero(absent=True) is None
    assert part.get_parameter_state_dp_zero()[0]["fp32"]["param"].tolist() == [5, 6]
