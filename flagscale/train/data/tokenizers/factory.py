"""Creation of tokenizers from a type name and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flagscale.errors import DataError
from flagscale.train.data.tokenizers import huggingface, plain, sentencepiece
from flagscale.train.data.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class TokenizerSpec:
    """Parameters to open a tokenizer; sent to worker processes instead of the tokenizer.

    Attributes:
        tokenizer_type: a key of :data:`TOKENIZER_TYPES`.
        path: directory or file of the tokenizer (``tokenizer_path``).
        vocab_size: number of token ids of a NullTokenizer, without the one that ends a document.
        merge_file: path of ``merges.txt`` if it is not in the tokenizer's directory.
        special_tokens_file: path of Aquila's file of special tokens.
    """

    tokenizer_type: str
    path: str | None = None
    _: KW_ONLY
    vocab_size: int | None = None
    merge_file: str | None = None
    special_tokens_file: str | None = None


def _require_path(spec: TokenizerSpec) -> Path:
    if not spec.path:
        raise DataError(f"tokenizer_type {spec.tokenizer_type} needs tokenizer_path")
    return Path(spec.path)


def _open_gpt2(spec: TokenizerSpec) -> Tokenizer:
    if spec.merge_file:
        return huggingface.open_files(_require_path(spec), Path(spec.merge_file))
    return _open_huggingface(spec)


def _open_huggingface(spec: TokenizerSpec) -> Tokenizer:
    return huggingface.open_directory(_require_path(spec))


def _open_aquila(spec: TokenizerSpec) -> Tokenizer:
    if not spec.merge_file or not spec.special_tokens_file:
        raise DataError(
            f"tokenizer_type {spec.tokenizer_type} needs merge_file and special_tokens_file"
        )
    return huggingface.open_files(
        _require_path(spec), Path(spec.merge_file), Path(spec.special_tokens_file)
    )


def _open_sentencepiece(spec: TokenizerSpec) -> Tokenizer:
    return sentencepiece.SentencePieceTokenizer(_require_path(spec))


def _open_null(spec: TokenizerSpec) -> Tokenizer:
    if not spec.vocab_size or spec.vocab_size < 1:
        raise DataError(
            f"tokenizer_type {spec.tokenizer_type} needs vocab_size of at least 1, got "
            f"{spec.vocab_size}"
        )
    return plain.NullTokenizer(spec.vocab_size)


def _open_byte_level(_: TokenizerSpec) -> Tokenizer:
    return plain.ByteLevelTokenizer()


# Names of Megatron-LM and of launchers on top of it. Older YAML files use the names ending in FS:
# Hugging Face directories, except for Aquila's, which has separate files.
TOKENIZER_TYPES: Mapping[str, Callable[[TokenizerSpec], Tokenizer]] = {
    "HuggingFaceTokenizer": _open_huggingface,
    "Llama3TokenizerFS": _open_huggingface,
    "QwenTokenizerFS": _open_huggingface,
    "Qwen2TokenizerFS": _open_huggingface,
    "HFTokenizerFS": _open_huggingface,
    "HFTokenizersTokenizerFS": _open_huggingface,
    "GPT2BPETokenizer": _open_gpt2,
    "AquilaTokenizerFS": _open_aquila,
    "SentencePieceTokenizer": _open_sentencepiece,
    "GPTSentencePieceTokenizer": _open_sentencepiece,
    "Llama2Tokenizer": _open_sentencepiece,
    "NullTokenizer": _open_null,
    "ByteLevelTokenizer": _open_byte_level,
}


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Open the tokenizer that ``spec`` describes.

    Raises:
        DataError: the type is unknown (the message suggests similar ones), a file is missing, or
            the files do not have the type's format.
    """
    opener = TOKENIZER_TYPES.get(spec.tokenizer_type)
    if opener is None:
        names = list(TOKENIZER_TYPES)
        names_by_lower_case = {name.lower(): name for name in names}
        similar_names = get_close_matches(
            spec.tokenizer_type.lower(), names_by_lower_case, n=3, cutoff=0.5
        )
        hint = (
            f"did you mean {', '.join(names_by_lower_case[n] for n in similar_names)}?"
            if similar_names
            else None
        )
        raise DataError(
            f"tokenizer_type {spec.tokenizer_type!r} is unknown; known: {', '.join(names)}",
            hint=hint,
        )
    return opener(spec)


def build_tokenizer(args: Any) -> Tokenizer:
    """Open the tokenizer that the training arguments name.

    ``args`` has ``tokenizer_type``, ``tokenizer_path``, ``vocab_size`` and ``mock_data``. With mock
    data and no type, it is a :class:`NullTokenizer` of ``vocab_size``.

    Raises:
        DataError: see :func:`open_tokenizer`; also if the tokenizer's vocabulary is larger than the
            model's ``vocab_size``.
    """
    tokenizer_type = getattr(args, "tokenizer_type", None)
    if not tokenizer_type:
        if not getattr(args, "mock_data", False):
            raise DataError(
                f"tokenizer_type is not set; known: {', '.join(TOKENIZER_TYPES)}",
                hint="use HuggingFaceTokenizer with tokenizer_path for a directory with "
                "tokenizer.json",
            )
        tokenizer_type = "NullTokenizer"
    vocab_size = getattr(args, "vocab_size", None)
    spec = TokenizerSpec(
        tokenizer_type,
        getattr(args, "tokenizer_path", None),
        vocab_size=vocab_size,
        merge_file=getattr(args, "merge_file", None),
        special_tokens_file=getattr(args, "special_tokens_file", None),
    )
    tokenizer = open_tokenizer(spec)
    # The null tokenizer's end-of-document id is vocab_size: its vocabulary is larger by one.
    if tokenizer_type != "NullTokenizer" and vocab_size and tokenizer.vocab_size > vocab_size:
        location = f" ({spec.path})" if spec.path else ""
        raise DataError(
            f"the tokenizer's vocabulary{location} has {tokenizer.vocab_size} entries, more than "
            f"the model's vocab_size {vocab_size}",
            hint="raise vocab_size, omit it to use the tokenizer's, or use the tokenizer that the "
            "model was trained with",
        )
    return tokenizer


def describe_unused_vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> str | None:
    """Return a warning if most of the model's vocabulary is not the tokenizer's, otherwise None."""
    if vocab_size is None or tokenizer.vocab_size * 2 > vocab_size:
        return None
    return (
        f"vocab_size {vocab_size:,} is more than twice the tokenizer's {tokenizer.vocab_size:,}: "
        "most of the model's tokens never occur; omit vocab_size to use the tokenizer's"
    )
