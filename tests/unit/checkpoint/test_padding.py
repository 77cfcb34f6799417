"""Padding of buckets, which megatron.core leaves out of the gathered optimizer state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("elements", "bucket_sizes", "expected"),
    [
        pytest.param([1, 2, 3], [(3, 4)], [1, 2, 3], id="one-bucket"),
        pytest.param([1, 2, 3], [(2, 2), (1, 4)], [1, 2, 3], id="even-buckets"),
        pytest.param([1, 2, 3], [(1, 3), (2, 2)], [1, 0, 0, 2, 3], id="padded"),
        pytest.param([1, 2, 3, 4], [(1, 2), (1, 2), (2, 3)], [1, 0, 2, 0, 3, 4, 0], id="three"),
    ],
)
def test_padding_is_inserted_after_each_bucket(
    elements: list[int], bucket_sizes: list[tuple[int, int]], expected: list[int]
) -> None:
    from flagscale.train.checkpoint.bucket_padding import insert_padding

    assert insert_padding(torch.tensor(elements), bucket_sizes).tolist() == expected


def test_only_gathering_inside_the_context_is_changed() -> None:
    from flagscale.train.checkpoint.bucket_padding import keep_bucket_padding

    def bucket(unpadded_size: int, padded_size: int) -> Any:
        return SimpleNamespace(numel_unpadded=unpadded_size, grad_data=torch.empty(padded_size))

    class Optimizer:
        buffers = (SimpleNamespace(buckets=(bucket(1, 2), bucket(1, 1))),)

        def get_parameter_state_dp_zero(self, *, has_no_state: bool = False) -> Any:
            elements = torch.tensor([5.0, 6.0])
            return None if has_no_state else {0: {"fp32": {"param": elements, "numel_unpadded": 2}}}

    optimizer = Optimizer()
    other_optimizer = SimpleNamespace()  # an optimizer that is not distributed
    with keep_bucket_padding(SimpleNamespace(chained_optimizers=[optimizer, other_optimizer])):
        gathered = optimizer.get_parameter_state_dp_zero()[0]["fp32"]
        assert gathered["param"].tolist() == [5, 0, 6]
        assert gathered["numel_unpadded"] == 2
        assert optimizer.get_parameter_state_dp_zero(has_no_state=True) is None
    assert optimizer.get_parameter_state_dp_zero()[0]["fp32"]["param"].tolist() == [5, 6]
