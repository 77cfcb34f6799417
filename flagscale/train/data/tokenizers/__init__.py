"""Tokenizers by Megatron-LM's type names, read from local files only.

``build_tokenizer`` opens the tokenizer that the training arguments name.
"""

from __future__ import annotations

from flagscale.train.data.tokenizers.base import Tokenizer
from flagscale.train.data.tokenizers.factory import (
    TOKENIZER_TYPES,
    TokenizerSpec,
    build_tokenizer,
    describe_unused_vocabulary,
    open_tokenizer,
)

__all__ = [
    "TOKENIZER_TYPES",
    "Tokenizer",
    "TokenizerSpec",
    "build_tokenizer",
    "describe_unused_vocabulary",
    "open_tokenizer",
]
