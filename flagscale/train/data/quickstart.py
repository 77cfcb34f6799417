"""Data that every machine has: the Python standard library as a corpus, a tokenizer trained on
it, and both as a Megatron data set.

The corpus is the same for the same Python version: files sorted by their path in the library,
without tests, installed packages and files that its build generated.
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
from flagscale.train.data.indexed import inspect
from flagscale.train.data.progress import progress
from flagscale.train.data.tokenizers import TokenizerSpec

VOCAB_SIZE = 8192
CORPUS = "corpus.jsonl"
TOKENIZER = "tokenizer"
PREFIX = "stdlib"
_STAMP = "quickstart.json"
_VERSION = 1  # raise when what is written changes, so that older outputs are written anew
_SKIPPED = {
    "__pycache__",
    "_bundled",
    "dist-packages",
    "idle_test",
    "lib-dynload",
    "site-packages",
    "test",
    "tests",
}
_GENERATED = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Quickstart:
    """Where everything is. ``fresh`` says whether it had to be written."""

    output: Path
    fresh: bool
    documents: int
    tokens: int

    @property
    def data_path(self) -> Path:
        return self.output / f"{PREFIX}_text_document"

    @property
    def tokenizer(self) -> Path:
        return self.output / TOKENIZER


def sources(library: Path | None = None) -> list[Path]:
    """The corpus's files, in its order."""
    root = library or Path(sysconfig.get_path("stdlib"))
    found = []
    for directory, names, files in os.walk(root):
        names[:] = [n for n in names if n not in _SKIPPED and not n.startswith("config-")]
        for name in files:
            if name.endswith(".py") and not name.startswith(_GENERATED):
                found.append(Path(directory) / name)
    if not found:
        raise DataError(
            f"{root}: holds no Python sources",
            hint="use a Python with its standard library's sources, not a zipped one",
        )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def make(output: Path, *, library: Path | None = None, workers: int | None = None) -> Quickstart:
    """Write corpus, tokenizer and data set under ``output``, unless they are there and whole.

    Raises:
        DataError: the library's sources are missing, or ``output`` cannot be written.
    """
    there = _whole(output)
    if there is not None:
        return there
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / _STAMP).unlink(missing_ok=True)
        digest = _write_corpus(output, library)
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}") from error
    settings = train_bpe.BpeSettings(VOCAB_SIZE)
    trained = train_bpe.train(_documents(output / CORPUS), settings)
    train_bpe.write_directory(trained, output / TOKENIZER, settings.special_tokens)
    job = preprocess.Job(
        inputs=(output / CORPUS,),
        output_prefix=str(output / PREFIX),
        tokenizer=TokenizerSpec("HuggingFaceTokenizer", str(output / TOKENIZER)),
        append_eod=True,
        workers=workers or os.cpu_count() or 1,
        overwrite=True,
    )
    with progress("tokenizing") as report:
        summary = preprocess.run(job, report)
    result = Quickstart(output, True, summary.documents, summary.tokens)
    _stamp(result, digest)
    return result


def _write_corpus(output: Path, library: Path | None) -> str:
    """Write the corpus; the digest of what it holds."""
    root = library or Path(sysconfig.get_path("stdlib"))
    total = hashlib.sha256()
    partial = output / f"{CORPUS}.partial-{os.getpid()}"
    try:
        with partial.open("w", encoding="utf-8") as file:
            for path in sources(library):
                text = _source(path)
                if not text.strip():
                    continue
                record = {"path": path.relative_to(root).as_posix(), "text": text}
                line = json.dumps(record) + "\n"
                total.update(line.encode())
                file.write(line)
        partial.replace(output / CORPUS)
    finally:
        partial.unlink(missing_ok=True)
    return total.hexdigest()


def _source(path: Path) -> str:
    """A source file's text in the encoding that it declares; nothing where that is wrong."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def _documents(corpus: Path) -> Iterator[str]:
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def _stamp(result: Quickstart, corpus_digest: str) -> None:
    """The last file written: it says what the others are, and their sizes."""
    files = [result.output / CORPUS, result.tokenizer / "tokenizer.json"]
    files += [Path(f"{result.data_path}{suffix}") for suffix in (".bin", ".idx")]
    content: dict[str, Any] = {
        **_recipe(),
        "corpus_sha256": corpus_digest,
        "documents": result.documents,
        "tokens": result.tokens,
        "sizes": {
            path.relative_to(result.output).as_posix(): path.stat().st_size for path in files
        },
    }
    partial = result.output / f"{_STAMP}.partial-{os.getpid()}"
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(result.output / _STAMP)


def _recipe() -> dict[str, Any]:
    return {"version": _VERSION, "python": platform.python_version(), "vocab_size": VOCAB_SIZE}


def _whole(output: Path) -> Quickstart | None:
    """What an earlier call wrote, if it is all there, whole, and by this recipe."""
    try:
        stamp = json.loads((output / _STAMP).read_text(encoding="utf-8"))
        if any(stamp[key] != value for key, value in _recipe().items()):
            return None
        sizes: dict[str, int] = stamp["sizes"]
        if any((output / name).stat().st_size != size for name, size in sizes.items()):
            return None
        result = Quickstart(output, False, stamp["documents"], stamp["tokens"])
        inspect(str(result.data_path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError):
        return None
    return result
