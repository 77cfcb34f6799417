"""Vocabulary-parallel embedding that accumulates only the gradients of the rows in use.

Autograd would compute a gradient of the size of the whole embedding table, mostly zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch.nn import functional

from flagscale.train.layers.wgrad_accumulation import add_rows, placeholder_gradient


class _Lookup(torch.autograd.Function):
    """Lookup whose backward pass adds to ``accumulator`` instead of returning a gradient."""

    @staticmethod
    def forward(
        ctx: Any, row_indices: torch.Tensor, weight: torch.Tensor, accumulator: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(row_indices, weight, accumulator)
        return functional.embedding(row_indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        row_indices, weight, accumulator = ctx.saved_tensors
        add_rows(accumulator, row_indices, gradient)
        # Data parallelism waits for a gradient from autograd. The placeholder's values are unused.
        return None, placeholder_gradient(weight), None


class AccumulatingEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Embedding whose rows are split over tensor-parallel ranks.

    Gradients are added to ``accumulator``, the weight's fp32 ``main_grad``, if it is set
    (:mod:`.wgrad_accumulation`).
    """

    accumulator: torch.Tensor | None = None

    def accumulated_weight(self) -> torch.nn.Parameter | None:
        """Return the weight whose gradient is added to ``accumulator``
        (:class:`.wgrad_accumulation.GradientAccumulating`).
        """
        weight: torch.nn.Parameter = self.weight
        return weight

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [b, s, h] of tokens [b, s].

        With ``reduce_scatter_embeddings``, return this rank's part of [s, b, h].
        """
        group = self.tp_group
        is_split = group.size() > 1
        row_indices, on_other_ranks = input_, None
        if is_split:
            on_other_ranks = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            row_indices = (input_ - self.vocab_start_index).masked_fill(on_other_ranks, 0)
        if self.accumulator is None:
            output = functional.embedding(row_indices, self.weight)
        else:
            output = _Lookup.apply(  # type: ignore[no-untyped-call]
                row_indices, self.weight, self.accumulator
            )
        if on_other_ranks is not None:
            output = output.masked_fill(on_other_ranks[..., None], 0.0)
        if self.reduce_scatter_embeddings:
            output = output.transpose(0, 1).contiguous()
            reduced: torch.Tensor = mappings.reduce_scatter_to_sequence_parallel_region(
                output, group=group
            )
        else:
            reduced = mappings.reduce_from_tensor_model_parallel_region(output, group=group)
        return reduced
