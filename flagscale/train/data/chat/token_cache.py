"""Cache of tokenized conversations: a directory named by a hash of file, tokenizer and template.

``tokens.bin`` holds the tokens of all samples as int32; a token without loss is stored as its
complement. ``begins.npy`` holds the offset of each sample in tokens, and the total number of
tokens. The directory is written under a temporary name and renamed when it is complete, so an
existing one is always readable.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flagscale.errors import DataError
from flagscale.files import fsync_path
from flagscale.train.data.chat.encoding import RenderedSample, encode_samples, render_samples
from flagscale.train.data.chat.messages import UnusableConversationError
from flagscale.train.data.chat.records import (
    ConversationFormat,
    read_conversations,
)
from flagscale.train.data.chat.templates import ChatTemplate
from flagscale.train.data.progress_bar import ProgressCallback, show_progress
from flagscale.train.data.tokenizers import Tokenizer

_CACHE_VERSION = "1"
BATCH_SIZE = 512
"""Number of conversations that are tokenized together, on all cores."""
_SMALL_FILE_BYTES = 16 << 20
"""Files smaller than this, in bytes, are tokenized without a progress bar."""
_TOKENS_FILE, _BEGINS_FILE = "tokens.bin", "begins.npy"


class TokenFile(ABC):
    """A file to tokenize, and the tokenizer and template for it.

    Attributes:
        path: the file.
        tokenizer: the tokenizer.
        template: the chat template; None if there is none.
        content: name of one record of the file, for messages.
    """

    path: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    content: ClassVar[str]

    @property
    @abstractmethod
    def format_identity(self) -> Any:
        """Identity of the records' format in cache keys."""

    @abstractmethod
    def iter_tokenized(self, on_progress: ProgressCallback | None) -> Iterator[NDArray[np.int32]]:
        """Yield the tokens of each sample, as :func:`encode_samples` encodes them.

        Raises:
            DataError: the file cannot be read, or a record is unusable (with file and line).
        """

    def compute_cache_key(self) -> str:
        """Compute a hash of everything that the tokens depend on.

        Raises:
            DataError: the file cannot be read.
        """
        digest = hashlib.blake2b(digest_size=12)
        tokenizer_identity = sorted(self.tokenizer.unique_identifiers.items())
        template = self.template
        digest.update(
            repr(
                (
                    _CACHE_VERSION,
                    self.format_identity,
                    tokenizer_identity,
                    sorted(template.texts.items()) if template is not None else [],
                    sorted(template.special_tokens.items()) if template is not None else [],
                )
            ).encode()
        )
        try:
            with self.path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from None
        return digest.hexdigest()


@dataclass(frozen=True)
class ConversationFile(TokenFile):
    """A file of conversations."""

    path: Path
    conversation_format: ConversationFormat
    tokenizer: Tokenizer
    template: ChatTemplate

    content: ClassVar[str] = "conversation"

    @property
    def format_identity(self) -> Any:
        return self.conversation_format

    def iter_tokenized(self, on_progress: ProgressCallback | None) -> Iterator[NDArray[np.int32]]:
        """Yield the tokens of each conversation, or of each of its answers."""
        conversations = read_conversations(self.path, self.conversation_format, on_progress)
        while batch := list(islice(conversations, BATCH_SIZE)):
            samples: list[RenderedSample] = []
            lines: list[int | str] = []
            for conversation in batch:
                try:
                    rendered_samples = render_samples(conversation, self.template)
                except UnusableConversationError as error:
                    raise conversation.error(str(error)) from None
                samples += rendered_samples
                lines += [conversation.line] * len(rendered_samples)
            for line, tokens in zip(lines, encode_samples(samples, self.tokenizer), strict=True):
                if not (tokens[1:] >= 0).any():
                    raise DataError(f"{self.path}:{line}: its answers have no tokens with a loss")
                yield tokens


@dataclass(frozen=True)
class TokenizedSamples:
    """Memory-mapped samples of a file.

    Attributes:
        path: the file of conversations.
        directory: the directory of the cache that holds them.
        tokens: tokens of all samples, int32.
        offsets: sample ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``.
    """

    path: Path
    directory: Path
    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def build_cache(source: TokenFile, cache_root: Path, key: str) -> bool:
    """Tokenize a file into the cache, unless the cache has it.

    Args:
        source: the file, with tokenizer and template.
        cache_root: directory of the cache.
        key: result of :meth:`TokenFile.compute_cache_key`.

    Returns:
        True if the file was tokenized now.

    Raises:
        DataError: a conversation is unusable (with file and line), the file has none, or the cache
            cannot be written.
    """
    cache_directory = cache_root / key
    if cache_directory.is_dir():
        return False
    temporary_directory = cache_root / f".{key}.{os.getpid()}.partial"
    try:
        shutil.rmtree(temporary_directory, ignore_errors=True)
        # Conversations are private: only the owner may read the cache, wherever it is.
        temporary_directory.mkdir(parents=True, mode=0o700)
        if source.path.stat().st_size < _SMALL_FILE_BYTES:
            _write_tokens(source, temporary_directory)
        else:
            with show_progress(f"tokenizing {source.path.name}") as report:
                _write_tokens(source, temporary_directory, report)
        for item in (*temporary_directory.iterdir(), temporary_directory):
            fsync_path(item)
        if not cache_directory.is_dir():  # another host may have written it meanwhile
            temporary_directory.rename(cache_directory)
    except OSError as error:
        raise DataError(
            f"{cache_root}: the cache of tokens cannot be written: {error.strerror}",
            hint="set data_cache_path to a directory that all hosts can write",
        ) from error
    finally:
        shutil.rmtree(temporary_directory, ignore_errors=True)
    return True


def _write_tokens(
    source: TokenFile, directory: Path, on_progress: ProgressCallback | None = None
) -> None:
    lengths: list[int] = [0]
    with (directory / _TOKENS_FILE).open("wb") as file:
        for tokens in source.iter_tokenized(on_progress):
            file.write(tokens.tobytes())
            lengths.append(len(tokens))
    if len(lengths) == 1:
        raise DataError(f"{source.path}: holds no {source.content}")
    np.save(directory / _BEGINS_FILE, np.cumsum(np.array(lengths, dtype=np.int64)))


def open_samples(source: TokenFile, cache_root: Path, key: str) -> TokenizedSamples:
    """Open the samples that :func:`build_cache` wrote; see there for the arguments.

    Raises:
        DataError: they do not exist or are damaged.
    """
    cache_directory = cache_root / key
    try:
        offsets = np.load(cache_directory / _BEGINS_FILE)
        tokens = np.memmap(cache_directory / _TOKENS_FILE, mode="r", dtype=np.int32)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{cache_directory}: the tokens of {source.path} cannot be read: {error}",
            hint=f"all hosts must see {cache_root}; if they do, remove {cache_directory}: it is "
            "written anew",
        ) from None
    if len(tokens) != int(offsets[-1]):
        raise DataError(f"{cache_directory}: damaged; remove it: it is written anew")
    return TokenizedSamples(source.path, cache_directory, tokens, offsets)
