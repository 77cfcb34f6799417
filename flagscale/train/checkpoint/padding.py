"""A correction of megatron.core's distributed optimizer while its state is gathered for saving.

It lays parameters out in a buffer of buckets, each padded at its end to a multiple of the
data-parallel size. Gathering for the ``fully_reshardable`` format leaves that padding out, but
parameters are then looked up at their places *with* padding: after a padded bucket every moment
and weight is read some elements late, and the checkpoint is silently wrong. Buckets of sizes that
need no padding, or a single bucket, hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_GATHER = "get_parameter_state_dp_zero"


@contextmanager
def padded_buckets(optimizer: Any) -> Iterator[None]:
    """A context in which an optimizer's gathered state keeps the padding of its buckets."""
    parts = [
        part
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
        if hasattr(part, _GATHER) and hasattr(part, "buffers")
    ]
    for part in parts:
        setattr(part, _GATHER, partial(_gather, part.buffers, getattr(part, _GATHER)))
    try:
        yield
    finally:
        for part in parts:
            delattr(part, _GATHER)  # the class's own shows again


def _gather(buffers: Sequence[Any], original: Callable[..., Any], **options: Any) -> Any:
    state = original(**options)
    if state is None:
        return None
    for index, buffer in enumerate(buffers):
        sizes = [(bucket.numel_unpadded, bucket.grad_data.numel()) for bucket in buffer.buckets]
        for tensors in state[index].values():
            for key, value in tensors.items():
                if isinstance(value, torch.Tensor):
                    tensors[key] = spread(value, sizes)
    return state


def spread(flat: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Put zeros after each bucket of a flat tensor.

    Args:
        flat: the buckets' elements, one bucket after the other.
        sizes: of each bucket, its elements in ``flat`` and in the result.
    """
    if all(bare == full for bare, full in sizes[:-1]):
        return flat
    whole = flat.new_zeros(sum(full for _, full in sizes))
    source = target = 0
    for bare, full in sizes:
        whole[target : target + bare] = flat[source : source + bare]
        source += bare
        target += full
    return whole
