"""Multi-latent attention (MLA) on megatron.core's local layers, without Transformer Engine.

The rotary part of keys is shared by all heads, and each tensor-parallel rank applies it to its own
heads, so its gradient is a sum over ranks. megatron.core leaves that sum to Transformer Engine's
down-projection, which is replicated. Here the down-projection is column-parallel: ranks compute
parts of the latent vector and gather them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from flagscale.train.layers import collectives
from flagscale.train.layers.linear import AccumulatingColumnLinear


class _AllReduceGradient(torch.autograd.Function):
    """Identity whose backward pass all-reduces the gradient.

    It is used for a tensor that each rank uses for its own heads. megatron.core's version has no
    effect if the gradient is a view of another tensor, of which it then reduces a copy.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return collectives.wait(collectives.start_all_reduce(gradient, ctx.group)), None


class _GatherLatent(torch.autograd.Function):
    """All-gather along the last dimension. The gradient is equal on all ranks.

    With ``sequence_parallel`` each rank keeps its part of the sequence, and the gradient of that
    part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        rank: int,
        group_size: int,
        group: str,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        ctx.rank, ctx.group_size, ctx.group = rank, group_size, group
        ctx.sequence_parallel = sequence_parallel
        gathered = collectives.wait(collectives.start_all_gather(tensor, group_size, group))
        rank_outputs = list(gathered.chunk(group_size))
        return torch.cat(
            [output.chunk(group_size)[rank] for output in rank_outputs]
            if sequence_parallel
            else rank_outputs,
            -1,
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.sequence_parallel:
            gradient = collectives.wait(
                collectives.start_all_gather(gradient, ctx.group_size, ctx.group)
            )
        return gradient.chunk(ctx.group_size, -1)[ctx.rank], None, None, None, None


class QueryDownProjection(ColumnParallelLinear):  # type: ignore[misc]
    """Column-parallel down-projection with a gathered output.

    megatron.core's own gathering warns on one rank, which torch cannot trace.
    """

    def forward(self, input_: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Project [s, b, h] to the whole latent vector [s, b, latent].

        With sequence parallelism both are this rank's part of the sequence.
        """
        output, bias = super().forward(input_, *args, **options)
        group = self.tp_group
        if group.size() > 1:
            output = _GatherLatent.apply(  # type: ignore[no-untyped-call]
                output, group.rank(), group.size(), collectives.get_group_name(group),
                self.sequence_parallel,
            )  # fmt: skip
        return output, bias


class KeyDownProjection(QueryDownProjection):
    """Down-projection to the latent vector of keys and values, followed by the keys' rotary part.

    ``rotary_width`` is the width of the rotary part, which all heads share.
    """

    rotary_width: int

    def forward(self, input_: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Project [s, b, h] to [s, b, latent + rotary_width]."""
        gathered, bias = super().forward(input_, *args, **options)
        # With sequence parallelism megatron.core gathers the rotary part and reduces its gradient.
        if self.tp_group.size() == 1 or self.sequence_parallel:
            return gathered, bias
        latent, rotary_keys = gathered.split(
            [gathered.shape[-1] - self.rotary_width, self.rotary_width], -1
        )
        rotary_keys = _AllReduceGradient.apply(  # type: ignore[no-untyped-call]
            rotary_keys, collectives.get_group_name(self.tp_group)
        )
        return torch.cat((latent, rotary_keys), -1), bias


class AccumulatingQueryDownProjection(QueryDownProjection, AccumulatingColumnLinear):
    """:class:`QueryDownProjection` that accumulates its weight gradient."""


class AccumulatingKeyDownProjection(KeyDownProjection, AccumulatingColumnLinear):
    """:class:`KeyDownProjection` that accumulates its weight gradient."""


class LocalMLASelfAttention(MLASelfAttention):  # type: ignore[misc]
    """megatron.core's MLA with column-parallel down-projections."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        _disable_te_placeholders()
        super().__init__(config, *args, **options)
        kv_down_proj = self.linear_kv_down_proj
        kv_down_proj.rotary_width = config.qk_pos_emb_head_dim
        # megatron.core always builds its own class for these two. The classes differ only in
        # methods.
        accumulating = isinstance(self.linear_kv_up_proj, AccumulatingColumnLinear)
        kv_down_proj.__class__ = (
            AccumulatingKeyDownProjection if accumulating else KeyDownProjection
        )
        if config.q_lora_rank is not None:
            self.linear_q_down_proj.__class__ = (
                AccumulatingQueryDownProjection if accumulating else QueryDownProjection
            )
        if config.q_lora_rank is not None and not config.sequence_parallel:
            # megatron.core sums the gradients of a norm with this name, which elsewhere normalizes
            # parts of heads. Here every rank computes the whole gradient.
            self.q_layernorm.weight.average_gradients_across_tp_domain = True


def _disable_te_placeholders() -> None:
    """Disable megatron.core's use of Transformer Engine classes if they are placeholders.

    Without Transformer Engine, megatron.core treats placeholders as classes in isinstance checks.
    """
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
