"""Preprocessing of text or JSON lines into Megatron's ``.bin`` and ``.idx`` files.

Worker processes tokenize chunks of the input. This process writes their results in the order of the
input, so the output does not depend on the number of workers. Output files get their final names
only when they are complete.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flagscale.errors import DataError
from flagscale.train.data import corpus
from flagscale.train.data.corpus import BadRecordError, CorpusChunk, CorpusFormat
from flagscale.train.data.progress_bar import ProgressCallback
from flagscale.train.data.tokenizers import Tokenizer, TokenizerSpec, open_tokenizer


@dataclass(frozen=True)
class PreprocessJob:
    """Settings of one preprocessing run.

    Each of ``keys`` is written to ``<output_prefix>_<key>_document.bin`` and ``.idx``. If
    ``format`` is None, it follows from each file's name.
    """

    inputs: tuple[Path, ...]
    output_prefix: str
    tokenizer: TokenizerSpec
    keys: tuple[str, ...] = ("text",)
    format: CorpusFormat | None = None
    append_eod: bool = False
    prepend_bos: bool = False
    workers: int = 1
    overwrite: bool = False

    def output_prefixes(self) -> dict[str, str]:
        """Return the prefix of the output for each key."""
        return {key: f"{self.output_prefix}_{key}_document" for key in self.keys}


@dataclass
class PreprocessSummary:
    """Result of a run: prefixes of the output, numbers of documents and tokens, bytes of input."""

    prefixes: list[str]
    documents: int = 0
    empty: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass
class EncodedChunk:
    """Tokens of a chunk: for each key, one flat array and the length of each document."""

    tokens: list[NDArray[Any]]
    lengths: list[list[int]]
    empty: int


def preprocess(job: PreprocessJob, progress: ProgressCallback | None = None) -> PreprocessSummary:
    """Preprocess the inputs of a job.

    Args:
        job: the settings.
        progress: called with the bytes of input done and their total.

    Raises:
        DataError: invalid input (with file and line), an output that exists or cannot be written,
            or a tokenizer that cannot be opened. No output is created or changed in this case.
    """
    chunks = [chunk for path in job.inputs for chunk in _split_input(path, job.format)]
    if not chunks:
        names = ", ".join(str(path) for path in job.inputs[:5])
        raise DataError(f"nothing to preprocess: the input is empty ({names})")
    if job.keys != ("text",) and any(chunk.format != "jsonl" for chunk in chunks):
        raise DataError(f"json keys {', '.join(job.keys)} need JSON lines; an input is plain text")
    _check_outputs(job)
    vocab_size = _check_tokenizer(job)
    total = sum(chunk.end - chunk.begin for chunk in chunks)
    summary = PreprocessSummary(list(job.output_prefixes().values()), bytes=total)
    dtype = np.uint16 if vocab_size < 65500 else np.int32  # as megatron.core's DType.optimal_dtype
    with ExitStack() as stack:
        writers: list[_DatasetWriter] = []
        bytes_done = 0
        for chunk, encoded in _encode_all(job, chunks, dtype):
            if not writers:  # imports for seconds, while the workers already tokenize
                writers = [stack.enter_context(_DatasetWriter(p, dtype)) for p in summary.prefixes]
            for writer, tokens, lengths in zip(
                writers, encoded.tokens, encoded.lengths, strict=True
            ):
                writer.add(tokens, lengths)
            bytes_done += chunk.end - chunk.begin
            summary.documents += len(encoded.lengths[0])
            summary.tokens += sum(int(tokens.size) for tokens in encoded.tokens)
            summary.empty += encoded.empty
            if progress:
                progress(bytes_done, total)
        if not summary.tokens:
            raise DataError(f"nothing to write: all {summary.empty} documents are empty")
        for writer in writers:
            writer.commit()
    return summary


def _split_input(path: Path, kind: CorpusFormat | None) -> Iterator[CorpusChunk]:
    try:
        yield from corpus.split_file(path, kind or corpus.guess_format(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _check_outputs(job: PreprocessJob) -> None:
    for prefix in job.output_prefixes().values():
        for suffix in (".bin", ".idx"):
            path = Path(prefix + suffix)
            if path.exists() and not job.overwrite:
                raise DataError(f"{path}: exists already", hint="--overwrite replaces it")
        folder = Path(prefix).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder}: cannot be created: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            raise DataError(f"{folder}: not writable")


def _check_tokenizer(job: PreprocessJob) -> int:
    tokenizer = open_tokenizer(job.tokenizer)
    if job.prepend_bos and tokenizer.bos is None:
        raise DataError(f"the tokenizer {job.tokenizer.path} has no token that begins a document")
    return tokenizer.vocab_size


# In a worker process: its tokenizer, set once when the process starts.
_tokenizer: Tokenizer | None = None


def _start_worker(spec: TokenizerSpec) -> None:
    global _tokenizer  # noqa: PLW0603 - a pool's workers have no other place for their state
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool is the parallelism
    _tokenizer = open_tokenizer(spec)


def _encode_all(
    job: PreprocessJob, chunks: Sequence[CorpusChunk], dtype: Any
) -> Iterator[tuple[CorpusChunk, EncodedChunk]]:
    """Yield each chunk with its tokens, in order.

    Only a few chunks per worker are in progress, so that a slow disk does not fill the memory.
    """
    encode = partial(_encode_chunk, job=job, dtype=dtype)
    with ProcessPoolExecutor(
        job.workers,
        mp_context=get_context("forkserver"),
        initializer=_start_worker,
        initargs=(job.tokenizer,),
    ) as pool:
        waiting: deque[tuple[CorpusChunk, Future[EncodedChunk]]] = deque()
        try:
            for chunk in chunks:
                waiting.append((chunk, pool.submit(encode, chunk)))
                if len(waiting) >= 3 * job.workers:
                    yield _get_result(*waiting.popleft())
            while waiting:
                yield _get_result(*waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _get_result(
    chunk: CorpusChunk, future: Future[EncodedChunk]
) -> tuple[CorpusChunk, EncodedChunk]:
    try:
        return chunk, future.result()
    except BadRecordError as error:
        raise error.to_data_error() from None
    except BrokenProcessPool:
        raise DataError(
            f"a worker process ended while it read {chunk.path}",
            hint="it probably ran out of memory; try fewer --workers",
        ) from None
    except OSError as error:
        raise DataError(f"{chunk.path}: cannot be read: {error.strerror}") from None


def _encode_chunk(chunk: CorpusChunk, *, job: PreprocessJob, dtype: Any) -> EncodedChunk:
    assert _tokenizer is not None  # _start_worker ran
    keys = job.keys if chunk.format == "jsonl" else ("text",)
    flat: list[list[int]] = [[] for _ in keys]
    lengths: list[list[int]] = [[] for _ in keys]
    empty = 0
    for texts in corpus.read_documents(chunk, keys):
        for index, text in enumerate(texts):
            ids = _encode_document(_tokenizer, text, job)
            if not ids:
                empty += 1
                continue
            flat[index].extend(ids)
            lengths[index].append(len(ids))
    return EncodedChunk([np.array(ids, dtype=dtype) for ids in flat], lengths, empty)


def _encode_document(tokenizer: Tokenizer, text: str, job: PreprocessJob) -> list[int]:
    """Tokenize a document. An empty text gives no tokens, not even a begin or end token."""
    ids = [i for part in corpus.slice_text(text) for i in tokenizer.tokenize(part)]
    if ids and job.prepend_bos and tokenizer.bos is not None:
        ids.insert(0, tokenizer.bos)
    if ids and job.append_eod:
        ids.append(tokenizer.eod)
    return ids


@dataclass
class _DatasetWriter:
    """Writes a dataset to temporary files and renames them when they are complete."""

    prefix: str
    dtype: Any
    _builder: Any = field(default=None, init=False)
    _committed: bool = field(default=False, init=False)

    def _partial(self, suffix: str) -> Path:
        return Path(f"{self.prefix}{suffix}.partial-{os.getpid()}")

    def __enter__(self) -> _DatasetWriter:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # optional packages for training are not needed
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        with _wrap_write_errors(self.prefix):
            self._builder = IndexedDatasetBuilder(str(self._partial(".bin")), dtype=self.dtype)
        return self

    def add(self, tokens: NDArray[Any], lengths: list[int]) -> None:
        """Append documents: their concatenated tokens, and the length of each."""
        begin = 0
        with _wrap_write_errors(self.prefix):
            for length in lengths:
                self._builder.add_document(tokens[begin : begin + length], [length])
                begin += length

    def commit(self) -> None:
        """Complete the files and rename them.

        An existing index is deleted first, so that it never belongs to other tokens.
        """
        with _wrap_write_errors(self.prefix):
            self._builder.finalize(str(self._partial(".idx")))
            for suffix in (".bin", ".idx"):
                with self._partial(suffix).open("rb") as file:
                    os.fsync(file.fileno())
            Path(self.prefix + ".idx").unlink(missing_ok=True)
            for suffix in (".bin", ".idx"):
                self._partial(suffix).replace(self.prefix + suffix)
        self._committed = True

    def __exit__(self, *_: object) -> None:
        if self._committed:
            return
        if self._builder is not None:
            with suppress(OSError):  # a full disk has been reported already
                self._builder.data_file.close()
        for suffix in (".bin", ".idx"):
            self._partial(suffix).unlink(missing_ok=True)


@contextmanager
def _wrap_write_errors(prefix: str) -> Iterator[None]:
    """Raise an operating system's error as one that names the output."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{prefix}: cannot be written: {error.strerror}") from error
