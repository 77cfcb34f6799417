"""Content metadata of a checkpoint: options with which megatron.core shards its tensors.

The module imports no torch.
"""

from __future__ import annotations

from typing import Any

METADATA_KEY = "content_metadata"
"""Key in ``common.pt`` that megatron.core reads the metadata from."""
STORAGE_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of a checkpoint's ``metadata.json``."""


def sharding_metadata() -> dict[str, Any]:
    """Return the metadata that megatron.core's ``sharded_state_dict`` takes when saving.

    megatron.core's default cannot save a distributed optimizer, or allows only its data-parallel
    size to change. Layers of different types in one model need ``non_homogeneous_layers``.
    """
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "non_homogeneous_layers": True,
    }
