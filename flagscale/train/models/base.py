"""Interface of a model family for training (:class:`ModelSpec`), selected by ``family``.

The launcher, which has no torch, imports the module of a family too. Therefore imports that need
torch are inside the methods that only ranks call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flagscale.config.arguments.rules.model_family import ModelFamily, get_model_family
from flagscale.errors import ConfigError
from flagscale.estimate.arithmetic import flops_per_token

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flagscale.train.data.tokenizers import Tokenizer

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
"""Keys of a micro-batch, which maps each of them to a tensor [b, s]."""
DOCUMENT_NUMBERS_KEY = "documents"
"""Key of an additional tensor [b, s] with the document number of each token. Micro-batches have it
if a token attends only to its own document (document masking).
"""


@dataclass(frozen=True)
class ChunkSpec:
    """Description of a model chunk: the layers of a pipeline stage, or of a virtual pipeline stage.

    Attributes:
        vocabulary: size of the padded vocabulary.
        vp_stage: virtual pipeline stage of the chunk on its rank, None if a rank has one chunk.
        first: whether the chunk has the embedding.
        last: whether the chunk has the output layer.
        optimized: whether to build it from this project's optimized layers
            (:mod:`flagscale.train.models.optimized`).
    """

    vocabulary: int
    vp_stage: int | None
    first: bool
    last: bool
    optimized: bool


@dataclass(frozen=True)
class DatasetSpec:
    """Datasets that a family trains on.

    megatron.core's ``BlendedMegatronDatasetBuilder`` builds them.

    Attributes:
        indexed: dataset class that reads indexed files.
        mock: dataset class that generates random data.
        config: configuration class of both, constructed from the common arguments and ``options``.
        length: number of text tokens in a sample.
        options: additional arguments of ``config``.
        keys: keys of a sample, which maps each of them to a tensor.
    """

    indexed: type
    mock: type
    config: type
    length: int
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = BATCH_KEYS


class ModelSpec(ModelFamily, ABC):
    """A model family: building, data and initialization of its models.

    In all methods ``args`` are arguments as :mod:`flagscale.config.arguments.derive` resolves them.
    """

    @abstractmethod
    def build(
        self, args: Namespace, config: TransformerConfig, chunk: ChunkSpec
    ) -> torch.nn.Module:
        """Build a chunk of the model, a ``MegatronModule`` with uninitialized weights.

        Requirements of the module:

        - ``pre_process`` and ``post_process`` state whether it has the embedding and the output
          layer, ``share_embeddings_and_output_weights`` whether their weights are tied.
        - ``set_input_tensor`` receives the output of the previous pipeline stage.
        - Called with :meth:`inputs`, it returns the input of the next stage, or on the last stage
          the loss of each token [b, s].
        - Recomputation and compilation look for megatron.core's ``TransformerBlock`` inside.

        Raises:
            ConfigError: the family does not support these arguments.
        """

    @abstractmethod
    def data(self, args: Namespace, tokenizer: Tokenizer) -> DatasetSpec:
        """Return the datasets to train on.

        Raises:
            DataError: the tokenizer lacks a required token.
        """

    def vocabulary(self, tokenizer: Tokenizer) -> int:
        """Return the number of tokens that the model distinguishes in text of this tokenizer."""
        return tokenizer.vocab_size

    def inputs(
        self, batch: Mapping[str, torch.Tensor], *, first: bool, last: bool
    ) -> Mapping[str, torch.Tensor | None]:
        """Return the keyword arguments of a chunk's forward pass.

        Args:
            batch: micro-batch of the datasets of :meth:`data`, this rank's part with context
                parallelism. If documents are masked it has an ``attention_mask``
                (:mod:`flagscale.train.models.document_mask`).
            first: whether the chunk has the embedding.
            last: whether the chunk has the output layer. Its losses are weighted by the
                ``loss_mask`` of the batch.
        """
        return {
            "input_ids": batch["tokens"] if first else None,
            # Later stages need them too, for rotary positions that are not consecutive.
            "position_ids": batch["position_ids"],
            # Without document masking the layers define the mask.
            "attention_mask": batch.get("attention_mask"),
            "labels": batch["labels"] if last else None,
        }

    def trial(self, args: Namespace, vocabulary: int) -> dict[str, torch.Tensor]:
        """Return a random micro-batch for timing layers.

        Its tokens are less than ``vocabulary``.
        """
        import torch

        shape = (args.micro_batch_size, args.seq_length)
        tokens = torch.randint(0, vocabulary, shape)
        return {
            "tokens": tokens,
            "labels": tokens.roll(-1, 1),
            "position_ids": torch.arange(args.seq_length).expand(shape).contiguous(),
            "loss_mask": torch.ones(shape),
        }

    def initialize(
        self,
        model: torch.nn.Module,
        config: TransformerConfig,
        seed: int,
        norm_init_value: float | None,
        *,
        on_host: bool,
    ) -> None:
        """Initialize the weights of a chunk, identically in every parallel layout.

        Args:
            model: unwrapped model chunk.
            config: the model's configuration.
            seed: seed of the run.
            norm_init_value: initial value of norm weights; 1 if None.
            on_host: draw in host memory, so that weights are identical on all device kinds.
        """
        from flagscale.train.models.initialize import initialize_weights

        initialize_weights(model, config, seed, norm_init_value=norm_init_value, on_host=on_host)

    def flops_per_token(self, args: Namespace, vocabulary: int) -> float | None:
        """Return the floating-point operations of training on one token, over all ranks.

        ``vocabulary`` is the size of the padded vocabulary. None if the family does not define
        them.
        """
        return flops_per_token(args, vocabulary) if self.transformer is not None else None


def get_model_spec(args: Namespace) -> ModelSpec:
    """Return the model family selected by ``args.family``.

    Raises:
        ConfigError: no family has this name, or it is not a :class:`ModelSpec`.
    """
    model_family = get_model_family(args.family)
    if not isinstance(model_family, ModelSpec):
        class_name = f"{type(model_family).__module__}.{type(model_family).__qualname__}"
        raise ConfigError(f"family: {args.family}: {class_name} is not a ModelSpec")
    return model_family
