"""Construction of the training state: model chunks, optimizer and learning-rate scheduler."""

from __future__ import annotations

import argparse

from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.layout import pad_vocabulary
from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.device import Device
from flagscale.train.models.base import get_model_spec
from flagscale.train.models.provider import build_chunks
from flagscale.train.optim.setup import build_optimizer, build_scheduler
from flagscale.train.state import Progress, TrainState


def build_state(
    args: argparse.Namespace,
    config: TransformerConfig,
    vocabulary: int,
    device: Device,
    *,
    initialize_all: bool = True,
) -> TrainState:
    """Return the model, optimizer and scheduler with no training progress.

    Args:
        args: resolved arguments of this rank.
        config: the model's configuration.
        vocabulary: size of the padded vocabulary.
        device: device of the weights.
        initialize_all: whether to initialize all weights. If false, only weights that no checkpoint
            provides are initialized.
    """
    chunks = build_chunks(args, config, vocabulary, device, initialize_all=initialize_all)
    optimizer = build_optimizer(args, chunks, device)
    return TrainState(chunks, optimizer, build_scheduler(args, optimizer), Progress())


def vocabulary_size(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """Return the larger of ``vocab_size`` and the family's vocabulary size for this tokenizer."""
    return max(get_model_spec(args).vocabulary(tokenizer), args.vocab_size or 0)


def padded_vocabulary_size(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """Return the padded vocabulary size, which is the number of rows of the embedding."""
    return pad_vocabulary(vocabulary_size(args, tokenizer), vars(args))
