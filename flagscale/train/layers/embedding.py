"""The vocabulary's embedding, adding the gradients of the rows it has used itself.

Autograd's gradient is as large as the whole table, mostly zeros, and is added as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch.nn import functional

from flagscale.train.layers.accumulating import add_rows, stand_in


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, accumulator: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, accumulator)
        return functional.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weight, accumulator = ctx.saved_tensors
        add_rows(accumulator, rows, gradient)
        return None, stand_in(weight), None


class AccumulatingEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Each rank holds some rows of the table."""

    accumulator: torch.Tensor | None = None

    def accumulated_weight(self) -> torch.nn.Parameter | None:
        weight: torch.nn.Parameter = self.weight
        return weight

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """``[batch, sequence, hidden]`` of the tokens ``[batch, sequence]``; with
        ``reduce_scatter_embeddings`` this rank's part of ``[sequence, batch, hidden]``."""
        group = self.tp_group
        split = group.size() > 1
        rows, foreign = input_, None
        if split:
            foreign = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            rows = (input_ - self.vocab_start_index).masked_fill(foreign, 0)
        if self.accumulator is None:
            output = functional.embedding(rows, self.weight)
        else:
            output = _Lookup.apply(  # type: ignore[no-untyped-call]
                rows, self.weight, self.accumulator
            )
        if foreign is not None:
            output = output.masked_fill(foreign[..., None], 0.0)
        if self.reduce_scatter_embeddings:
            output = output.transpose(0, 1).contiguous()
            whole: torch.Tensor = mappings.reduce_scatter_to_sequence_parallel_region(
                output, group=group
            )
        else:
            whole = mappings.reduce_from_tensor_model_parallel_region(output, group=group)
        return whole
