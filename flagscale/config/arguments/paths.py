"""Arguments whose values are paths: absolute forms, and what must exist."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flagscale.config.arguments.aliases import ALIASES
from flagscale.config.arguments.blends import paired
from flagscale.config.arguments.external import NAME as FUNCTION
from flagscale.config.arguments.external import is_file, place
from flagscale.config.arguments.phases import NAME as PHASES
from flagscale.config.arguments.phases import changed, parse
from flagscale.config.arguments.values import MAX_NAME, size

DATA = frozenset({"data_path", "train_data_path", "valid_data_path", "test_data_path"})
"""Blends: prefixes of data sets, or weights and prefixes in turn."""
TOKENIZER = frozenset(
    {"tokenizer_path", "merge_file", "special_tokens_file"}
    | {a.name for a in ALIASES if a.target == "tokenizer_path"}
)
CONVERSATIONS = (".jsonl", ".ndjson", ".json")
"""How files of conversations end; all else in a blend is a data set's prefix."""
TEMPLATE = "chat_template"
"""A file, or a name."""
PROMPTS = "eval_prompts"
"""A file that is read."""
PRETRAINED = "pretrained_checkpoint"
"""A directory that is read and must be there."""
WRITTEN = frozenset(
    {
        "save",
        "load",
        "export_huggingface",
        "export_peft",
        "tensorboard_dir",
        "wandb_save_dir",
        "data_cache_path",
        "profile_dir",
    }
)
"""Directories that a run makes itself where they are missing."""

NO_PATH = frozenset({"", "false", "true"})
"""Texts that nobody means as a directory: an override's ``save=false`` is one. ``./false`` is."""
_MAX_PATH = 4096 - 512  # PATH_MAX, and what the names of a run's own files take of it
_KERNELS = ("/proc", "/sys", "/dev")
_WEIGHT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def data_cache(values: Mapping[str, Any]) -> tuple[Path, str] | None:
    """Where the data sets' indices are cached, and the argument that decides it: data_cache_path,
    else beside another directory of the run. None: megatron.core puts them beside the data."""
    if values["data_cache_path"]:
        return Path(values["data_cache_path"]), "data_cache_path"
    for name in ("save", "tensorboard_dir"):
        if values[name]:
            return Path(values[name]).parent / "data_cache", name
    return None


def _absolute(path: str) -> str:
    if "://" in path:
        return path  # object storage
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - folds ".."


def too_long(path: str) -> str | None:
    """Why no file system has room for a path; None if one may."""
    longest = max((size(part) for part in path.split("/")), default=0)
    if longest > MAX_NAME:
        return f"a name in it is {longest:,} bytes long; file systems take {MAX_NAME} at most"
    if size(path) > _MAX_PATH:
        return f"is {size(path):,} bytes long, which leaves no room for files in it"
    return None


def kernels_own(path: str) -> str | None:
    """The top of the pseudo file system that a path lies in, by its name; None for others."""
    parts = Path(os.path.normpath(path)).parts
    top = "/".join(("", *parts[1:2]))
    # Shared memory keeps files like any directory, until the machine restarts.
    return top if top in _KERNELS and parts[1:3] != ("dev", "shm") else None


def blend(value: Any) -> list[str]:
    """The words of a blend. One text with weights (``0.3 a 0.7 b``) is split; a path may hold
    spaces, so any other text is one prefix."""
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    words = str(value).split()
    if len(words) > 1 and len(words) % 2 == 0 and all(map(_WEIGHT.fullmatch, words[::2])):
        return words
    return [str(value)]


def _is_blend(value: Any) -> bool:
    """Whether a value can be a blend at all. What cannot is left as it is, for the message about
    its type to show."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return not any(isinstance(item, (list, tuple, dict)) for item in items)


def is_weight(word: str) -> bool:
    """Whether a word of a blend is a weight."""
    return _WEIGHT.fullmatch(word) is not None


def are_conversations(word: str) -> bool:
    """Whether a word of a blend names a file of conversations."""
    return word.endswith(CONVERSATIONS)


def is_template_file(value: str) -> bool:
    """Whether a chat template is given as a file."""
    return value.endswith(".jinja")


def blend_problem(value: Any) -> str | None:
    """What is wrong with a blend's weights; None if nothing is."""
    words = blend(value) if _is_blend(value) else []
    try:
        paired((word, float(word) if is_weight(word) else None) for word in words)
    except ValueError as error:
        return str(error)
    return None


