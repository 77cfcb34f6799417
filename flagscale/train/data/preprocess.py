"""Text or JSON lines to Megatron's ``.bin`` and ``.idx``.

Worker processes tokenize pieces of the inputs; this process writes their results in the order of
the inputs, so the output does not depend on the number of workers. Files appear under their final
names only when they are whole.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from flagscale.train.data.corpus import BadRecordError, Format, Piece
from flagscale.train.data.tokenizers import Tokenizer, TokenizerSpec, open_tokenizer


@dataclass(frozen=True)
class Job:
    """One run of preprocessing.

    ``output_prefix`` gives ``<prefix>_<key>_document.bin`` and ``.idx`` for each of ``keys``.
    ``format`` None goes by each file's name.
    """

    inputs: tuple[Path, ...]
    output_prefix: str
    tokenizer: TokenizerSpec
    keys: tuple[str, ...] = ("text",)
    format: Format | None = None
    append_eod: bool = False
    prepend_bos: bool = False
    workers: int = 1
    overwrite: bool = False

    def outputs(self) -> dict[str, str]:
        """The output's prefix for each key."""
        return {key: f"{self.output_prefix}_{key}_document" for key in self.keys}


@dataclass
class Summary:
    """What was written."""

    prefixes: list[str]
    documents: int = 0
    empty: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass
class Encoded:
    """A piece's tokens: for each key one flat array and the length of each document."""

    tokens: list[NDArray[Any]]
    lengths: list[list[int]]
    empty: int


Progress = Callable[[int, int], None]
"""Called with bytes of input done and in all."""


def run(job: Job, progress: Progress | None = None) -> Summary:
    """Preprocess; returns what was written.

    Raises:
        DataError: bad input (with file and line), an output that exists or cannot be written, a
            tokenizer that cannot be opened. No output is left behind or changed then.
    """
    pieces = [piece for path in job.inputs for piece in _pieces(path, job.format)]
    if not pieces:
        names = ", ".join(str(path) for path in job.inputs[:5])
        raise DataError(f"nothing to preprocess: the input is empty ({names})")
    if job.keys != ("text",) and any(piece.format != "jsonl" for piece in pieces):
        raise DataError(f"json keys {', '.join(job.keys)} need JSON lines; an input is plain text")
    _check_outputs(job)
    vocab_size = _check_tokenizer(job)
    total = sum(piece.end - piece.begin for piece in pieces)
    summary = Summary(list(job.outputs().values()), bytes=total)
    dtype = np.uint16 if vocab_size < 65500 else np.int32  # as megatron.core's DType.optimal_dtype
    with ExitStack() as stack:
        writers: list[_Writer] = []
        done = 0
        for piece, encoded in _encode_all(job, pieces, dtype):
            if not writers:  # its seconds of imports pass while the workers are at work
                writers = [stack.enter_context(_Writer(p, dtype)) for p in summary.prefixes]
            for writer, tokens, lengths in zip(
                writers, encoded.tokens, encoded.lengths, strict=True
            ):
                writer.add(tokens, lengths)
            done += piece.end - piece.begin
            summary.documents += len(encoded.lengths[0])
            summary.tokens += sum(int(tokens.size) for tokens in encoded.tokens)
            summary.empty += encoded.empty
            if progress:
                progress(done, total)
        if not summary.tokens:
            raise DataError(f"nothing to write: all {summary.empty} documents are empty")
        for writer in writers:
            writer.commit()
    return summary


