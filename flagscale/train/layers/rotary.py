"""Rotary position embedding (Su et al., "RoFormer", 2021) from a table of cosines and sines.

megatron.core passes rotation angles to every layer. Each layer computes their cosine and sine, if
compiled even once per head. Here a table of both is computed once per sequence length.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import attention

_TABLE_DIMENSIONS = 5
"""Number of dimensions of a table; megatron.core's angles have one less."""


class RotaryTable(RotaryEmbedding):  # type: ignore[misc]
    """megatron.core's rotary embedding that returns a table instead of angles."""

    def forward(self, max_seq_len: int, *args: Any, **options: Any) -> torch.Tensor:
        """Return cosines and sines [2, s, 1, 1, rotated width / 2] in fp32."""
        key = (max_seq_len, *args, *sorted(options.items()))
        tables: dict[Any, torch.Tensor] = self.__dict__.setdefault("_tables", {})
        if key not in tables:
            angles = super().forward(max_seq_len, *args, **options).float()
            # megatron.core repeats every angle in the second half.
            half = angles[..., : angles.shape[-1] // 2]
            tables[key] = torch.stack((half.cos(), half.sin()))
        return tables[key]


class RotaryPair(torch.nn.Module):
    """Rotary embeddings of full-attention layers and of sliding-window layers.

    Both have the same width. Their results are concatenated along the last dimension.
    """

    def __init__(self, full_attention: RotaryEmbedding, sliding_window: RotaryEmbedding) -> None:
        super().__init__()
        self.embeddings = torch.nn.ModuleList((full_attention, sliding_window))

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Return the number of positions, as megatron.core's embedding computes it."""
        length: int = self.embeddings[0].get_rotary_seq_len(*args)  # type: ignore[operator]
        return length

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        """Return angles or tables with a doubled last dimension."""
        return torch.cat([embedding(*args, **options) for embedding in self.embeddings], -1)


def select_rotary_half(pair: torch.Tensor, *, second: bool) -> torch.Tensor:
    """Return the part of a :class:`RotaryPair`'s result that is its first or second embedding's."""
    return pair.chunk(2, -1)[second]


def apply_rotary(
    tensor: torch.Tensor, table: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    """Rotate ``tensor`` [s, b, heads, d] by a ``table`` of cosines and sines, or by angles.

    Dimensions beyond the table's width are not rotated.
    """
    if table.dim() != _TABLE_DIMENSIONS:  # angles, as megatron.core passes them
        rotated: torch.Tensor = apply_rotary_pos_emb(tensor, table, *args, **options)
        return rotated
    cosine, sine = table[0], table[1]
    width = 2 * cosine.shape[-1]
    first_half, second_half = tensor[..., :width].float().chunk(2, -1)
    rotated_part = torch.cat(
        (first_half * cosine - second_half * sine, second_half * cosine + first_half * sine), -1
    )
    rotated_part = rotated_part.to(tensor.dtype)
    if width == tensor.shape[-1]:
        return rotated_part
    return torch.cat((rotated_part, tensor[..., width:]), -1)


def select_positions(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Select the entries of a table or of angles for the positions of each token.

    Args:
        table: [2, length, 1, 1, width], or angles [length, 1, 1, width].
        positions: [b, s].

    Returns:
        [2, s, b, 1, width], or angles [s, b, 1, width].
    """
    indices = positions.t()
    if table.dim() == _TABLE_DIMENSIONS:
        return table[:, indices, 0]
    return table[indices, 0]


def use_rotary_tables(model: Any) -> None:
    """Use tables in ``model`` if it has a rotary embedding that is not interleaved."""
    rotary: Any = getattr(model, "rotary_pos_emb", None)
    for embedding in rotary.embeddings if isinstance(rotary, RotaryPair) else (rotary,):
        if type(embedding) is RotaryEmbedding and not embedding.rotary_interleaved:
            embedding.__class__ = RotaryTable
            attention.apply_rotary_pos_emb = apply_rotary
