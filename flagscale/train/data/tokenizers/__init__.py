"""Tokenizers by Megatron-LM's type names, read from local files alone."""

from __future__ import annotations

from flagscale.train.data.tokenizers.base import Tokenizer
from flagscale.train.data.tokenizers.factory import (
    TOKENIZER_TYPES,
    TokenizerSpec,
    build_tokenizer,
    open_tokenizer,
    unlearned,
)

__all__ = [
    "TOKENIZER_TYPES",
    "Tokenizer",
    "TokenizerSpec",
    "build_tokenizer",
    "open_tokenizer",
    "unlearned",
]