def _pieces(path: Path, kind: Format | None) -> Iterator[Piece]:
    try:
        yield from corpus.cut(path, kind or corpus.format_of(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _check_outputs(job: Job) -> None:
    for prefix in job.outputs().values():
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


def _check_tokenizer(job: Job) -> int:
    tokenizer = open_tokenizer(job.tokenizer)
    if job.prepend_bos and tokenizer.bos is None:
        raise DataError(f"the tokenizer {job.tokenizer.path} has no token that begins a document")
    return tokenizer.vocab_size


# In a worker: the open tokenizer, set once when the process starts.
_tokenizer: Tokenizer | None = None


def _start_worker(spec: TokenizerSpec) -> None:
    global _tokenizer  # noqa: PLW0603 - a pool's workers have no other place for their state
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool is the parallelism
    _tokenizer = open_tokenizer(spec)


def _encode_all(job: Job, pieces: Sequence[Piece], dtype: Any) -> Iterator[tuple[Piece, Encoded]]:
    """Each piece with its tokens, in order; at most a few pieces a worker are under way, so that
    a slow disk does not fill the memory."""
    encode = partial(_encode, job=job, dtype=dtype)
    with ProcessPoolExecutor(
        job.workers,
        mp_context=get_context("forkserver"),
        initializer=_start_worker,
        initargs=(job.tokenizer,),
    ) as pool:
        waiting: deque[tuple[Piece, Future[Encoded]]] = deque()
        left = iter(pieces)
        try:
            for piece in left:
                waiting.append((piece, pool.submit(encode, piece)))
                if len(waiting) >= 3 * job.workers:
                    yield _result(*waiting.popleft())
            while waiting:
                yield _result(*waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _result(piece: Piece, future: Future[Encoded]) -> tuple[Piece, Encoded]:
    try:
        return piece, future.result()
    except BadRecordError as error:
        raise error.located() from None
    except BrokenProcessPool:
        raise DataError(
            f"a worker process ended while it read {piece.path}",
            hint="it probably ran out of memory; try fewer --workers",
        ) from None
    except OSError as error:
        raise DataError(f"{piece.path}: cannot be read: {error.strerror}") from None


def _encode(piece: Piece, *, job: Job, dtype: Any) -> Encoded:
    assert _tokenizer is not None  # _start_worker ran
    keys = job.keys if piece.format == "jsonl" else ("text",)
    flat: list[list[int]] = [[] for _ in keys]
    lengths: list[list[int]] = [[] for _ in keys]
    empty = 0
    for texts in corpus.read(piece, keys):
        for index, text in enumerate(texts):
            ids = _document(_tokenizer, text, job)
            if not ids:
                empty += 1
                continue
            flat[index].extend(ids)
            lengths[index].append(len(ids))
    return Encoded([np.array(ids, dtype=dtype) for ids in flat], lengths, empty)


def _document(tokenizer: Tokenizer, text: str, job: Job) -> list[int]:
    """A document's ids; nothing for an empty text, even where tokens would be added around it."""
    ids = [i for part in corpus.slices(text) for i in tokenizer.tokenize(part)]
    if ids and job.prepend_bos and tokenizer.bos is not None:
        ids.insert(0, tokenizer.bos)
    if ids and job.append_eod:
        ids.append(tokenizer.eod)
    return ids


@dataclass
class _Writer:
    """Writes one data set beside its final place and moves it there when it is whole."""

    prefix: str
    dtype: Any
    _builder: Any = field(default=None, init=False)
    _committed: bool = field(default=False, init=False)

    def _partial(self, suffix: str) -> Path:
        return Path(f"{self.prefix}{suffix}.partial-{os.getpid()}")

    def __enter__(self) -> _Writer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is missing for training does not matter here
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        with _reported(self.prefix):
            self._builder = IndexedDatasetBuilder(str(self._partial(".bin")), dtype=self.dtype)
        return self

    def add(self, tokens: NDArray[Any], lengths: list[int]) -> None:
        """Append documents: their tokens one after the other, and the length of each."""
        begin = 0
        with _reported(self.prefix):
            for length in lengths:
                self._builder.add_document(tokens[begin : begin + length], [length])
                begin += length

    def commit(self) -> None:
        """Make the files whole, then visible; an index never stands beside another's tokens."""
        with _reported(self.prefix):
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
            with suppress(OSError):  # a full disk is reported where it was met
                self._builder.data_file.close()
        for suffix in (".bin", ".idx"):
            self._partial(suffix).unlink(missing_ok=True)


@contextmanager
def _reported(prefix: str) -> Iterator[None]:
    """Turns an operating system's error into one that names the output."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{prefix}: cannot be written: {error.strerror}") from error
