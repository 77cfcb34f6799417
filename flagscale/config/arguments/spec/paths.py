"""Arguments whose values are paths: absolute forms, and the files that must exist."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flagscale.config.arguments.compat.aliases import ALIASES
from flagscale.config.arguments.spec.data_phases import DATA_PHASES as PHASES
from flagscale.config.arguments.spec.data_phases import map_phase_paths, parse_phase
from flagscale.config.arguments.spec.values import MAX_NAME, byte_length


def pair_weights(words: Iterable[tuple[str, float | None]]) -> list[tuple[str, float | None]]:
    """Data sets with their weights, None for all where none has one. ``words`` come with the
    number that each is, None for a data set.

    Raises ValueError: nothing is given, a weight is no positive number, stands before no data set,
    or only some data sets have one.
    """
    pairs: list[tuple[str, float | None]] = []
    pending: str | None = None
    weight: float | None = None
    for word, number in words:
        if number is None:
            pairs.append((word, weight))
            pending = weight = None
        elif pending is not None:
            raise ValueError(f"two weights in a row before {word!r}; expected a prefix")
        elif not (math.isfinite(number) and number > 0):
            raise ValueError(f"the weight {word} is not a positive number")
        else:
            pending, weight = word, number
    if pending is not None:
        raise ValueError(f"the weight {pending} at the end stands before no prefix")
    if not pairs:
        raise ValueError("is empty; expected a data set's prefix")
    bare = [word for word, number in pairs if number is None]
    if bare and len(bare) < len(pairs):
        raise ValueError(f"{bare[0]} has no weight, but others have; give all or none")
    return pairs


EXTERNAL_DATA, EXTERNAL = "external_data", "external"
MODULE_HINT = (
    "its directory has to be on PYTHONPATH (experiment.envs), or give a file: "
    "path/to/file.py:function"
)
"""What helps where its module is not found."""
FUNCTION_FORM = "package.module:function or path/to/file.py:function"


def parse_function_path(text: str) -> tuple[str, str]:
    """The module or file of a function, and its name.

    Raises:
        ValueError: it is of another form.
    """
    where, colon, function = text.rpartition(":")
    dotted = is_python_file(where) or all(part.isidentifier() for part in where.split("."))
    if not (colon and where and function.isidentifier() and dotted):
        raise ValueError(f"expected {FUNCTION_FORM}, found {text!r}")
    return where, function


def is_python_file(where: str) -> bool:
    """Return whether a function is given by a file, not by an importable module."""
    return where.endswith(".py")


BLENDS = frozenset({"data_path", "train_data_path", "valid_data_path", "test_data_path"})
"""Blends: prefixes of data sets, or weights and prefixes in turn."""
TOKENIZER_PATHS = frozenset(
    {"tokenizer_path", "merge_file", "special_tokens_file"}
    | {a.name for a in ALIASES if a.target == "tokenizer_path"}
)
CONVERSATION_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""How files of conversations end; all else in a blend is a data set's prefix."""
CHAT_TEMPLATE = "chat_template"
"""A file, or a name."""
EVAL_PROMPTS = "eval_prompts"
"""A file that is read."""
PRETRAINED_CHECKPOINT = "pretrained_checkpoint"
"""A directory that is read and must be there."""
WRITTEN_DIRECTORIES = frozenset(
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
NOT_A_PATH = frozenset({"", "false", "true"})
"""Texts that nobody means as a directory: an override's ``save=false`` is one. ``./false`` is."""
_MAX_PATH = 4096 - 512  # PATH_MAX, and what the names of a run's own files take of it
_PSEUDO_FILE_SYSTEMS = ("/proc", "/sys", "/dev")
_WEIGHT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def data_cache_of(values: Mapping[str, Any]) -> tuple[Path, str] | None:
    """Return the cache directory of data set indices and the argument that determines it:
    data_cache_path, otherwise next to another directory of the run. None: megatron.core stores them
    next to the data."""
    if values["data_cache_path"]:
        return Path(values["data_cache_path"]), "data_cache_path"
    for name in ("save", "tensorboard_dir"):
        if values[name]:
            return Path(values[name]).parent / "data_cache", name
    return None


def _absolute_path(path: str) -> str:
    if "://" in path:
        return path  # object storage
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - folds ".."


def why_too_long(path: str) -> str | None:
    """Why no file system has room for a path; None if one may."""
    longest = max((byte_length(part) for part in path.split("/")), default=0)
    if longest > MAX_NAME:
        return f"a name in it is {longest:,} bytes long; file systems take {MAX_NAME} at most"
    if byte_length(path) > _MAX_PATH:
        return f"is {byte_length(path):,} bytes long, which leaves no room for files in it"
    return None


def pseudo_file_system_of(path: str) -> str | None:
    """The top of the pseudo file system that a path lies in, by its name; None for others."""
    parts = Path(os.path.normpath(path)).parts
    top = "/".join(("", *parts[1:2]))
    # Shared memory keeps files like any directory, until the machine restarts.
    return top if top in _PSEUDO_FILE_SYSTEMS and parts[1:3] != ("dev", "shm") else None


def blend_words(value: Any) -> list[str]:
    """The words of a blend. One text with weights (``0.3 a 0.7 b``) is split; a path may hold
    spaces, so any other text is one prefix."""
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    words = str(value).split()
    if len(words) > 1 and len(words) % 2 == 0 and all(map(_WEIGHT.fullmatch, words[::2])):
        return words
    return [str(value)]


def _is_blend(value: Any) -> bool:
    """Return whether a value can be a blend. Other values are left unchanged, so that the message
    about their type can show them."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return not any(isinstance(item, (list, tuple, dict)) for item in items)


def is_weight(word: str) -> bool:
    """Return whether a word of a blend is a weight."""
    return _WEIGHT.fullmatch(word) is not None


def is_conversation_file(word: str) -> bool:
    """Return whether a word of a blend names a file of conversations."""
    return word.endswith(CONVERSATION_SUFFIXES)


def is_template_file(value: str) -> bool:
    """Return whether a chat template is given as a file."""
    return value.endswith(".jinja")


def blend_problem(value: Any) -> str | None:
    """Return the problem of a blend's weights; None if there is none."""
    words = blend_words(value) if _is_blend(value) else []
    try:
        pair_weights((word, float(word) if is_weight(word) else None) for word in words)
    except ValueError as error:
        return str(error)
    return None


def phase_problem(text: str) -> str | None:
    """Return the problem of a phase's mixture; None if there is none or no mixture."""
    for words in _phase_mixtures(text):
        if problem := blend_problem(words):
            return problem
        if len(words) > 1 and not is_weight(words[0]):
            return f"data sets without weights, such as {words[0]}: expected a weight for each"
    return None


def blend_prefixes(value: Any) -> list[str]:
    """The data sets of a blend, without their weights."""
    return [word for word in blend_words(value) if not is_weight(word)]


def absolute_value(name: str, value: Any, *, external: bool) -> Any:
    """Return an argument's value with its paths made absolute; other values are unchanged.

    An external program may take a tokenizer's name for a path, so there only what exists changes.
    """
    if name in BLENDS:
        if not _is_blend(value):
            return value
        words = blend_words(value)
        absolute = [_absolute_word(w) for w in words]
        return absolute if isinstance(value, (list, tuple)) or len(absolute) > 1 else absolute[0]
    if name == PHASES and isinstance(value, list):
        return [
            map_phase_paths(one, _absolute_word) if isinstance(one, str) else one for one in value
        ]
    if not isinstance(value, str):
        return value
    read = name in (*TOKENIZER_PATHS, PRETRAINED_CHECKPOINT, EVAL_PROMPTS) and (
        not external or Path(value).exists()
    )
    written = name in WRITTEN_DIRECTORIES and value not in NOT_A_PATH
    template = name == CHAT_TEMPLATE and is_template_file(value)
    function = name == EXTERNAL_DATA and _python_file_of(value) is not None
    return _absolute_path(value) if read or written or template or function else value


def _absolute_word(word: str) -> str:
    return word if is_weight(word) else _absolute_path(word)


def _phase_mixtures(value: Any) -> Iterator[list[str]]:
    """The mixtures of phases, of those that say one."""
    for text in value if isinstance(value, (list, tuple)) else [value]:
        with suppress(ValueError):
            yield list(parse_phase(text).words)


def _python_file_of(function: Any) -> str | None:
    """The file that a function is named by; None where it is a module, or nothing is named."""
    with suppress(ValueError, AttributeError):
        where, _ = parse_function_path(function)
        return where if is_python_file(where) else None
    return None


def files_needed(name: str, value: Any) -> list[str]:
    """Return the files and directories that an argument reads, on any machine."""
    if name == EXTERNAL_DATA:
        return [where] if (where := _python_file_of(value)) else []
    if name in (*TOKENIZER_PATHS, PRETRAINED_CHECKPOINT, EVAL_PROMPTS) and isinstance(value, str):
        return [value]
    if name == CHAT_TEMPLATE and isinstance(value, str) and is_template_file(value):
        return [value]
    if name == PHASES:
        return [
            path for words in _phase_mixtures(value) for path in files_needed("data_path", words)
        ]
    if name not in BLENDS or not _is_blend(value):
        return []
    local = [prefix for prefix in blend_prefixes(value) if "://" not in prefix]
    return [
        prefix + suffix
        for prefix in local
        for suffix in ([""] if is_conversation_file(prefix) else [".bin", ".idx"])
    ]


def missing_files(name: str, value: Any) -> Iterator[str]:
    """Yield one message for each file that an argument names and that does not exist."""
    if (
        name in (*TOKENIZER_PATHS, EVAL_PROMPTS)
        and isinstance(value, str)
        and not Path(value).exists()
    ):
        yield f"no file or directory {value}"
    template = name == CHAT_TEMPLATE and isinstance(value, str) and is_template_file(value)
    if template and not Path(value).is_file():
        yield f"no file {value}"
    where = _python_file_of(value) if name == EXTERNAL_DATA else None
    if where and not Path(where).is_file():
        yield f"no file {where}"
    if name == PRETRAINED_CHECKPOINT and isinstance(value, str) and not Path(value).is_dir():
        yield f"no directory {value}"
    if name == PHASES:
        for words in _phase_mixtures(value):
            yield from missing_files("data_path", words)
    if name in BLENDS and _is_blend(value):
        for prefix in blend_prefixes(value):
            if "://" not in prefix:
                yield from _missing_data_set(prefix)


def _missing_data_set(prefix: str) -> Iterator[str]:
    if is_conversation_file(prefix):
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
