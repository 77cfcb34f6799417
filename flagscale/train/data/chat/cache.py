"""Conversations, tokenized once: a directory named by what is in the file, the tokenizer and the
template.

``tokens.bin`` has the tokens of all samples as int32, one that is not to be learned as its
complement; ``begins.npy`` where each begins, and where the last ends. It is written under another
name and renamed when it is whole, so that whatever is there can be read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flagscale.errors import DataError
from flagscale.files import sync
from flagscale.train.data.chat.encoding import Rendered, encoded, rendered
from flagscale.train.data.chat.records import Format, UnfitError, read
from flagscale.train.data.chat.templates import ChatTemplate
from flagscale.train.data.progress import Report, progress
from flagscale.train.data.tokenizers import Tokenizer

_VERSION = "1"
_AT_ONCE = 512
"""Conversations that are tokenized together, on all cores."""
_SOON_DONE = 16 << 20
"""Bytes of a file whose progress nobody has to see."""
_TOKENS, _BEGINS = "tokens.bin", "begins.npy"


@dataclass(frozen=True)
class Source:
    """A file of conversations and how it is made tokens."""

    path: Path
    kind: Format
    tokenizer: Tokenizer
    template: ChatTemplate

    def key(self) -> str:
        """A digest of all that its tokens depend on.

        Raises:
            DataError: the file cannot be read.
        """
        total = hashlib.blake2b(digest_size=12)
        identity = sorted(self.tokenizer.unique_identifiers.items())
        specials = sorted(self.template.specials.items())
        total.update(repr((_VERSION, self.kind, identity, self.template.text, specials)).encode())
        try:
            with self.path.open("rb") as file:
                while block := file.read(1 << 22):
                    total.update(block)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from None
        return total.hexdigest()


@dataclass(frozen=True)
class Samples:
    """The samples of a file, mapped: ``tokens[begins[i] : begins[i + 1]]`` are those of one."""

    path: Path
    tokens: NDArray[np.int32]
    begins: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begins) - 1

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.tokens[self.begins[index] : self.begins[index + 1]]


def build(source: Source, root: Path, key: str) -> bool:
    """Tokenize a file into the cache at ``root``, unless that has been done; whether it was now.

    Raises:
        DataError: a conversation cannot be learned from (with file and line), there is none, or
            the cache cannot be written.
    """
    target = root / key
    if target.is_dir():
        return False
    partial = root / f".{key}.{os.getpid()}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        # What people said is nobody else's to read, wherever the cache lies.
        partial.mkdir(parents=True, mode=0o700)
        if source.path.stat().st_size < _SOON_DONE:
            _write(source, partial)
        else:
            with progress(f"tokenizing {source.path.name}") as report:
                _write(source, partial, report)
        for item in (*partial.iterdir(), partial):
            sync(item)
        if not target.is_dir():  # another host may have been as quick
            partial.rename(target)
    except OSError as error:
        raise DataError(
            f"{root}: the cache of tokens cannot be written: {error.strerror}",
            hint="set data_cache_path to a directory that all hosts can write",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _write(source: Source, partial: Path, report: Report | None = None) -> None:
    lengths: list[int] = [0]
    with (partial / _TOKENS).open("wb") as file:
        for tokens in _tokenized(source, report):
            file.write(tokens.tobytes())
            lengths.append(len(tokens))
    if len(lengths) == 1:
        raise DataError(f"{source.path}: holds no conversation")
    np.save(partial / _BEGINS, np.cumsum(np.array(lengths, dtype=np.int64)))


def _tokenized(source: Source, report: Report | None) -> Iterator[NDArray[np.int32]]:
    conversations = read(source.path, source.kind, report)
    while some := list(islice(conversations, _AT_ONCE)):
        samples: list[Rendered] = []
        lines: list[int] = []
        for conversation in some:
            try:
                own = rendered(conversation, source.template)
            except UnfitError as error:
                raise conversation.error(str(error)) from None
            samples += own
            lines += [conversation.line] * len(own)
        for line, tokens in zip(lines, encoded(samples, source.tokenizer), strict=True):
            if not (tokens[1:] >= 0).any():
                raise DataError(f"{source.path}:{line}: its answers have no tokens to learn")
            yield tokens


def open_samples(source: Source, root: Path, key: str) -> Samples:
    """The samples that :func:`build` wrote.

    Raises:
        DataError: they are not there.
    """
    folder = root / key
    try:
        begins = np.load(folder / _BEGINS)
        tokens = np.memmap(folder / _TOKENS, mode="r", dtype=np.int32)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder}: the tokens of {source.path} cannot be read: {error}",
            hint=f"all hosts must see {root}; if they do, remove {folder}: it is written anew",
        ) from None
    if len(tokens) != int(begins[-1]):
        raise DataError(f"{folder}: damaged; remove it: it is written anew")
    return Samples(source.path, tokens, begins)
