"""Training of a byte-level BPE tokenizer, written as a Hugging Face directory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.errors import DataError

BEGIN_TOKEN = "<|begin_of_text|>"
END_TOKEN = "<|end_of_text|>"
_BYTE_VALUES = 256


@dataclass(frozen=True)
class BpeSettings:
    """Settings of BPE training.

    Attributes:
        vocab_size: number of tokens, including special tokens.
        special_tokens: the first one begins a document and the second one ends it. They get the
            lowest ids.
        min_frequency: a pair of tokens that is less frequent is not merged.
    """

    vocab_size: int
    special_tokens: tuple[str, ...] = (BEGIN_TOKEN, END_TOKEN)
    min_frequency: int = 2


def train_tokenizer(texts: Iterable[str], settings: BpeSettings) -> Any:
    """Train a ``tokenizers.Tokenizer``. Equal texts give equal tokenizers.

    Raises:
        DataError: the vocabulary cannot hold all bytes, or the texts are too short to fill it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    min_vocab_size = _BYTE_VALUES + len(settings.special_tokens)
    if settings.vocab_size < min_vocab_size:
        raise DataError(
            f"vocab_size {settings.vocab_size} is too small: {_BYTE_VALUES} bytes and "
            f"{len(settings.special_tokens)} special tokens take {min_vocab_size}"
        )
    if len(set(settings.special_tokens)) < 2 or "" in settings.special_tokens:
        raise DataError("special tokens: at least two different ones are needed: begin and end")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=list(settings.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    actual_vocab_size = tokenizer.get_vocab_size()
    if actual_vocab_size < settings.vocab_size:
        raise DataError(
            f"the text is too little for {settings.vocab_size} tokens: it gives "
            f"{actual_vocab_size}",
            hint="give more text or a smaller vocabulary",
        )
    return tokenizer


def write_directory(tokenizer: Any, output: Path, special_tokens: Sequence[str]) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``.

    The directory appears complete or not at all. An existing tokenizer is replaced.

    Raises:
        DataError: the directory cannot be written, or holds other files than a tokenizer's.
    """
    _require_replaceable(output)
    begin, end = special_tokens[:2]
    special_token_names = {"bos_token": begin, "eos_token": end}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
        **special_token_names,
    }
    temporary_directory = output.with_name(f"{output.name}.partial-{os.getpid()}")
    try:
        temporary_directory.mkdir(parents=True)
        tokenizer.save(str(temporary_directory / "tokenizer.json"))
        _write_json(temporary_directory / "tokenizer_config.json", config)
        _write_json(temporary_directory / "special_tokens_map.json", special_token_names)
        if output.is_dir():
            shutil.rmtree(output)
        temporary_directory.replace(output)
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary_directory, ignore_errors=True)


def _require_replaceable(output: Path) -> None:
    """Check that ``output`` does not exist, or holds a tokenizer only."""
    if not output.exists():
        return
    if not output.is_dir():
        raise DataError(f"{output}: is a file, expected a directory")
    expected = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    unexpected = sorted({item.name for item in output.iterdir()} - expected)
    if unexpected:
        raise DataError(
            f"{output}: holds other files than a tokenizer's: {', '.join(unexpected[:5])}",
            hint="choose another directory; this one would be replaced",
        )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