def phase_problem(text: str) -> str | None:
    """What is wrong with the mixture of a phase; None if nothing is, or if it is none at all."""
    for words in _mixtures(text):
        if problem := blend_problem(words):
            return problem
        if len(words) > 1 and not is_weight(words[0]):
            return f"data sets without weights, such as {words[0]}: expected a weight for each"
    return None


def prefixes(value: Any) -> list[str]:
    """The data sets of a blend, without their weights."""
    return [word for word in blend(value) if not is_weight(word)]


def absolute_value(name: str, value: Any, *, external: bool) -> Any:
    """An argument's value with its paths made absolute; other arguments' values as they are.

    An external program may take a tokenizer's name for a path, so there only what exists changes.
    """
    if name in DATA:
        if not _is_blend(value):
            return value
        words = blend(value)
        made = [_absolute_word(w) for w in words]
        return made if isinstance(value, (list, tuple)) or len(made) > 1 else made[0]
    if name == PHASES and isinstance(value, list):
        return [changed(one, _absolute_word) if isinstance(one, str) else one for one in value]
    if not isinstance(value, str):
        return value
    read = name in (*TOKENIZER, PRETRAINED, PROMPTS) and (not external or Path(value).exists())
    written = name in WRITTEN and value not in NO_PATH
    template = name == TEMPLATE and is_template_file(value)
    function = name == FUNCTION and _file_of(value) is not None
    return _absolute(value) if read or written or template or function else value


def _absolute_word(word: str) -> str:
    return word if is_weight(word) else _absolute(word)


def _mixtures(value: Any) -> Iterator[list[str]]:
    """The mixtures of phases, of those that say one."""
    for text in value if isinstance(value, (list, tuple)) else [value]:
        with suppress(ValueError):
            yield list(parse(text).words)


def _file_of(function: Any) -> str | None:
    """The file that a function is named by; None where it is a module, or nothing is named."""
    with suppress(ValueError, AttributeError):
        where, _ = place(function)
        return where if is_file(where) else None
    return None


def needed(name: str, value: Any) -> list[str]:
    """The files and directories that an argument reads, wherever they are."""
    if name == FUNCTION:
        return [where] if (where := _file_of(value)) else []
    if name in (*TOKENIZER, PRETRAINED, PROMPTS) and isinstance(value, str):
        return [value]
    if name == TEMPLATE and isinstance(value, str) and is_template_file(value):
        return [value]
    if name == PHASES:
        return [path for words in _mixtures(value) for path in needed("data_path", words)]
    if name not in DATA or not _is_blend(value):
        return []
    local = [prefix for prefix in prefixes(value) if "://" not in prefix]
    return [
        prefix + suffix
        for prefix in local
        for suffix in ([""] if are_conversations(prefix) else [".bin", ".idx"])
    ]


def missing(name: str, value: Any) -> Iterator[str]:
    """What an argument names and is not there, one message each."""
    if name in (*TOKENIZER, PROMPTS) and isinstance(value, str) and not Path(value).exists():
        yield f"no file or directory {value}"
    template = name == TEMPLATE and isinstance(value, str) and is_template_file(value)
    if template and not Path(value).is_file():
        yield f"no file {value}"
    where = _file_of(value) if name == FUNCTION else None
    if where and not Path(where).is_file():
        yield f"no file {where}"
    if name == PRETRAINED and isinstance(value, str) and not Path(value).is_dir():
        yield f"no directory {value}"
    if name == PHASES:
        for words in _mixtures(value):
            yield from missing("data_path", words)
    if name in DATA and _is_blend(value):
        for prefix in prefixes(value):
            if "://" not in prefix:
                yield from _missing_data(prefix)


def _missing_data(prefix: str) -> Iterator[str]:
    if are_conversations(prefix):
        if not Path(prefix).is_file():
            yield f"no file {prefix}"
        return
    absent = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
    if not absent:
        return
    path = Path(prefix)
    if path.suffix in (".bin", ".idx"):
        yield f"{prefix}: give the data set's prefix, without {path.suffix}"
        return
    folder = path if path.is_dir() else path.parent
    there = sorted(str(p.with_suffix("")) for p in folder.glob("*.idx"))[:5]
    hint = f"; there is {', '.join(there)}" if there else ""
    yield f"no data set {prefix}: {' and '.join(prefix + s for s in absent)} missing{hint}"
