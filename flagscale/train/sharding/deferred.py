"""Construction of a model without memory for its weights.

A model whose weights are sharded may be larger than a device. Its matrices are therefore created
without memory, and :class:`.bucket.ShardedBucket` allocates and initializes those of one layer at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class DeferredAllocation(TorchFunctionMode):
    """Context manager in which ``torch.empty`` creates matrices without memory.

    It applies to calls that name a device, as those for the weights of layers do.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if func is torch.empty and options.get("device") is not None and result.dim() > 1:
            result.untyped_storage().resize_(0)
        return result


def identify_storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which views share. The address of its memory is no
    identity: it is zero if the memory was released.
    """
    return int(tensor.untyped_storage()._cdata)


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory."""
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0
