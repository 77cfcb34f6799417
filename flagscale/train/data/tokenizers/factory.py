"""A tokenizer from its type's name and the files it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flagscale.errors import DataError
from flagscale.train.data.tokenizers import huggingface, plain, sentencepiece
from flagscale.train.data.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class TokenizerSpec:
    """What it takes to open a tokenizer; travels to worker processes instead of the tokenizer."""

    kind: str
    path: str | None = None
    vocab_size: int | None = None
    merges: str | None = None
    special_tokens: str | None = None


def _needs_path(spec: TokenizerSpec) -> Path:
    if not spec.path:
        raise DataError(f"tokenizer_type {spec.kind} needs tokenizer_path")
    return Path(spec.path)


def _gpt2(spec: TokenizerSpec) -> Tokenizer:
    if spec.merges:
        return huggingface.open_files(_needs_path(spec), Path(spec.merges))
    return _huggingface(spec)


def _huggingface(spec: TokenizerSpec) -> Tokenizer:
    return huggingface.open_directory(_needs_path(spec))


def _aquila(spec: TokenizerSpec) -> Tokenizer:
    if not spec.merges or not spec.special_tokens:
        raise DataError(f"tokenizer_type {spec.kind} needs merge_file and special_tokens_file")
    return huggingface.open_files(_needs_path(spec), Path(spec.merges), Path(spec.special_tokens))


def _sentencepiece(spec: TokenizerSpec) -> Tokenizer:
    return sentencepiece.SentencePieceTokenizer(_needs_path(spec))


def _null(spec: TokenizerSpec) -> Tokenizer:
    if not spec.vocab_size or spec.vocab_size < 1:
        raise DataError(
            f"tokenizer_type {spec.kind} needs vocab_size of at least 1, got {spec.vocab_size}"
        )
    return plain.NullTokenizer(spec.vocab_size)


def _bytes(_: TokenizerSpec) -> Tokenizer:
    return plain.ByteLevelTokenizer()


# The names that Megatron-LM and launchers on top of it use. Those ending in FS are what older
# YAMLs say; today each is a Hugging Face directory.
TOKENIZER_TYPES: Mapping[str, Callable[[TokenizerSpec], Tokenizer]] = {
    "HuggingFaceTokenizer": _huggingface,
    "Llama3TokenizerFS": _huggingface,
    "QwenTokenizerFS": _huggingface,
    "Qwen2TokenizerFS": _huggingface,
    "HFTokenizerFS": _huggingface,
    "HFTokenizersTokenizerFS": _huggingface,
    "GPT2BPETokenizer": _gpt2,
    "AquilaTokenizerFS": _aquila,
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "Llama2Tokenizer": _sentencepiece,
    "NullTokenizer": _null,
    "ByteLevelTokenizer": _bytes,
}


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """The tokenizer that ``spec`` describes.

    Raises:
        DataError: the type is unknown (the message names the nearest), a file is missing, or the
            files are not what the type reads.
    """
    opener = TOKENIZER_TYPES.get(spec.kind)
    if opener is None:
        known = list(TOKENIZER_TYPES)
        lowered = {name.lower(): name for name in known}
        near = get_close_matches(spec.kind.lower(), lowered, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(lowered[n] for n in near)}?" if near else None
        raise DataError(
            f"tokenizer_type {spec.kind!r} is unknown; known: {', '.join(known)}", hint=hint
        )
    return opener(spec)


def build_tokenizer(args: Any) -> Tokenizer:
    """The tokenizer that the training arguments name.

    ``args`` gives ``tokenizer_type``, ``tokenizer_path``, ``vocab_size`` and ``mock_data``. With
    mock data and no type, ids are counted: a :class:`NullTokenizer` of ``vocab_size``.

    Raises:
        DataError: see :func:`open_tokenizer`; also when the tokenizer's vocabulary is larger than
            the model's ``vocab_size``.
    """
    kind = getattr(args, "tokenizer_type", None)
    if not kind:
        if not getattr(args, "mock_data", False):
            raise DataError(
                f"tokenizer_type is not set; known: {', '.join(TOKENIZER_TYPES)}",
                hint="use HuggingFaceTokenizer with tokenizer_path for a directory with "
                "tokenizer.json",
            )
        kind = "NullTokenizer"
    vocab_size = getattr(args, "vocab_size", None)
    files = (getattr(args, name, None) for name in ("merge_file", "special_tokens_file"))
    spec = TokenizerSpec(kind, getattr(args, "tokenizer_path", None), vocab_size, *files)
    tokenizer = open_tokenizer(spec)
    # The null tokenizer's end of document is beyond vocab_size by definition.
    if kind != "NullTokenizer" and vocab_size and tokenizer.vocab_size > vocab_size:
        where = f" ({spec.path})" if spec.path else ""
        raise DataError(
            f"the tokenizer's vocabulary{where} has {tokenizer.vocab_size} entries, more than the "
            f"model's vocab_size {vocab_size}",
            hint="raise vocab_size, leave it out (the tokenizer's is taken), or use the tokenizer "
            "that the model was made for",
        )
    return tokenizer


def unlearned(tokenizer: Tokenizer, vocab_size: int | None) -> str | None:
    """What to say of a model whose vocabulary is mostly not the tokenizer's; None where it is."""
    if vocab_size is None or tokenizer.vocab_size * 2 > vocab_size:
        return None
    return (
        f"vocab_size {vocab_size:,} is more than twice the tokenizer's {tokenizer.vocab_size:,}: "
        "most of the model's tokens can never come; leave vocab_size out to take the tokenizer's"
    )
