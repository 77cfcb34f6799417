"""Builds what is trained: model, optimizer and schedule."""

from __future__ import annotations

import argparse

from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.vocabulary import padded_vocabulary
from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.device import Device
from flagscale.train.models.base import spec_of
from flagscale.train.models.provider import build_chunks
from flagscale.train.optim.setup import build_optimizer, build_scheduler
from flagscale.train.state import Progress, TrainState


def build_state(
    args: argparse.Namespace,
    config: TransformerConfig,
    vocabulary: int,
    device: Device,
    *,
    draw: bool = True,
) -> TrainState:
    """Model, optimizer and schedule; nothing done yet. The model has its initial weights, but
    those that are to come from elsewhere where ``draw`` is false."""
    chunks = build_chunks(args, config, vocabulary, device, draw=draw)
    optimizer = build_optimizer(args, chunks, device)
    return TrainState(chunks, optimizer, build_scheduler(args, optimizer), Progress())


def vocabulary_size(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """The larger of ``vocab_size`` and what the family needs with the tokenizer, not padded."""
    return max(spec_of(args).vocabulary(tokenizer), args.vocab_size or 0)


def model_vocabulary(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """The embedding's rows."""
    return padded_vocabulary(vocabulary_size(args, tokenizer), vars(args))
