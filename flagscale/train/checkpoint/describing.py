"""How a checkpoint says in which way its tensors are described. No torch."""

from __future__ import annotations

from typing import Any

METADATA_KEY = "content_metadata"  # where megatron.core looks for it
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""A checkpoint's metadata.json."""


def sharding_metadata() -> dict[str, Any]:
    """How tensors are described. The default would not save a distributed optimizer at all, or
    let only the data-parallel size change; other types of layers need their own names."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "non_homogeneous_layers": True,
    }
