"""Sharding of the embedding when pipeline stages have different tensor-parallel sizes.

All shards of a tensor in a checkpoint must have the same size. An embedding that is tied to the
output layer is on both ends of the pipeline. On heterogeneous meshes, these have different
tensor-parallel sizes. The embedding is therefore saved in shards so small that each rank holds a
whole number of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

_EMBEDDING = "embedding.word_embeddings.weight"


def shard_embedding_rows(state_dict: dict[str, Any], shard_count: int) -> None:
    """Replace the embedding in a sharded state dict by shards of equally many rows.

    Args:
        state_dict: sharded state dict of one model chunk; modified in place.
        shard_count: number of shards of the whole embedding.
    """
    for name, weight in state_dict.items():
        if isinstance(weight, ShardedTensor) and weight.key == _EMBEDDING:
            rows_per_shard = weight.global_shape[0] // shard_count
            first_shard = weight.global_offset[0] // rows_per_shard
            state_dict[name] = ShardedTensorFactory(
                weight.key,
                weight.data,
                partial(
                    _split_rows,
                    rows_per_shard=rows_per_shard,
                    first_shard=first_shard,
                    shard_count=shard_count,
                ),
                torch.cat,
                weight.replica_id,
            )


def _split_rows(
    key: str,
    weight: torch.Tensor,
    replica_id: Any,
    _: Any,
    *,
    rows_per_shard: int,
    first_shard: int,
    shard_count: int,
) -> list[ShardedTensor]:
    """Split a rank's part of the embedding into shards of ``rows_per_shard`` rows."""
    return [
        ShardedTensor.from_rank_offsets(
            key, shard, (0, first_shard + i, shard_count), replica_id=replica_id
        )
        for i, shard in enumerate(torch.split(weight, rows_per_shard))
    ]
