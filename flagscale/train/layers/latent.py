"""Multi-latent attention on megatron.core's own layers, without Transformer Engine.

The part of keys that is turned by positions is one for all heads, and each tensor-parallel rank
turns it for its own heads: its gradient is the sum over ranks. megatron.core leaves that sum to
Transformer Engine's projection, which every rank has whole. Here ranks compute parts of the latent
numbers, as the heads' projections are split, and gather them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from flagscale.train.layers import collectives


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


class KeyDownProjection(ColumnParallelLinear):  # type: ignore[misc]
    """Latent numbers of keys and values, and behind them the ``shared`` part of all heads' keys."""

    shared: int

    def forward(self, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
        """``[sequence, batch, hidden]`` to ``[sequence, batch, all latent numbers]``, both of this
        rank's part of the sequence with sequence parallelism."""
        output, bias = super().forward(hidden, *args, **options)
        group = self.tp_group
        if group.size() == 1:
            return output, bias
        whole = mappings.gather_from_tensor_model_parallel_region(output, group=group)
        if self.sequence_parallel:
            # megatron.core gathers the keys' part again, and so adds up its gradient.
            return mappings.scatter_to_sequence_parallel_region(whole, group=group), bias
        latent, keys = whole.split([whole.shape[-1] - self.shared, self.shared], -1)
        keys = _Shared.apply(keys, collectives.name_of(group))  # type: ignore[no-untyped-call]
        return torch.cat((latent, keys), -1), bias


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """megatron.core's, with the keys' gradient summed."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        _believe_no_stand_in()
        super().__init__(config, *args, **options)
        down = self.linear_kv_down_proj
        down.__class__, down.shared = KeyDownProjection, config.qk_pos_emb_head_dim
        if config.q_lora_rank is not None and not config.sequence_parallel:
            # megatron.core adds up what ranks find for a norm of this name, which is for parts of
            # heads elsewhere. Here each finds all of it.
            self.q_layernorm.weight.average_gradients_across_tp_domain = True


def _believe_no_stand_in() -> None:
    """Where Transformer Engine is not installed megatron.core has stand-ins for its classes, takes
    them for real ones, and asks whether a layer is an instance of them."""
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
