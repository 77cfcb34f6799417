"""Cache of tokenized conversations: a directory named by a hash of file, tokenizer and template.

``tokens.bin`` holds the tokens of all samples as int32; a token without loss is stored as its
complement. ``begins.npy`` holds the offset of each sample and the end of the last one. The
directory is written under a temporary name and renamed when it is complete, so an existing one is
always readable.
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
from flagscale.files import fsync_path
from flagscale.train.data.chat.encoding import RenderedSample, encode_samples, render_samples
from flagscale.train.data.chat.records import (
    ConversationFormat,
    UnusableConversationError,
    read_conversations,
)
from flagscale.train.data.chat.templates import ChatTemplate
from flagscale.train.data.progress_bar import ProgressCallback, show_progress
from flagscale.train.data.tokenizers import Tokenizer

_VERSION = "1"
_BATCH_SIZE = 512
"""Number of conversations that are tokenized together, on all cores."""
_SMALL_FILE_BYTES = 16 << 20
"""Files smaller than this, in bytes, are tokenized without a progress bar."""
_TOKENS_FILE, _BEGINS_FILE = "tokens.bin", "begins.npy"


@dataclass(frozen=True)
class ConversationFile:
    """A file of conversations, and the tokenizer and template for it."""

    path: Path
    kind: ConversationFormat
    tokenizer: Tokenizer
    template: ChatTemplate

    def compute_key(self) -> str:
        """Compute a hash of everything that the tokens depend on.

        Raises:
            DataError: the file cannot be read.
        """
        digest = hashlib.blake2b(digest_size=12)
        identity = sorted(self.tokenizer.unique_identifiers.items())
        specials = sorted(self.template.specials.items())
        digest.update(repr((_VERSION, self.kind, identity, self.template.text, specials)).encode())
        try:
            with self.path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from None
        return digest.hexdigest()


@dataclass(frozen=True)
class TokenizedSamples:
    """Memory-mapped samples of a file. Sample ``i`` is ``tokens[begins[i] : begins[i + 1]]``."""

    path: Path
    tokens: NDArray[np.int32]
    begins: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begins) - 1

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.tokens[self.begins[index] : self.begins[index + 1]]


def build_cache(source: ConversationFile, root: Path, key: str) -> bool:
    """Tokenize a file into the cache below ``root``, unless the cache has it.

    Returns:
        Whether the file was tokenized now.

    Raises:
        DataError: a conversation is unusable (with file and line), the file has none, or the cache
            cannot be written.
    """
    target = root / key
    if target.is_dir():
        return False
    partial = root / f".{key}.{os.getpid()}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        # Conversations are private: only the owner may read the cache, wherever it is.
        partial.mkdir(parents=True, mode=0o700)
        if source.path.stat().st_size < _SMALL_FILE_BYTES:
            _write_tokens(source, partial)
        else:
            with show_progress(f"tokenizing {source.path.name}") as report:
                _write_tokens(source, partial, report)
        for item in (*partial.iterdir(), partial):
            fsync_path(item)
        if not target.is_dir():  # another host may have written it meanwhile
            partial.rename(target)
    except OSError as error:
        raise DataError(
            f"{root}: the cache of tokens cannot be written: {error.strerror}",
            hint="set data_cache_path to a directory that all hosts can write",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _write_tokens(
    source: ConversationFile, partial: Path, report: ProgressCallback | None = None
) -> None:
    lengths: list[int] = [0]
    with (partial / _TOKENS_FILE).open("wb") as file:
        for tokens in _iter_tokenized(source, report):
            file.write(tokens.tobytes())
            lengths.append(len(tokens))
    if len(lengths) == 1:
        raise DataError(f"{source.path}: holds no conversation")
    np.save(partial / _BEGINS_FILE, np.cumsum(np.array(lengths, dtype=np.int64)))


def _iter_tokenized(
    source: ConversationFile, report: ProgressCallback | None
) -> Iterator[NDArray[np.int32]]:
    conversations = read_conversations(source.path, source.kind, report)
    while batch := list(islice(conversations, _BATCH_SIZE)):
        samples: list[RenderedSample] = []
        lines: list[int] = []
        for conversation in batch:
            try:
                rendered_samples = render_samples(conversation, source.template)
            except UnusableConversationError as error:
                raise conversation.error(str(error)) from None
            samples += rendered_samples
            lines += [conversation.line] * len(rendered_samples)
        for line, tokens in zip(lines, encode_samples(samples, source.tokenizer), strict=True):
            if not (tokens[1:] >= 0).any():
                raise DataError(f"{source.path}:{line}: its answers have no tokens to learn")
            yield tokens


def open_samples(source: ConversationFile, root: Path, key: str) -> TokenizedSamples:
    """Open the samples that :func:`build_cache` wrote.

    Raises:
        DataError: they do not exist or are damaged.
    """
    folder = root / key
    try:
        begins = np.load(folder / _BEGINS_FILE)
        tokens = np.memmap(folder / _TOKENS_FILE, mode="r", dtype=np.int32)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder}: the tokens of {source.path} cannot be read: {error}",
            hint=f"all hosts must see {root}; if they do, remove {folder}: it is written anew",
        ) from None
    if len(tokens) != int(begins[-1]):
        raise DataError(f"{folder}: damaged; remove it: it is written anew")
    return TokenizedSamples(source.path, tokens, begins)
