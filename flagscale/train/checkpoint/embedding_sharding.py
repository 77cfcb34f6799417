"""Sharding of the embedding when pipeline stages have different tensor-parallel sizes.

All shards of a tensor in a checkpoint must have the same size. An embedding that is tied to the
output layer lives on both ends of the pipeline, which have different tensor-parallel sizes on
heterogeneous meshes. It is saved in shards so small that each rank holds a whole number of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

_EMBEDDING = "embedding.word_embeddings.weight"


def shard_embedding_rows(sharded: dict[str, Any], shards: int) -> None:
    """Replace the embedding in a sharded state dict by ``shards`` shards of equally many rows.

    Args:
        sharded: sharded state dict of one model chunk; modified in place.
        shards: number of shards of the whole embedding.
    """
    for name, weight in sharded.items():
        if isinstance(weight, ShardedTensor) and weight.key == _EMBEDDING:
            rows = weight.global_shape[0] // shards
            first_shard = weight.global_offset[0] // rows
            sharded[name] = ShardedTensorFactory(
                weight.key,
                weight.data,
                partial(_split_rows, rows=rows, first_shard=first_shard, shards=shards),
                torch.cat,
                weight.replica_id,
            )


def _split_rows(
    key: str,
    weight: torch.Tensor,
    replica: Any,
    _: Any,
    *,
    rows: int,
    first_shard: int,
    shards: int,
) -> list[ShardedTensor]:
    return [
        ShardedTensor.from_rank_offsets(key, part, (0, first_shard + i, shards), replica_id=replica)
        for i, part in enumerate(torch.split(weight, rows))
    ]
