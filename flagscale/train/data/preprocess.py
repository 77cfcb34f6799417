"""Preprocessing of text or JSON lines into Megatron's ``.bin`` and ``.idx`` files.

Worker processes tokenize chunks of the input. This process writes their results in the order of the
input, so the output does not depend on the number of workers. Output files get their final names
only when they are complete. ``tools/data/preprocess.py`` is the command.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from flagscale.files import write_json
from flagscale.train.data import corpus
from flagscale.train.data.corpus import BadRecordError, CorpusChunk, CorpusFormat
from flagscale.train.data.progress_bar import ProgressCallback
from flagscale.train.data.tokenizers import Tokenizer, TokenizerSpec, open_tokenizer


@dataclass(frozen=True)
class PreprocessJob:
    """Settings of one preprocessing run.

    Attributes:
        inputs: files to read, in order.
        output_prefix: prefix of the output: the texts of key ``k`` are written to
            ``<output_prefix>_<k>_document.bin`` and ``.idx``.
        tokenizer: parameters to open the tokenizer.
        keys: keys of a JSON object whose strings are tokenized.
        file_format: format of all inputs; None to guess it from the name of each file.
        append_eod: append the end-of-document token to each document.
        prepend_bos: begin each document with the begin-of-document token.
        workers: number of worker processes.
        overwrite: replace existing output.
        skipped: files that the search for inputs left out, with the reason; for the summary.
    """

    inputs: tuple[Path, ...]
    output_prefix: str
    tokenizer: TokenizerSpec
    keys: tuple[str, ...] = ("text",)
    file_format: CorpusFormat | None = None
    append_eod: bool = False
    prepend_bos: bool = False
    workers: int = 1
    overwrite: bool = False
    skipped: Mapping[Path, str] = field(default_factory=dict)

    def output_prefixes(self) -> dict[str, str]:
        """Return the prefix of the output for each key."""
        return {key: f"{self.output_prefix}_{key}_document" for key in self.keys}


@dataclass
class PreprocessSummary:
    """Result of a preprocessing run.

    Attributes:
        prefixes: prefix of the output of each key.
        document_count: number of documents written for the first key.
        empty_texts: number of texts without tokens, which are skipped.
        token_count: number of tokens of all keys.
        input_bytes: size of the input in bytes.
    """

    prefixes: list[str]
    document_count: int = 0
    empty_texts: int = 0
    token_count: int = 0
    input_bytes: int = 0


@dataclass
class EncodedChunk:
    """Tokens of a chunk.

    Attributes:
        tokens: for each key, the concatenated tokens of all documents.
        lengths: for each key, the number of tokens of each document.
        empty_texts: number of texts without tokens.
    """

    tokens: list[NDArray[Any]]
    lengths: list[list[int]]
    empty_texts: int


def preprocess(job: PreprocessJob, progress: ProgressCallback | None = None) -> PreprocessSummary:
    """Preprocess the inputs of a job.

    Args:
        job: the settings.
        progress: called with the bytes of input that are written, and the total bytes of input.

    Raises:
        DataError: invalid input (with file and line), an output that exists or cannot be written,
            or a tokenizer that cannot be opened. No output is created or changed in this case.
    """
    formats = {path: job.file_format or corpus.guess_format(path) for path in job.inputs}
    for path, file_format in formats.items():
        if job.keys != ("text",) and file_format not in ("jsonl", "parquet"):
            raise DataError(
                f"json keys {', '.join(job.keys)} need JSON lines or Parquet; {path} is plain text"
            )
    _check_outputs(job)
    vocab_size = _check_tokenizer(job)
    try:
        input_bytes = sum(path.stat().st_size for path in job.inputs if path != corpus.STDIN)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
    chunks = _require_any(_split_inputs(formats), job.inputs)
    summary = PreprocessSummary(list(job.output_prefixes().values()), input_bytes=input_bytes)
    # The same limit as in megatron.core's DType.optimal_dtype.
    dtype = np.uint16 if vocab_size < 65500 else np.int32
    with ExitStack() as stack:
        writers: list[_DatasetWriter] = []
        bytes_done = 0
        for chunk, encoded_chunk in _encode_chunks(job, chunks, dtype):
            if not writers:  # The import takes seconds; the workers tokenize meanwhile.
                writers = [stack.enter_context(_DatasetWriter(p, dtype)) for p in summary.prefixes]
            for writer, tokens, lengths in zip(
                writers, encoded_chunk.tokens, encoded_chunk.lengths, strict=True
            ):
                writer.add(tokens, lengths)
            bytes_done += chunk.input_bytes
            summary.document_count += len(encoded_chunk.lengths[0])
            summary.token_count += sum(int(tokens.size) for tokens in encoded_chunk.tokens)
            summary.empty_texts += encoded_chunk.empty_texts
            if progress:
                progress(bytes_done, input_bytes)
        if not summary.token_count:
            raise DataError(f"nothing to write: all {summary.empty_texts} documents are empty")
        for writer in writers:
            writer.commit()
    _write_summary(job, summary)
    return summary


def _write_summary(job: PreprocessJob, summary: PreprocessSummary) -> None:
    """Write the summary next to the data, as ``<output_prefix>.summary.json``."""
    record = {
        "documents": summary.document_count,
        "tokens": summary.token_count,
        "empty_texts": summary.empty_texts,
        "input_bytes": summary.input_bytes,
        "inputs": [str(path) for path in job.inputs],
        "skipped": {str(path): reason for path, reason in job.skipped.items()},
        "keys": list(job.keys),
        "tokenizer": {"type": job.tokenizer.tokenizer_type, "path": job.tokenizer.path},
        "append_eod": job.append_eod,
        "prepend_bos": job.prepend_bos,
        "outputs": summary.prefixes,
    }
    with _wrap_write_errors(job.output_prefix):
        write_json(Path(f"{job.output_prefix}.summary.json"), record)


def _split_inputs(formats: Mapping[Path, CorpusFormat]) -> Iterator[CorpusChunk]:
    for path, file_format in formats.items():
        try:
            yield from corpus.split_file(path, file_format)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _require_any(chunks: Iterator[CorpusChunk], inputs: Sequence[Path]) -> Iterator[CorpusChunk]:
    """Yield the chunks.

    Raises:
        DataError: there is none.
    """
    is_empty = True
    for chunk in chunks:
        is_empty = False
        yield chunk
    if is_empty:
        names = ", ".join(str(path) for path in inputs[:5])
        raise DataError(f"nothing to preprocess: the input is empty ({names})")


def _check_outputs(job: PreprocessJob) -> None:
    """Check that the output can be written and, unless ``overwrite`` is set, does not exist."""
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
    """Check that the tokenizer can be opened; return its vocabulary size."""
    tokenizer = open_tokenizer(job.tokenizer)
    if job.prepend_bos and tokenizer.bos is None:
        raise DataError(f"the tokenizer {job.tokenizer.path} has no token that begins a document")
    return tokenizer.vocab_size


# Tokenizer of a worker process, set once when the process starts.
_tokenizer: Tokenizer | None = None


def _start_worker(spec: TokenizerSpec) -> None:
    global _tokenizer  # noqa: PLW0603 - a pool's workers have no other place for their state
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool is the parallelism
    _tokenizer = open_tokenizer(spec)


def _encode_chunks(
    job: PreprocessJob, chunks: Iterable[CorpusChunk], dtype: Any
) -> Iterator[tuple[CorpusChunk, EncodedChunk]]:
    """Yield each chunk with its tokens, in order.

    At most three chunks per worker are pending, so that a slow disk does not fill the memory.
    """
    encode = partial(_encode_chunk, job=job, dtype=dtype)
    context = get_context("forkserver")
    if "transformers" in sys.modules:
        # The tokenizer needs it: import it once instead of once per worker.
        context.set_forkserver_preload(["transformers"])
    with ProcessPoolExecutor(
        job.workers,
        mp_context=context,
        initializer=_start_worker,
        initargs=(job.tokenizer,),
    ) as pool:
        pending: deque[tuple[CorpusChunk, Future[EncodedChunk]]] = deque()
        try:
            for chunk in chunks:
                pending.append((chunk, pool.submit(encode, chunk)))
                if len(pending) >= 3 * job.workers:
                    yield _get_result(*pending.popleft())
            while pending:
                yield _get_result(*pending.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _get_result(
    chunk: CorpusChunk, future: Future[EncodedChunk]
) -> tuple[CorpusChunk, EncodedChunk]:
    """Wait for the tokens of a chunk; raise a worker's error as a DataError."""
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
    keys = job.keys if chunk.format in ("jsonl", "parquet") else ("text",)
    tokens: list[list[int]] = [[] for _ in keys]
    lengths: list[list[int]] = [[] for _ in keys]
    empty_texts = 0
    for texts in corpus.read_documents(chunk, keys):
        for index, text in enumerate(texts):
            ids = _encode_document(_tokenizer, text, job)
            if not ids:
                empty_texts += 1
                continue
            tokens[index].extend(ids)
            lengths[index].append(len(ids))
    return EncodedChunk([np.array(ids, dtype=dtype) for ids in tokens], lengths, empty_texts)


