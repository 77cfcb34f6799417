"""A third-party package with a model family, which tests install as ``averages``.

A token is predicted from the mean of all tokens before it. The model has no layers of
megatron.core, and nothing that could be split over ranks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.train.models.base import ChunkSpec, DatasetSpec, ModelSpec

if TYPE_CHECKING:
    import torch

    from flagscale.train.data.tokenizers import Tokenizer


class Averages(ModelSpec):
    title = "a model of averages"

    def broken(self, values: Values) -> Iterator[Violation]:
        name = "untie_embeddings_and_output_weights"
        if not values[name]:
            yield name, f"false: {self.title} has an output of its own; write true"

    def build(self, args: Namespace, config: Any, chunk: ChunkSpec) -> torch.nn.Module:
        from averages_model import Model

        return Model(args, config, chunk.vocabulary)

    def data(self, args: Namespace, tokenizer: Tokenizer) -> DatasetSpec:
        from flagscale.train.models.gpt import Gpt

        return Gpt().data(args, tokenizer)
