"""What every tokenizer offers, whichever library reads its files."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from flagscale.errors import DataError


class Tokenizer(ABC):
    """Text to token ids and back, with what megatron.core's data sets ask of a tokenizer.

    There is no ``pad`` on purpose: megatron.core pads with the tokenizer's pad id where there is
    one and masks every such token out of the loss, also those that stand in the data. Without one
    it pads with an id that no data holds.
    """

    def __init__(self, **identity: str) -> None:
        self.unique_identifiers: dict[str, str] = {"class": type(self).__name__, **identity}
        """Names the tokenizer in the keys of cached data indices; JSON-serialisable."""

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
        """The id that begins a document, or None when the tokenizer has none."""
        return None

    @property
    def mask(self) -> int | None:
        """The id that stands for a token that is to be told, or None when there is none."""
        return None

    @property
    def cls(self) -> int | None:
        """The id that begins every sequence of a model like BERT, or None when there is none."""
        return None

    @property
    def sep(self) -> int | None:
        """The id that ends one, or None when there is none."""
        return None

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``; no token is added before or after."""

    def tokenize_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in order."""
        return [self.tokenize(text) for text in texts]

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that steer a model and stand for no text, such as the end of a turn."""
        return frozenset()

    def tokenize_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Token ids of each text, and the character at which each token begins.

        Raises:
            DataError: this tokenizer does not tell.
        """
        raise DataError(
            f"{type(self).__name__} does not tell where in a text its tokens stand, which answers "
            "are found by; take HuggingFaceTokenizer with a tokenizer.json"
        )

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens are written out."""


def digest(paths: Iterable[Path]) -> str:
    """A short digest of files' contents: a tokenizer is the same wherever its directory lies."""
    total = hashlib.sha256()
    for path in paths:
        total.update(path.name.encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]
