"""Matrices in a parameter, and their orthogonalized updates.

A parameter may be a part of a matrix, because tensor-parallel ranks share it; three matrices, those
of queries, keys and values; or one matrix per expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flagscale.config.arguments.rules.muon import BLOCKWISE, DISTRIBUTED, DUPLICATED
from flagscale.train.optim.newton_schulz import orthogonalize, update_scale

_BATCH_ELEMENTS = 1 << 26
"""Elements of experts' matrices that are orthogonalized at once, at least one matrix."""


@dataclass(frozen=True)
class MuonSettings:
    """Options of Muon; see the arguments of their names."""

    momentum: float = 0.95
    use_nesterov: bool = False
    num_ns_steps: int = 5
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0
    fp32_matmul_prec: str = "medium"
    tp_mode: str = DUPLICATED

    @classmethod
    def from_arguments(cls, values: Mapping[str, Any]) -> MuonSettings:
        """Return the options of arguments."""
        return cls(**{name: values[f"muon_{name}"] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class MatrixLayout:
    """The matrices of a parameter.

    Attributes:
        shape: shape of this rank's parameter, [rows, columns] or [experts, rows, columns].
        group: ranks among which each matrix is split; None if it is whole.
        split_dimension: dimension in which it is split, -2 or -1.
        row_blocks: rows of queries, keys and values of a query group, one after the other; None if
            the rows belong to one matrix.
    """

    shape: torch.Size
    group: dist.ProcessGroup | None = None
    split_dimension: int = -2
    row_blocks: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements of this rank's parameter."""
        return self.shape.numel()

    def cost(self) -> int:
        """Return a measure of the time of an orthogonalization."""
        return self.numel * min(self.shape[-2:])


@torch.no_grad()
def compute_update(
    direction: torch.Tensor, layout: MatrixLayout, settings: MuonSettings
) -> torch.Tensor:
    """Return the update of a parameter for a learning rate of 1. Collective over the layout's
    group.

    Args:
        direction: momentum of the parameter, fp32, with the shape of the layout.
        layout: the parameter's matrices.
        settings: options of Muon.
    """
    group = layout.group
    if group is None or settings.tp_mode == BLOCKWISE:
        return _update_matrices(direction, layout, settings, None)
    if settings.tp_mode == DISTRIBUTED:
        return _update_matrices(direction, layout, settings, group)
    parts = [torch.empty_like(direction) for _ in range(group.size())]
    dist.all_gather(parts, direction.contiguous(), group=group)
    whole = torch.cat(parts, dim=layout.split_dimension)
    del parts
    update = _update_matrices(whole, layout, settings, None)
    return update.chunk(group.size(), dim=layout.split_dimension)[group.rank()]


def _update_matrices(
    direction: torch.Tensor,
    layout: MatrixLayout,
    settings: MuonSettings,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    if layout.row_blocks is not None:
        columns = direction.shape[-1]
        groups = direction.view(-1, sum(layout.row_blocks), columns)
        blocks = torch.split(groups, list(layout.row_blocks), dim=1)
        updates = [
            _update_matrix(block.reshape(-1, columns), layout, settings, group).view_as(block)
            for block in blocks
        ]
        return torch.cat(updates, dim=1).view_as(direction)
    if direction.dim() == 2:
        return _update_matrix(direction, layout, settings, group)
    batch = max(_BATCH_ELEMENTS // direction[0].numel(), 1)
    return torch.cat(
        [_update_matrix(part, layout, settings, group) for part in torch.split(direction, batch)]
    )


def _update_matrix(
    matrix: torch.Tensor,
    layout: MatrixLayout,
    settings: MuonSettings,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return the scaled update of matrices, which are split over ``group`` unless it is None."""
    update = orthogonalize(
        matrix,
        steps=settings.num_ns_steps,
        precision=settings.fp32_matmul_prec,
        group=group,
        split_dimension=layout.split_dimension,
    )
    sizes = list(matrix.shape[-2:])
    if group is not None:
        sizes[layout.split_dimension] *= group.size()
    scale = update_scale(sizes[0], sizes[1], settings.scale_mode) * settings.extra_scale_factor
    return update.mul_(scale)
