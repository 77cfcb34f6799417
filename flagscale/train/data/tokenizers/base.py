"""Interface of all tokenizers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flagscale.errors import DataError


class Tokenizer(ABC):
    """Conversion between text and token ids, with the attributes that megatron.core's datasets use.

    There is no ``pad`` on purpose. megatron.core pads with the tokenizer's pad id if there is one,
    and then masks every such token out of the loss, including those in the data. Without a pad id,
    it pads with an id that no data contains.
    """

    def __init__(self, **identity: str) -> None:
        self.unique_identifiers: dict[str, str] = {"class": type(self).__name__, **identity}
        """Identity of the tokenizer in the cache keys of data indices; JSON-serializable."""
        self.special_tokens: Mapping[str, str] = {}
        """Texts of the named special tokens, such as ``eos_token``, for chat templates."""
        self.chat_templates: Mapping[str, str] = {}
        """The tokenizer's own chat templates (Jinja) by name, usually only ``default``."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest token id, special tokens included."""

    @property
    @abstractmethod
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def bos(self) -> int | None:
        """The id that begins a document, or None if there is none."""
        return None

    @property
    def text_prefix_ids(self) -> tuple[int, ...]:
        """The ids that transformers puts before every text, such as the one that begins it."""
        return ()

    @property
    def mask(self) -> int | None:
        """The id of the mask token, or None if there is none."""
        return None

    @property
    def cls(self) -> int | None:
        """The id that begins every sequence of a model like BERT, or None if there is none."""
        return None

    @property
    def sep(self) -> int | None:
        """The id that ends a sequence of a model like BERT, or None if there is none."""
        return None

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without tokens added before or after."""

    def tokenize_with_special_tokens(self, text: str) -> list[int]:
        """Return the token ids of ``text``, with those that the tokenizer adds before or after."""
        return self.tokenize(text)

    def tokenize_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, in order."""
        return [self.tokenize(text) for text in texts]

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens that stand for no text, such as the end of a turn."""
        return frozenset()

    def find_id(self, token: str) -> int | None:
        """Return the id of a token, given as text, or None if there is no such token."""
        return None

    def tokenize_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return the token ids of each text, and the character offset at which each token begins.

        Raises:
            DataError: this tokenizer does not support offsets.
        """
        raise DataError(
            f"{type(self).__name__} does not return the positions of tokens in a text, which are "
            "required to find answers; use HuggingFaceTokenizer with a tokenizer.json"
        )

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""


def hash_files(paths: Iterable[Path]) -> str:
    """Hash names and contents of files, independent of their directory.

    Returns:
        16 hexadecimal digits.
    """
    hasher = hashlib.sha256()
    for path in paths:
        hasher.update(path.name.encode() + b"\0")
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()[:16]
