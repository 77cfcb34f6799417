"""Sidecar files of a model directory: ``config.json``, the tokenizer's files, the license and so
on.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flagscale.config.arguments.compat.huggingface.config_reader import CONFIG
from flagscale.files import fsync_path, write_atomic
from flagscale.tokenizer_files import TEMPLATE_FILE
from flagscale.train.checkpoint.chat_template import read_tokenizer_template
from flagscale.train.checkpoint.formats.lazy_tensors import LazyTensor
from flagscale.train.checkpoint.formats.resumable_directory import (
    ResumableDirectory,
    ResumeOptions,
    open_resumable,
    partial_path,
)

PUBLIC_MODE = 0o644
"""Mode of written files: readable by everybody."""
_SIDECAR_NAMES = re.compile(
    r"generation_config\.json|chat_template\.(json|jinja)|special_tokens_map\.json|"
    r"added_tokens\.json|tokenizer.*\.(json|model)|vocab\.(json|txt)|merges\.txt|.*\.tiktoken|"
    r"LICENSE.*|README\.md"
)
"""Names of files that are copied together with a model. Code is never copied."""


@contextmanager
def atomic_directory(
    path: Path, resume: ResumeOptions | None = None
) -> Iterator[ResumableDirectory]:
    """Context manager for writing a directory that gets its final name only when it is complete.

    ``path`` must not exist yet, or be empty. On success, the directory is flushed to disk and
    renamed to ``path``. On failure, ``path`` does not exist; with ``resume``, finished files stay
    in a temporary directory next to it (:func:`open_resumable`).
    """
    temporary_directory = partial_path(path)
    with open_resumable(temporary_directory, resume) as output:
        yield output
        for item in (*temporary_directory.rglob("*"), temporary_directory):
            fsync_path(item)
    if path.is_dir():
        path.rmdir()  # fails unless it is empty
    temporary_directory.rename(path)
    fsync_path(path.parent)


def list_sidecar_files(path: Path) -> Iterator[Path]:
    """Yield the sidecar files of a model's directory, without ``config.json``."""
    for item in sorted(path.iterdir()):
        if _SIDECAR_NAMES.fullmatch(item.name) and item.is_file():
            yield item


def write_sidecar_files(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    files: Iterable[Path],
) -> None:
    """Write ``config.json`` and copy other sidecar files.

    Args:
        directory: directory to write to.
        config: content of ``config.json``; the dtype in it is replaced by that of the tensors.
        tensors: tensors of the model, to determine the dtype.
        files: files to copy.
    """
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    content = dict(config)
    if len(dtypes) == 1:
        # Versions of transformers differ in the key that they read.
        dtype_keys = [name for name in ("dtype", "torch_dtype") if name in content] or [
            "torch_dtype"
        ]
        content.update(dict.fromkeys(dtype_keys, dtypes.pop()))
    for file in files:
        shutil.copyfile(file, directory / file.name)
    write_atomic(directory / CONFIG, json.dumps(content, indent=2) + "\n", PUBLIC_MODE)


def write_chat_template(directory: Path, text: str) -> None:
    """Write the chat template that a model was trained with.

    It replaces the tokenizer's, unless they are equal: transformers prefers this file to
    ``tokenizer_config.json``.
    """
    if read_tokenizer_template(directory) == text:
        return
    (directory / "chat_template.json").unlink(missing_ok=True)
    write_atomic(directory / TEMPLATE_FILE, text, PUBLIC_MODE)
