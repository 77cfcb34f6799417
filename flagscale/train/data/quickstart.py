"""Quickstart data: the Python standard library as corpus, tokenizer and dataset.

``tools/data/quickstart.py`` (``make data``) is the command. The corpus is the same for the same
Python version: source files sorted by path, without tests, installed packages and files generated
by the build.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.errors import DataError
from flagscale.train.data import preprocess, train_bpe
from flagscale.train.data.indexed_dataset import validate_dataset
from flagscale.train.data.progress_bar import show_progress
from flagscale.train.data.tokenizers import TokenizerSpec

VOCAB_SIZE = 8192
CORPUS_FILE = "corpus.jsonl"
TOKENIZER_DIRECTORY = "tokenizer"
DATASET_PREFIX = "stdlib"
_STAMP_FILE = "quickstart.json"
_DATA_VERSION = 1  # increase when the output changes, so that older outputs are rewritten
_SKIPPED_DIRECTORIES = {
    "__pycache__",
    "_bundled",
    "dist-packages",
    "idle_test",
    "lib-dynload",
    "site-packages",
    "test",
    "tests",
}
_GENERATED_FILE_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class QuickstartData:
    """Paths and size of the quickstart data.

    Attributes:
        output: directory of all files.
        is_new: whether the data was created by this call; False if it existed already.
        document_count: number of documents in the dataset.
        token_count: number of tokens in the dataset.
    """

    output: Path
    is_new: bool
    document_count: int
    token_count: int

    @property
    def data_path(self) -> Path:
        return self.output / f"{DATASET_PREFIX}_text_document"

    @property
    def tokenizer(self) -> Path:
        return self.output / TOKENIZER_DIRECTORY


def list_sources(library_directory: Path | None = None) -> list[Path]:
    """List the source files of the corpus, in order.

    Args:
        library_directory: directory of the standard library; by default, the running Python's.

    Raises:
        DataError: there are none.
    """
    root = library_directory or Path(sysconfig.get_path("stdlib"))
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [
            name
            for name in subdirectories
            if name not in _SKIPPED_DIRECTORIES and not name.startswith("config-")
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_GENERATED_FILE_PREFIXES):
                files.append(Path(directory) / name)
    if not files:
        raise DataError(
            f"{root}: holds no Python sources",
            hint="use a Python with its standard library's sources, not a zipped one",
        )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def create_quickstart(
    output: Path, *, library_directory: Path | None = None, workers: int | None = None
) -> QuickstartData:
    """Write corpus, tokenizer and dataset below ``output``, unless they are complete already.

    Args:
        output: directory of all files.
        library_directory: directory of the standard library; by default, the running Python's.
        workers: number of processes that tokenize; by default, one per core.

    Raises:
        DataError: the library's sources are missing, or ``output`` cannot be written.
    """
    existing = _load_existing(output)
    if existing is not None:
        return existing
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / _STAMP_FILE).unlink(missing_ok=True)
        corpus_digest = _write_corpus(output, library_directory)
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}") from error
    bpe_settings = train_bpe.BpeSettings(VOCAB_SIZE)
    tokenizer = train_bpe.train_tokenizer(_iter_documents(output / CORPUS_FILE), bpe_settings)
    train_bpe.write_directory(tokenizer, output / TOKENIZER_DIRECTORY, bpe_settings.special_tokens)
    job = preprocess.PreprocessJob(
        inputs=(output / CORPUS_FILE,),
        output_prefix=str(output / DATASET_PREFIX),
        tokenizer=TokenizerSpec("HuggingFaceTokenizer", str(output / TOKENIZER_DIRECTORY)),
        append_eod=True,
        workers=workers or os.cpu_count() or 1,
        overwrite=True,
    )
    with show_progress("tokenizing") as report:
        summary = preprocess.preprocess(job, report)
    result = QuickstartData(
        output, is_new=True, document_count=summary.document_count, token_count=summary.token_count
    )
    _write_stamp(result, corpus_digest)
    return result


def _write_corpus(output: Path, library_directory: Path | None) -> str:
    """Write the corpus; return the SHA-256 of its content."""
    root = library_directory or Path(sysconfig.get_path("stdlib"))
    digest = hashlib.sha256()
    temporary_path = output / f"{CORPUS_FILE}.partial-{os.getpid()}"
    try:
        with temporary_path.open("w", encoding="utf-8") as file:
            for path in list_sources(library_directory):
                text = _read_source(path)
                if not text.strip():
                    continue
                record = {"path": path.relative_to(root).as_posix(), "text": text}
                line = json.dumps(record) + "\n"
                digest.update(line.encode())
                file.write(line)
        temporary_path.replace(output / CORPUS_FILE)
    finally:
        temporary_path.unlink(missing_ok=True)
    return digest.hexdigest()


def _read_source(path: Path) -> str:
    """Read a source file in its declared encoding; empty if it cannot be decoded."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def _iter_documents(corpus_path: Path) -> Iterator[str]:
    """Yield the texts of the corpus."""
    with corpus_path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def _write_stamp(result: QuickstartData, corpus_digest: str) -> None:
    """Write the stamp file: parameters of the data, and sizes of its files.

    It is written last, so its presence means that the data is complete.
    """
    files = [result.output / CORPUS_FILE, result.tokenizer / "tokenizer.json"]
    files += [Path(f"{result.data_path}{suffix}") for suffix in (".bin", ".idx")]
    content: dict[str, Any] = {
        **_get_parameters(),
        "corpus_sha256": corpus_digest,
        "documents": result.document_count,
        "tokens": result.token_count,
        "sizes": {
            path.relative_to(result.output).as_posix(): path.stat().st_size for path in files
        },
    }
    temporary_path = result.output / f"{_STAMP_FILE}.partial-{os.getpid()}"
    temporary_path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary_path.replace(result.output / _STAMP_FILE)


def _get_parameters() -> dict[str, Any]:
    """Return everything that the data depends on."""
    return {"version": _DATA_VERSION, "python": platform.python_version(), "vocab_size": VOCAB_SIZE}


def _load_existing(output: Path) -> QuickstartData | None:
    """Return the result of an earlier call if all its files are complete and up to date."""
    try:
        stamp = json.loads((output / _STAMP_FILE).read_text(encoding="utf-8"))
        if any(stamp[key] != value for key, value in _get_parameters().items()):
            return None
        sizes: dict[str, int] = stamp["sizes"]
        if any((output / name).stat().st_size != size for name, size in sizes.items()):
            return None
        result = QuickstartData(
            output, is_new=False, document_count=stamp["documents"], token_count=stamp["tokens"]
        )
        validate_dataset(str(result.data_path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError):
        return None
    return result
