"""A package of somebody else's: a family of models, which tests install as ``averages``.

A token's prediction is made of the mean of all tokens before it. There are no layers of
megatron.core's in it, and so nothing that could be split over ranks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flagscale.config.arguments.precision import Broken, Values
from flagscale.train.models.base import Chunk, DataKind, ModelSpec

if TYPE_CHECKING:
    import torch

    from flagscale.train.data.tokenizers import Tokenizer


class Averages(ModelSpec):
    title = "a model of averages"

    def broken(self, values: Values) -> Iterator[Broken]:
        name = "untie_embeddings_and_output_weights"
        if not values[name]:
            yield name, f"false: {self.title} has an output of its own; write true"

    def build(self, args: Namespace, config: Any, chunk: Chunk) -> torch.nn.Module:
        from averages_model import Model

        return Model(args, config, chunk.vocabulary)

    def data(self, args: Namespace, tokenizer: Tokenizer) -> DataKind:
        from flagscale.train.models.gpt import Gpt

        return Gpt().data(args, tokenizer)