def _encode_document(tokenizer: Tokenizer, text: str, job: PreprocessJob) -> list[int]:
    """Tokenize a document. The result of an empty text is empty, without begin or end token."""
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

    def _temporary_path(self, suffix: str) -> Path:
        return Path(f"{self.prefix}{suffix}.partial-{os.getpid()}")

    def __enter__(self) -> _DatasetWriter:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # optional packages for training are not needed
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        with _wrap_write_errors(self.prefix):
            self._builder = IndexedDatasetBuilder(
                str(self._temporary_path(".bin")), dtype=self.dtype
            )
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
            self._builder.finalize(str(self._temporary_path(".idx")))
            for suffix in (".bin", ".idx"):
                with self._temporary_path(suffix).open("rb") as file:
                    os.fsync(file.fileno())
            Path(self.prefix + ".idx").unlink(missing_ok=True)
            for suffix in (".bin", ".idx"):
                self._temporary_path(suffix).replace(self.prefix + suffix)
        self._committed = True

    def __exit__(self, *_: object) -> None:
        if self._committed:
            return
        if self._builder is not None:
            with suppress(OSError):  # a full disk has been reported already
                self._builder.data_file.close()
        for suffix in (".bin", ".idx"):
            self._temporary_path(suffix).unlink(missing_ok=True)


@contextmanager
def _wrap_write_errors(prefix: str) -> Iterator[None]:
    """Convert an OSError into a DataError that names the output."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{prefix}: cannot be written: {error.strerror}") from error
