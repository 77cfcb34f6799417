"""SentencePiece tokenizers, such as Llama 2's ``tokenizer.model``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flagscale.errors import DataError
from flagscale.train.data.tokenizers.base import Tokenizer, hash_files


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of a SentencePiece model file. The piece ``</s>`` ends a document."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        file = path / "tokenizer.model" if path.is_dir() else path
        if not file.is_file():
            raise DataError(f"{file}: no such SentencePiece model file")
        try:
            self._processor = SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"{file}: not a SentencePiece model: {str(error).strip().splitlines()[-1]}",
                hint="Llama-3's tokenizer.model is another format: use the directory that holds "
                "tokenizer.json with tokenizer_type HuggingFaceTokenizer",
            ) from None
        super().__init__(files=hash_files([file]))
        self._eod = int(self._processor.eos_id())
        if self._eod < 0:
            raise DataError(f"{file}: the model has no end-of-sentence piece (</s>)")

    @property
    def vocab_size(self) -> int:
        return int(self._processor.get_piece_size())

    @property
    def eod(self) -> int:
        return self._eod

    @property
    def bos(self) -> int | None:
        token_id = int(self._processor.bos_id())
        return token_id if token_id >= 0 else None

    def tokenize(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(value) for value in ids]))
