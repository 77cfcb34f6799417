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

_GATHER = "get_parameter_state_dp_zero"


@contextmanager
def keep_bucket_padding(optimizer: Any) -> Iterator[None]:
    """Context manager in which an optimizer's gathered state keeps the padding of its buckets."""
    optimizers = [
        member
        for member in getattr(optimizer, "chained_optimizers", [optimizer])
        if hasattr(member, _GATHER) and hasattr(member, "buffers")
    ]
    for part in optimizers:
        setattr(part, _GATHER, partial(_gather_with_padding, part.buffers, getattr(part, _GATHER)))
    try:
        yield
    finally:
        for part in optimizers:
            delattr(part, _GATHER)  # restores the method of the class


def _gather_with_padding(
    buffers: Sequence[Any], original: Callable[..., Any], **options: Any
) -> Any:
    state = original(**options)
    if state is None:
        return None
    for index, buffer in enumerate(buffers):
        sizes = [(bucket.numel_unpadded, bucket.grad_data.numel()) for bucket in buffer.buckets]
        for tensors in state[index].values():
            for key, value in tensors.items():
                if isinstance(value, torch.Tensor):
                    tensors[key] = insert_padding(value, sizes)
    return state


def insert_padding(flat: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Insert zeros after each bucket of a flat tensor.

    Args:
        flat: the elements of all buckets, one bucket after the other. Shape ``[elements]``.
        sizes: for each bucket, its number of elements in ``flat`` and in the result.
    """
    if all(unpadded == padded for unpadded, padded in sizes[:-1]):
        return flat
    result = flat.new_zeros(sum(full for _, full in sizes))
    source = target = 0
    for bare, full in sizes:
        result[target : target + bare] = flat[source : source + bare]
        source += bare
        target += full
    return result
