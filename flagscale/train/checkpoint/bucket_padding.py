"""Workaround for megatron.core's distributed optimizer when its state is gathered for saving.

The optimizer places parameters in a buffer of buckets, each padded at its end to a multiple of the
data-parallel size. Gathering for the ``fully_reshardable`` format leaves that padding out, but the
parameters are then looked up at offsets that include it. After a padded bucket, every moment and
weight is read some elements late and the checkpoint is silently wrong. Buckets whose sizes need no
padding, or a single bucket, hide the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_GATHER_METHOD = "get_parameter_state_dp_zero"


@contextmanager
def keep_bucket_padding(optimizer: Any) -> Iterator[None]:
    """Context manager in which an optimizer's gathered state keeps the padding of its buckets."""
    optimizers = [
        candidate
        for candidate in getattr(optimizer, "chained_optimizers", [optimizer])
        if hasattr(candidate, _GATHER_METHOD) and hasattr(candidate, "buffers")
    ]
    for member in optimizers:
        setattr(
            member,
            _GATHER_METHOD,
            partial(_gather_with_padding, member.buffers, getattr(member, _GATHER_METHOD)),
        )
    try:
        yield
    finally:
        for member in optimizers:
            delattr(member, _GATHER_METHOD)  # restores the method of the class


def _gather_with_padding(
    buffers: Sequence[Any], original: Callable[..., Any], **options: Any
) -> Any:
    """Call the optimizer's own method and insert the padding into every tensor that it returns."""
    state = original(**options)
    if state is None:
        return None
    for index, buffer in enumerate(buffers):
        bucket_sizes = [
            (bucket.numel_unpadded, bucket.grad_data.numel()) for bucket in buffer.buckets
        ]
        for tensors in state[index].values():
            for key, value in tensors.items():
                if isinstance(value, torch.Tensor):
                    tensors[key] = insert_padding(value, bucket_sizes)
    return state


def insert_padding(elements: torch.Tensor, bucket_sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Insert zeros after each bucket of a flat tensor.

    Args:
        elements: the elements of all buckets, one bucket after the other. Shape ``[elements]``.
        bucket_sizes: for each bucket, its number of elements without and with padding.

    Returns:
        Tensor of shape ``[padded elements]``.
    """
    if all(unpadded == padded for unpadded, padded in bucket_sizes[:-1]):
        return elements
    result = elements.new_zeros(sum(padded_size for _, padded_size in bucket_sizes))
    source = target = 0
    for unpadded_size, full in bucket_sizes:
        result[target : target + unpadded_size] = elements[source : source + unpadded_size]
        source += unpadded_size
        target += full
    return result
