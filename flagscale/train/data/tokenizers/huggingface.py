"""Hugging Face tokenizers from a local directory.

``tokenizer.json``, or ``vocab.json`` and ``merges.txt``, are read by the ``tokenizers`` library in
milliseconds. Other directories (with only ``tokenizer.model``, or a tokenizer implemented in
transformers) need ``transformers``, whose import delays the start of every rank by seconds. Nothing
is ever downloaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.errors import DataError
from flagscale.train.data.tokenizers.base import Tokenizer, hash_files

_END_CANDIDATES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eod>", "<|im_end|>", "[SEP]")
_AQUILAS_END = "</s>"
_BEGIN_CANDIDATES = ("<|begin_of_text|>", "<s>")
_FRAME_TOKENS: Mapping[str, tuple[str, ...]] = {
    "mask_token": ("[MASK]", "<mask>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
}
"""Special tokens of models like BERT, with their usual names."""


def open_directory(path: Path) -> Tokenizer:
    """Open the tokenizer in a Hugging Face directory, or a ``tokenizer.json``.

    Raises:
        DataError: the path does not exist, or holds no tokenizer that can be read offline.
    """
    if path.is_file() and path.suffix == ".json":
        path = path.parent
    if not path.is_dir():
        raise DataError(
            f"{path}: no such tokenizer directory",
            hint="a Hugging Face tokenizer is a local directory with tokenizer.json and "
            "tokenizer_config.json; nothing is downloaded by name",
        )
    if (path / "tokenizer.json").is_file():
        return FastTokenizer(path, [path / "tokenizer.json"])
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return FastTokenizer(path, [path / "vocab.json", path / "merges.txt"])
    if not _list_model_files(path):
        names = ", ".join(sorted(item.name for item in path.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{path}: holds no tokenizer: expected tokenizer.json and tokenizer_config.json, "
            f"found {names}"
        )
    return TransformersTokenizer(path)


def open_files(vocabulary: Path, merges: Path, special_tokens: Path | None = None) -> Tokenizer:
    """Open a tokenizer from GPT-2's files, wherever they are.

    Args:
        vocabulary: ``vocab.json``.
        merges: ``merges.txt``.
        special_tokens: file with one token per line; they get the ids after the vocabulary's. In
            Aquila's tokenizers, ``</s>`` among them ends a document.

    Raises:
        DataError: a file is missing or invalid.
    """
    files = [vocabulary, merges, *([special_tokens] if special_tokens else [])]
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    return FastTokenizer(vocabulary.parent, files)


class FastTokenizer(Tokenizer):
    """A tokenizer that the ``tokenizers`` library can read."""

    def __init__(self, directory: Path, files: list[Path]) -> None:
        settings = read_settings(directory) if len(files) < 3 else {"eos_token": _AQUILAS_END}
        self._tokenizer = _load_backend(files)
        super().__init__(files=hash_files(files))
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        self._bos = _find_special_id(vocabulary, settings, "bos_token", _BEGIN_CANDIDATES)
        self._frame_ids = {
            key: _find_special_id(vocabulary, settings, key, usual, needed=False)
            for key, usual in _FRAME_TOKENS.items()
        }
        end = _find_special_id(vocabulary, settings, "eos_token", _END_CANDIDATES)
        if end is None:
            raise DataError(
                f"{directory}: no end-of-document token: tokenizer_config.json names no eos_token "
                f"of the vocabulary, and none of {', '.join(_END_CANDIDATES)} is in it"
            )
        self._eod = end

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eod(self) -> int:
        return self._eod

    @property
    def bos(self) -> int | None:
        return self._bos

    @property
    def mask(self) -> int | None:
        return self._frame_ids["mask_token"]

    @property
    def cls(self) -> int | None:
        return self._frame_ids["cls_token"]

    @property
    def sep(self) -> int | None:
        return self._frame_ids["sep_token"]

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenize_many(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(item.ids) for item in encoded]

    @property
    def special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def tokenize_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(list(item.ids), [begin for begin, _ in item.offsets]) for item in encoded]

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


class TransformersTokenizer(Tokenizer):
    """A tokenizer that only ``transformers`` can read."""

    def __init__(self, directory: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # never look a name up on the hub
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(
                f"{directory}: has no tokenizer.json, and transformers, which can read other "
                f"formats, is not installed ({error})"
            ) from None
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # transformers raises whatever its backends do
            names = ", ".join(sorted(item.name for item in directory.iterdir())) or "nothing"
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise DataError(
                f"{directory}: holds no tokenizer that can be read: {reason}",
                hint=f"expected tokenizer.json (and tokenizer_config.json); found {names}",
            ) from error
        super().__init__(files=hash_files(_list_model_files(directory)))
        self._eod = (
            self._get_special_id("eos_token")
            if self._get_special_id("eos_token") is not None
            else self.sep
        )
        if self._eod is None:
            raise DataError(f"{directory}: the tokenizer names no eos_token and no sep_token")

    @property
    def vocab_size(self) -> int:
        return int(max(self._tokenizer.get_vocab().values())) + 1

    @property
    def eod(self) -> int:
        assert self._eod is not None
        return self._eod

    @property
    def bos(self) -> int | None:
        return self._get_special_id("bos_token")

    @property
    def mask(self) -> int | None:
        return self._get_special_id("mask_token")

    @property
    def cls(self) -> int | None:
        return self._get_special_id("cls_token")

    @property
    def sep(self) -> int | None:
        return self._get_special_id("sep_token")

    def _get_special_id(self, name: str) -> int | None:
        token_id = getattr(self._tokenizer, f"{name}_id")
        return None if token_id is None else int(token_id)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(map(int, self._tokenizer.all_special_ids))

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def tokenize_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        if not self._tokenizer.is_fast:
            return super().tokenize_with_offsets(texts)
        encodings = self._tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True
        )
        return [
            (list(ids), [begin for begin, _ in places])
            for ids, places in zip(encodings["input_ids"], encodings["offset_mapping"], strict=True)
        ]

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def _load_backend(files: list[Path]) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    names = " and ".join(str(file) for file in files)
    try:
        if len(files) == 1:
            return Backend.from_file(str(files[0]))
        backend = Backend(models.BPE.from_file(*map(str, files[:2])))  # GPT-2's file format
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        for path in files[2:]:
            backend.add_special_tokens(path.read_text(encoding="utf-8").splitlines())
        return backend
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise DataError(f"{names}: not a tokenizer that can be read: {error}") from None


def read_settings(directory: Path) -> dict[str, Any]:
    """Read a tokenizer's settings, such as special tokens and chat template, from its JSON files.

    Raises:
        DataError: a file is not a JSON object.
    """
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: not JSON: {error}") from None
        if not isinstance(settings, dict):
            raise DataError(f"{path}: expected a JSON object, found {type(settings).__name__}")
        merged.update({key: value for key, value in settings.items() if value is not None})
    return merged


def _find_special_id(
    vocabulary: dict[str, int],
    settings: dict[str, Any],
    key: str,
    candidates: tuple[str, ...],
    *,
    needed: bool = True,
) -> int | None:
    named = settings.get(key)
    text = named.get("content") if isinstance(named, dict) else named
    if isinstance(text, str):
        if text not in vocabulary and needed:
            raise DataError(f"tokenizer_config.json: {key} {text!r} is not in the vocabulary")
        return vocabulary.get(text)
    return next((vocabulary[item] for item in candidates if item in vocabulary), None)


def _list_model_files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.suffix in {".json", ".model", ".txt"})
