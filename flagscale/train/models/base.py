"""What a family of models says and does: the seam behind ``family``.

The module of a family is imported by the launcher too, which has no torch: what needs torch is
imported inside the methods that ranks call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flagscale.config.arguments.families import Family, family
from flagscale.errors import ConfigError
from flagscale.estimate.arithmetic import flops_per_token

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flagscale.train.data.tokenizers import Tokenizer

KEYS = ("tokens", "labels", "loss_mask", "position_ids")
"""Tensors of a micro-batch, ``[micro_batch_size, seq_length]`` each."""


@dataclass(frozen=True)
class Chunk:
    """The part of a model that one module holds.

    ``vocabulary``: the padded one's size. ``stage``: its number among the chunks of a rank, None
    where a rank has one. ``first``, ``last``: it has the embedding, the head. ``fast``: it is to be
    built of the faster layers (:mod:`flagscale.train.models.fast`).
    """

    vocabulary: int
    stage: int | None
    first: bool
    last: bool
    fast: bool


@dataclass(frozen=True)
class DataKind:
    """The data sets that a family trains on, as megatron.core builds them.

    ``real`` reads indexed files and ``made_up`` reads none; ``config`` makes the configuration of
    both, from what all data sets are told and from ``options``. A sample is a mapping that has a
    tensor for each of ``keys``; ``length`` tokens of text go into one.
    """

    real: type
    made_up: type
    config: type
    length: int
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = KEYS


class ModelSpec(Family, ABC):
    """A family of models. ``args`` are resolved arguments throughout."""

    @abstractmethod
    def build(self, args: Namespace, config: TransformerConfig, chunk: Chunk) -> torch.nn.Module:
        """A chunk of the bare model, its weights not drawn yet: a ``MegatronModule``.

        Its attributes ``pre_process`` and ``post_process`` say whether it has embedding and head,
        ``share_embeddings_and_output_weights`` whether these are one; ``set_input_tensor`` gets
        what the stage before gave. Called with :meth:`inputs` it returns what the next stage takes,
        or on the last one each token's loss ``[micro-batch, sequence]``. What recomputes layers and
        compiles them finds megatron.core's ``TransformerBlock`` inside.

        Raises:
            ConfigError: it cannot be built so.
        """

    @abstractmethod
    def data(self, args: Namespace, tokenizer: Tokenizer) -> DataKind:
        """The data sets to train on.

        Raises:
            DataError: the tokenizer lacks what they need.
        """

    def vocabulary(self, tokenizer: Tokenizer) -> int:
        """How many tokens the model tells apart, of text that this tokenizer made."""
        return tokenizer.vocab_size

    def inputs(
        self, batch: Mapping[str, torch.Tensor], *, first: bool, last: bool
    ) -> Mapping[str, torch.Tensor | None]:
        """The arguments by name of a chunk's forward pass.

        Args:
            batch: a micro-batch of :meth:`data`, with context parallelism this rank's part.
            first: whether the chunk has the embedding.
            last: whether it has the head. Its losses are weighed by the batch's ``loss_mask``.
        """
        return {
            "input_ids": batch["tokens"] if first else None,
            "position_ids": batch["position_ids"] if first else None,
            "attention_mask": None,  # what a token attends to follows from the layers
            "labels": batch["labels"] if last else None,
        }

    def trial(self, args: Namespace, vocabulary: int) -> dict[str, torch.Tensor]:
        """A micro-batch by which layers are timed. ``vocabulary``: how many tokens there are."""
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
        norms: float | None,
        *,
        on_host: bool,
    ) -> None:
        """Draw the weights of a chunk, alike in every layout. ``norms``: the value that weights of
        norms start from; 1 if None. ``on_host``: alike on every kind of device, too."""
        from flagscale.train.models.initialize import initialize

        initialize(model, config, seed, norms=norms, on_host=on_host)

    def flops_per_token(self, args: Namespace, vocabulary: int) -> float | None:
        """Floating-point operations of training one token of the padded ``vocabulary``, over all
        ranks; None where nobody has counted them."""
        return flops_per_token(args, vocabulary) if self.transformer is not None else None


def spec_of(args: Namespace) -> ModelSpec:
    """How the family that ``args`` name is trained.

    Raises:
        ConfigError: there is none, or it is none to train.
    """
    found = family(args.family)
    if not isinstance(found, ModelSpec):
        where = f"{type(found).__module__}.{type(found).__qualname__}"
        raise ConfigError(f"family: {args.family}: {where} is no ModelSpec")
    return found
