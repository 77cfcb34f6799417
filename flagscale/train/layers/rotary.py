"""Rotary positions (Su et al., "RoFormer", 2021) from a table of cosines and sines.

megatron.core hands the angles to every layer, which takes the cosine and sine of each of them;
compiled, for every head again. Here both are computed once a length.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import attention

_TABLE_DIMENSIONS = 5
"""Of a table; megatron.core's angles have one less."""


class RotaryTable(RotaryEmbedding):  # type: ignore[misc]
    """megatron.core's rotary embedding, whose result is a table instead of angles."""

    def forward(self, max_seq_len: int, *args: Any, **options: Any) -> torch.Tensor:
        """Cosines and sines ``[2, sequence, 1, 1, rotated width / 2]`` in fp32."""
        key = (max_seq_len, *args, *sorted(options.items()))
        tables: dict[Any, torch.Tensor] = self.__dict__.setdefault("_tables", {})
        if key not in tables:
            angles = super().forward(max_seq_len, *args, **options).float()
            half = angles[..., : angles.shape[-1] // 2]
            tables[key] = torch.stack((half.cos(), half.sin()))
        return tables[key]


class RotaryPair(torch.nn.Module):
    """Two rotary embeddings of one width, whose results lie side by side in the last dimension: of
    layers that see everything, and of those with a window."""

    def __init__(self, full: RotaryEmbedding, windowed: RotaryEmbedding) -> None:
        super().__init__()
        self.both = torch.nn.ModuleList((full, windowed))

    def get_rotary_seq_len(self, *args: Any) -> int:
        """megatron.core's answer to how many positions there are."""
        length: int = self.both[0].get_rotary_seq_len(*args)  # type: ignore[operator]
        return length

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        """Angles, or tables, as either of both would give them, with a last dimension of two."""
        return torch.cat([one(*args, **options) for one in self.both], -1)


def half_of_pair(positions: torch.Tensor, *, second: bool) -> torch.Tensor:
    """What the first or the second of a :class:`RotaryPair` gave."""
    return positions.chunk(2, -1)[second]


def rotate(
    tensor: torch.Tensor, positions: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    """``tensor [sequence, batch, heads, width]`` rotated by a table; by angles, as megatron.core
    does it. A width beyond the table's is left as it is."""
    if positions.dim() != _TABLE_DIMENSIONS:
        rotated: torch.Tensor = apply_rotary_pos_emb(tensor, positions, *args, **options)
        return rotated
    cosine, sine = positions[0], positions[1]
    width = 2 * cosine.shape[-1]
    first, second = tensor[..., :width].float().chunk(2, -1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    turned = turned.to(tensor.dtype)
    if width == tensor.shape[-1]:
        return turned
    return torch.cat((turned, tensor[..., width:]), -1)


def at(every: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The part of each token of a table ``[2, length, 1, 1, width]``, or of megatron.core's angles
    ``[length, 1, 1, width]``, for positions ``[batch, sequence]``: with sequence and batch in place
    of the length and the first one."""
    places = positions.t()
    if every.dim() == _TABLE_DIMENSIONS:
        return every[:, places, 0]
    return every[places, 0]


def use_table(model: Any) -> None:
    """Give ``model`` a table where its positions are plain rotary ones."""
    embedding: Any = getattr(model, "rotary_pos_emb", None)
    for one in embedding.both if isinstance(embedding, RotaryPair) else (embedding,):
        if type(one) is RotaryEmbedding and not one.rotary_interleaved:
            one.__class__ = RotaryTable
            attention.apply_rotary_pos_emb = rotate
