"""The embedding in a checkpoint where the stages that hold it cut it in unlike parts.

A tensor's shards must all be of one size in a checkpoint. An embedding that is tied to the output
layer is held by both ends of the pipeline, which on unlike meshes have unlike tensor parallel
sizes: it is described in pieces so small that each rank holds a number of whole ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

_EMBEDDING = "embedding.word_embeddings.weight"


def in_pieces(sharded: dict[str, Any], pieces: int) -> None:
    """Describe the embedding among a model's sharded weights in ``pieces`` equal parts of rows."""
    for name, weight in sharded.items():
        if isinstance(weight, ShardedTensor) and weight.key == _EMBEDDING:
            rows = weight.global_shape[0] // pieces
            first = weight.global_offset[0] // rows
            sharded[name] = ShardedTensorFactory(
                weight.key,
                weight.data,
                partial(_split, rows=rows, first=first, pieces=pieces),
                torch.cat,
                weight.replica_id,
            )


def _split(
    key: str,
    weight: torch.Tensor,
    replica: Any,
    _: Any,
    *,
    rows: int,
    first: int,
    pieces: int,
) -> list[ShardedTensor]:
    return [
        ShardedTensor.from_rank_offsets(key, part, (0, first + i, pieces), replica_id=replica)
        for i, part in enumerate(torch.split(weight, rows))
    ]
