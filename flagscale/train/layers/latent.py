"""Multi-latent attention on megatron.core's own layers, without Transformer Engine.

The part of keys that is turned by positions is one for all heads, and each tensor-parallel rank
turns it for its own heads: its gradient is the sum over ranks. megatron.core leaves that sum to
Transformer Engine's projection, which every rank has whole. Here ranks compute parts of the latent
numbers, as the heads' projections are split, and gather them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from flagscale.train.layers import collectives
from flagscale.train.layers.linear import AccumulatingColumnLinear


class _Shared(torch.autograd.Function):
    """What every rank has, and uses for its own heads: gradients are summed over the ranks.

    megatron.core's own takes the sum of a copy where a gradient is a part of another tensor.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return collectives.wait(collectives.start_all_reduce(gradient, ctx.group)), None


class _Whole(torch.autograd.Function):
    """Ranks' parts of the last dimension as one, whose gradient every rank has; with ``parted``
    each rank keeps its part of the sequence, and has the gradient of that."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, rank: int, size: int, group: str, parted: bool
    ) -> torch.Tensor:
        ctx.rank, ctx.size, ctx.group, ctx.parted = rank, size, group, parted
        gathered = collectives.wait(collectives.start_all_gather(tensor, size, group))
        parts = list(gathered.chunk(size))
        return torch.cat([part.chunk(size)[rank] for part in parts] if parted else parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.parted:
            gradient = collectives.wait(collectives.start_all_gather(gradient, ctx.size, ctx.group))
        return gradient.chunk(ctx.size, -1)[ctx.rank], None, None, None, None


class QueryDownProjection(ColumnParallelLinear):  # type: ignore[misc]
    """Latent numbers, of which every rank computes some and has all.

    megatron.core gathers a projection's parts itself where they are parts, with a warning on one
    rank, which torch cannot trace.
    """

    def forward(self, input_: torch.Tensor, *args: Any, **options: Any) -> Any:
        """``[sequence, batch, hidden]`` to ``[sequence, batch, all latent numbers]``, both of this
        rank's part of the sequence with sequence parallelism."""
        output, bias = super().forward(input_, *args, **options)
        group = self.tp_group
        if group.size() > 1:
            output = _Whole.apply(  # type: ignore[no-untyped-call]
                output, group.rank(), group.size(), collectives.name_of(group),
                self.sequence_parallel,
            )  # fmt: skip
        return output, bias


class KeyDownProjection(QueryDownProjection):
    """Latent numbers of keys and values, and behind them the ``shared`` part of all heads' keys."""

    shared: int

    def forward(self, input_: torch.Tensor, *args: Any, **options: Any) -> Any:
        """As the queries' are."""
        whole, bias = super().forward(input_, *args, **options)
        # With sequence parallelism megatron.core gathers the keys' part, and adds up its gradient.
        if self.tp_group.size() == 1 or self.sequence_parallel:
            return whole, bias
        latent, keys = whole.split([whole.shape[-1] - self.shared, self.shared], -1)
        keys = _Shared.apply(  # type: ignore[no-untyped-call]
            keys, collectives.name_of(self.tp_group)
        )
        return torch.cat((latent, keys), -1), bias


class AccumulatingQueryDownProjection(QueryDownProjection, AccumulatingColumnLinear):
    """The same of the faster layer."""


class AccumulatingKeyDownProjection(KeyDownProjection, AccumulatingColumnLinear):
    """The same of the faster layer."""


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """megatron.core's, with the keys' gradient summed."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        _believe_no_stand_in()
        super().__init__(config, *args, **options)
        down = self.linear_kv_down_proj
        down.shared = config.qk_pos_emb_head_dim
        # megatron.core takes its own class for these two alone. Classes differ in methods alone.
        faster = isinstance(self.linear_kv_up_proj, AccumulatingColumnLinear)
        down.__class__ = AccumulatingKeyDownProjection if faster else KeyDownProjection
        if config.q_lora_rank is not None:
            self.linear_q_down_proj.__class__ = (
                AccumulatingQueryDownProjection if faster else QueryDownProjection
            )
        if config.q_lora_rank is not None and not config.sequence_parallel:
            # megatron.core adds up what ranks find for a norm of this name, which is for parts of
            # heads elsewhere. Here each finds all of it.
            self.q_layernorm.weight.average_gradients_across_tp_domain = True


def _believe_no_stand_in() -> None:
    """Where Transformer Engine is not installed megatron.core has stand-ins for its classes, takes
    them for real ones, and asks whether a layer is an instance of them."""
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
