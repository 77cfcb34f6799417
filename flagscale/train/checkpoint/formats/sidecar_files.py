"""What lies beside a model's weights: its config.json and its tokenizer's files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flagscale.config.arguments.huggingface.reading import CONFIG
from flagscale.files import sync, write_atomic
from flagscale.train.checkpoint.formats.parts import Origin, Parts, partial_of, resumable
from flagscale.train.checkpoint.formats.tensors import Stored

PUBLIC = 0o644
_BESIDE = re.compile(
    r"generation_config\.json|chat_template\.(json|jinja)|special_tokens_map\.json|"
    r"added_tokens\.json|tokenizer.*\.(json|model)|vocab\.(json|txt)|merges\.txt|.*\.tiktoken|"
    r"LICENSE.*|README\.md"
)
"""What belongs to a model and is copied with it. No code is."""


@contextmanager
def appearing(path: Path, origin: Origin | None = None) -> Iterator[Parts]:
    """A directory to write into, which becomes ``path`` when the context ends, on the disk too;
    where that fails there is none, and of an ``origin`` what is finished waits beside it
    (:func:`resumable`). ``path`` is not there yet, or is empty."""
    partial = partial_of(path)
    with resumable(partial, origin) as parts:
        yield parts
        for item in (*partial.rglob("*"), partial):
            sync(item)
    if path.is_dir():
        path.rmdir()  # empty, or this fails
    partial.rename(path)
    sync(path.parent)


def beside(path: Path) -> Iterator[Path]:
    """The files of a model's directory that belong to it beside its weights and config.json."""
    for item in sorted(path.iterdir()):
        if _BESIDE.fullmatch(item.name) and item.is_file():
            yield item


def write_companions(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    files: Iterable[Path],
) -> None:
    """Write config.json, which says the precision of ``tensors``, and copy ``files``."""
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    made = dict(config)
    if len(kinds) == 1:
        # One of the two is what a version of transformers knows.
        names = [name for name in ("dtype", "torch_dtype") if name in made] or ["torch_dtype"]
        made.update(dict.fromkeys(names, kinds.pop()))
    for file in files:
        shutil.copyfile(file, directory / file.name)
    write_atomic(directory / CONFIG, json.dumps(made, indent=2) + "\n", PUBLIC)
