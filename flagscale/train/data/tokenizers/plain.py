"""Tokenizers that need no files."""

from __future__ import annotations

from collections.abc import Sequence

from flagscale.errors import DataError
from flagscale.train.data.tokenizers.base import Tokenizer


class NullTokenizer(Tokenizer):
    """Tokenizer of text that consists of token ids, such as ``"17 4 9"``.

    As in Megatron-LM, ``vocab_size`` counts the ids before the one that ends a document, so the
    attribute ``vocab_size`` is one larger than the argument.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size=str(vocab_size))
        self._id_count = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._id_count + 1

    @property
    def eod(self) -> int:
        return self._id_count

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer takes token ids separated by spaces: {error}") from None
        for value in ids:
            if not 0 <= value < self._id_count:
                raise DataError(
                    f"NullTokenizer: token id {value} is outside [0, {self._id_count}), "
                    "which vocab_size sets"
                )
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(value) for value in ids)


class ByteLevelTokenizer(Tokenizer):
    """Tokenizer with one token per UTF-8 byte (0-255); token 256 ends a document."""

    _EOD = 256

    @property
    def vocab_size(self) -> int:
        return self._EOD + 1

    @property
    def eod(self) -> int:
        return self._EOD

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(value for value in ids if value < self._EOD).decode("utf-8", errors="replace")
