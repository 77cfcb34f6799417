"""megatron.core's GPT built of this project's faster parts."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.train.layers.compiling import compile_layers, why_not
from flagscale.train.layers.embedding import AccumulatingEmbedding
from flagscale.train.layers.fp8 import Recipe
from flagscale.train.layers.linear import AccumulatingColumnLinear, AccumulatingRowLinear
from flagscale.train.layers.loss import vocabulary_loss
from flagscale.train.layers.precision import use_fp8
from flagscale.train.layers.rotary import use_table

LINEARS: dict[type, type] = {
    ColumnParallelLinear: AccumulatingColumnLinear,
    RowParallelLinear: AccumulatingRowLinear,
}
"""What a layer specification is rewritten with."""


class FastGPT(GPTModel):  # type: ignore[misc]
    """The same parameters and the same function as megatron.core's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # What megatron.core builds without a specification; the classes differ in methods alone.
        if self.pre_process:
            _become(self.embedding.word_embeddings, VocabParallelEmbedding, AccumulatingEmbedding)
        if self.post_process:
            _become(self.output_layer, ColumnParallelLinear, AccumulatingColumnLinear)
        use_table(self)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Cross-entropy of each token ``[batch, sequence]``, in nats."""
        return vocabulary_loss(logits, labels, self.pg_collection.tp)


def _become(module: torch.nn.Module, old: type, new: type) -> None:
    if type(module) is old:
        module.__class__ = new


def finish(
    model: Any, args: argparse.Namespace, config: TransformerConfig, *, compiled: bool
) -> None:
    """Choose the precision of products, and compile layers where that is asked for and possible.

    Args:
        model: the bare model, in data parallelism already.
        args: resolved arguments.
        config: the model's configuration.
        compiled: whether the device gains by it.
    """
    if compiled and why_not(config) is None:
        compile_layers(model)
    if args.fp8:
        use_fp8(model, config, Recipe(args.fp8, args.fp8_recipe, args.fp8_wgrad))
