"""Arguments whose values are paths: data sets, tokenizers, checkpoints, directories and functions.

Parses blends and data phases, makes paths absolute when a configuration is read, and lists the
files that an argument needs. A *blend* is a mixture of data sets, ``[0.3, a, 0.7, b]``. *Data
phases* are blends that replace one another during training: a YAML gives a list of maps,
``{samples: 100000, data_path: [0.2, web, 0.8, code]}``, and the training program takes one text per
phase, ``samples=100000 0.2 web 0.8 code``, quoted like shell words.
"""

from __future__ import annotations

import glob
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.config.arguments.compat.names import ALIASES
from flagscale.config.arguments.spec.values import MAX_NAME, byte_length, format_value, to_word
from flagscale.object_storage import explain_unusable, is_address

DATA_PHASES = "data_phases"
PHASE_UNITS = ("samples", "tokens")
_DATA_PATH = "data_path"
_EXAMPLE = "expected {samples: 100000, data_path: [0.2, web, 0.8, code]}"


@dataclass(frozen=True)
class DataPhase:
    """A blend that is used after ``count`` samples or tokens of training data."""

    count: int
    unit: str
    """``samples`` or ``tokens``."""
    words: tuple[str, ...]
    """Weights and data sets of the blend."""

    def first_sample(self, seq_length: int) -> int:
        """Return the index of the first sample of the phase. A sample whose tokens belong to two
        phases belongs to the earlier one."""
        return -(-self.count // seq_length) if self.unit == "tokens" else self.count


def phase_words(items: Sequence[Any]) -> list[Any]:
    """Convert the maps of ``data_phases`` in a YAML to texts; other items are unchanged, and
    checked later."""
    return [_phase_word(item) if isinstance(item, Mapping) else item for item in items]


def _phase_word(item: Mapping[Any, Any]) -> str:
    blend = item.get(_DATA_PATH)
    words = blend if isinstance(blend, (list, tuple)) else str(blend or "").split()
    starts = [f"{key}={to_word(value)}" for key, value in item.items() if key != _DATA_PATH]
    return shlex.join([*starts, *map(to_word, words)])


def parse_phase(text: str) -> DataPhase:
    """Parse the text of a phase.

    Raises:
        ValueError: the text is malformed.
    """
    try:
        head, *words = shlex.split(text)
    except ValueError:
        raise ValueError(f"{_EXAMPLE}, found {format_value(text)}") from None
    unit, equals, number = head.partition("=")
    if (
        unit not in PHASE_UNITS
        or not equals
        or any("=" in word and _is_phase_head(word) for word in words)
    ):
        raise ValueError(f"{_EXAMPLE}, with samples or tokens, found {format_value(text)}")
    try:
        count = float(number)
    except ValueError:
        count = 0.0
    if not 0 < count < 2**62 or not count.is_integer():
        raise ValueError(f"{unit}: expected a whole number from 1, found {format_value(number)}")
    if not words:
        raise ValueError(f"{_DATA_PATH} is missing; {_EXAMPLE}")
    return DataPhase(int(count), unit, tuple(words))


def _is_phase_head(text: str) -> bool:
    return text.partition("=")[0].isidentifier() and "/" not in text


def map_phase_paths(text: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` to each word of the blend in the text of a phase. A malformed text is
    returned unchanged."""
    try:
        phase = parse_phase(text)
    except ValueError:
        return text
    return shlex.join([f"{phase.unit}={phase.count}", *map(change, phase.words)])


def pair_weights(words: Iterable[tuple[str, float | None]]) -> list[tuple[str, float | None]]:
    """Pair the data sets of a blend with their weights.

    Args:
        words: the words of the blend, each with its number if it is a weight, and None if it is the
            prefix of a data set.

    Returns:
        Prefixes with their weights; the weights of all are None if the blend has no weights.

    Raises:
        ValueError: the blend is empty, a weight is not positive or not followed by a prefix, or
            only some data sets have weights.
    """
    pairs: list[tuple[str, float | None]] = []
    weight_word: str | None = None
    weight: float | None = None
    for word, number in words:
        if number is None:
            pairs.append((word, weight))
            weight_word = weight = None
        elif weight_word is not None:
            raise ValueError(f"expected a prefix after the weight {weight_word}, found {word!r}")
        elif not (math.isfinite(number) and number > 0):
            raise ValueError(f"expected a positive weight, found {word}")
        else:
            weight_word, weight = word, number
    if weight_word is not None:
        raise ValueError(f"expected a prefix after the weight {weight_word}, found the end")
    if not pairs:
        raise ValueError("expected the prefix of a data set, found an empty list")
    unweighted = [word for word, number in pairs if number is None]
    if unweighted and len(unweighted) < len(pairs):
        raise ValueError(
            f"expected weights for all data sets or for none; {unweighted[0]} has none"
        )
    return pairs


EXTERNAL_DATA, EXTERNAL = "external_data", "external"
MODULE_HINT = (
    "its directory has to be on PYTHONPATH (experiment.envs), or give a file: "
    "path/to/file.py:function"
)
"""Hint if the module of ``external_data`` is not found."""
FUNCTION_FORM = "package.module:function or path/to/file.py:function"


def parse_function_path(text: str) -> tuple[str, str]:
    """Split ``module:function`` or ``file.py:function`` into the module or file and the function.

    Raises:
        ValueError: the text has another form.
    """
    module, colon, function = text.rpartition(":")
    is_valid = is_python_file(module) or all(part.isidentifier() for part in module.split("."))
    if not (colon and module and function.isidentifier() and is_valid):
        raise ValueError(f"expected {FUNCTION_FORM}, found {text!r}")
    return module, function


def is_python_file(module: str) -> bool:
    """Return whether the module of a function is given as a file, not as an importable name."""
    return module.endswith(".py")


BLENDS = frozenset({"data_path", "train_data_path", "valid_data_path", "test_data_path"})
"""Arguments whose value is a blend: prefixes of data sets, or alternating weights and prefixes."""
TOKENIZER_PATHS = frozenset(
    {"tokenizer_path", "merge_file", "special_tokens_file"}
    | {a.name for a in ALIASES if a.target == "tokenizer_path"}
)
CONVERSATION_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
"""Suffixes of conversation files; other words of a blend are prefixes of data sets."""
CHAT_TEMPLATE = "chat_template"
"""Argument whose value is the path of a file, or the name of a built-in template."""
EVAL_PROMPTS = "eval_prompts"
"""Argument whose value is the path of a file."""
EVAL_TASKS = "eval_tasks"
"""Argument whose values are names of tasks, or paths of YAML files of tasks."""
MEMORY_SNAPSHOT = "memory_snapshot_path"
"""Argument whose value is the path of a file that a run writes."""
PRETRAINED_CHECKPOINT = "pretrained_checkpoint"
"""Argument whose value is the path of an existing directory."""
WRITTEN_DIRECTORIES = frozenset(
    {
        "save",
        "save_staging_dir",
        "load",
        "export_huggingface",
        "export_peft",
        "tensorboard_dir",
        "wandb_save_dir",
        "data_cache_path",
        "profile_dir",
    }
)
"""Arguments whose value is a directory that a run creates if it is missing."""
STORED_DIRECTORIES = frozenset({"save", "load"})
"""Arguments whose value may also be an address of object storage."""
_STAGING = "checkpoint_staging"
NOT_A_PATH = frozenset({"", "false", "true"})
"""Values that are not directories, such as in the override ``save=false``. ``./false`` is one."""
_MAX_PATH = 4096 - 512  # PATH_MAX without room for the names of a run's files
_PSEUDO_FILE_SYSTEMS = ("/proc", "/sys", "/dev")
_WEIGHT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def data_cache_of(values: Mapping[str, Any]) -> tuple[Path, str] | None:
    """Return the directory of index caches and the argument that determines it.

    It is ``data_cache_path``, otherwise a directory next to ``save`` or ``tensorboard_dir``. None
    without these arguments: megatron.core then stores the caches next to the data.
    """
    if values["data_cache_path"]:
        return Path(values["data_cache_path"]), "data_cache_path"
    directory = run_directory(values)
    return None if directory is None else (directory[0] / "data_cache", directory[1])


def run_directory(values: Mapping[str, Any]) -> tuple[Path, str] | None:
    """Return the directory of a run's own files and the argument that determines it: the parent of
    ``save`` or of ``tensorboard_dir``. None without one of them on a disk.
    """
    for name in ("save", "tensorboard_dir"):
        if values[name] and not is_address(values[name]):
            return Path(values[name]).parent, name
    return None


def staging_directory(values: Mapping[str, Any]) -> Path:
    """Return the directory from which checkpoints are uploaded, if ``save`` is an address."""
    if values["save_staging_dir"]:
        return Path(values["save_staging_dir"])
    directory = run_directory(values)
    return (Path() if directory is None else directory[0]).absolute() / _STAGING


def storage_problem(name: str, value: str) -> str | None:
    """Return the problem of an argument that names object storage; None if there is none."""
    if not is_address(value):
        return None
    if name not in STORED_DIRECTORIES:
        return (
            "expected a directory, found an address of object storage, which only "
            f"{' and '.join(sorted(STORED_DIRECTORIES, reverse=True))} may be"
        )
    return explain_unusable(value)


def _absolute_path(path: str) -> str:
    if is_address(path):
        return path
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - folds ".."


def why_too_long(path: str) -> str | None:
    """Return the reason why file systems do not support a path; None if they do."""
    longest = max((byte_length(part) for part in path.split("/")), default=0)
    if longest > MAX_NAME:
        return f"a name in it is {longest:,} bytes long; expected at most {MAX_NAME}"
    if byte_length(path) > _MAX_PATH:
        return f"is {byte_length(path):,} bytes long; expected at most {_MAX_PATH:,}"
    return None


def pseudo_file_system_of(path: str) -> str | None:
    """Return the mount point of the pseudo file system that contains a path (``/proc``); None for
    other paths."""
    parts = Path(os.path.normpath(path)).parts
    top = "/".join(("", *parts[1:2]))
    # /dev/shm stores files like other directories until the machine restarts.
    return top if top in _PSEUDO_FILE_SYSTEMS and parts[1:3] != ("dev", "shm") else None


def blend_words(value: Any) -> list[str]:
    """Return the words of a blend.

    A single text with weights (``0.3 a 0.7 b``) is split at spaces. Any other text is one prefix,
    because paths may contain spaces.
    """
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    words = str(value).split()
    if len(words) > 1 and len(words) % 2 == 0 and all(map(_WEIGHT.fullmatch, words[::2])):
        return words
    return [str(value)]


def _is_blend(value: Any) -> bool:
    """Return whether a value has the type of a blend. Other values are reported by their type
    check."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return not any(isinstance(item, (list, tuple, dict)) for item in items)


def is_weight(word: str) -> bool:
    """Return whether a word of a blend is a weight."""
    return _WEIGHT.fullmatch(word) is not None


def is_conversation_file(word: str) -> bool:
    """Return whether a word of a blend names a file of conversations."""
    return word.endswith(CONVERSATION_SUFFIXES)


def is_task_file(word: str) -> bool:
    """Return whether a task of ``eval_tasks`` is given as a file."""
    return word.endswith((".yaml", ".yml"))


def _list_task_files(value: Any) -> list[str]:
    """Return the files among the tasks of ``eval_tasks``."""
    words = value if isinstance(value, (list, tuple)) else [value]
    return [word for word in words if isinstance(word, str) and is_task_file(word)]


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
    """Return the problem of the blend in a phase; None if there is none or the phase is
    malformed."""
    for words in _phase_blends(text):
        if problem := blend_problem(words):
            return problem
        if len(words) > 1 and not is_weight(words[0]):
            return f"expected a weight for each data set; {words[0]} has none"
    return None


def blend_prefixes(value: Any) -> list[str]:
    """Return the prefixes of the data sets of a blend, without their weights."""
    return [word for word in blend_words(value) if not is_weight(word)]


def absolute_value(name: str, value: Any, *, external: bool) -> Any:
    """Return an argument's value with absolute paths; other values are unchanged.

    The value may be the name of a tokenizer instead of a path if the training program is
    ``external``; then only existing paths are changed.
    """
    if name in BLENDS:
        if not _is_blend(value):
            return value
        words = blend_words(value)
        absolute = [_absolute_word(w) for w in words]
        return absolute if isinstance(value, (list, tuple)) or len(absolute) > 1 else absolute[0]
    if name == DATA_PHASES and isinstance(value, list):
        return [
            map_phase_paths(phase, _absolute_word) if isinstance(phase, str) else phase
            for phase in value
        ]
    if name == EVAL_TASKS and isinstance(value, list):
        return [absolute_value(name, item, external=external) for item in value]
    if not isinstance(value, str):
        return value
    read = name in (*TOKENIZER_PATHS, PRETRAINED_CHECKPOINT, EVAL_PROMPTS) and (
        not external or Path(value).exists()
    )
    is_written = name in WRITTEN_DIRECTORIES or name == MEMORY_SNAPSHOT
    written = is_written and value not in NOT_A_PATH
    template = name == CHAT_TEMPLATE and is_template_file(value)
    function = name == EXTERNAL_DATA and _python_file_of(value) is not None
    task = name == EVAL_TASKS and is_task_file(value)
    return _absolute_path(value) if read or written or template or function or task else value


def _absolute_word(word: str) -> str:
    return word if is_weight(word) else _absolute_path(word)


def _phase_blends(value: Any) -> Iterator[list[str]]:
    """Yield the words of the blend of each well-formed phase."""
    for text in value if isinstance(value, (list, tuple)) else [value]:
        with suppress(ValueError):
            yield list(parse_phase(text).words)


def _python_file_of(function: Any) -> str | None:
    """Return the file of a function; None if it is in an importable module, or invalid."""
    with suppress(ValueError, AttributeError):
        module, _ = parse_function_path(function)
        return module if is_python_file(module) else None
    return None


def files_needed(name: str, value: Any) -> list[str]:
    """Return the files and directories that an argument reads, on any machine."""
    if name == EXTERNAL_DATA:
        return [file] if (file := _python_file_of(value)) else []
    if name in (*TOKENIZER_PATHS, PRETRAINED_CHECKPOINT, EVAL_PROMPTS) and isinstance(value, str):
        return [value]
    if name == CHAT_TEMPLATE and isinstance(value, str) and is_template_file(value):
        return [value]
    if name == DATA_PHASES:
        return [path for words in _phase_blends(value) for path in files_needed("data_path", words)]
    return _list_task_files(value) if name == EVAL_TASKS else _list_blend_files(name, value)


def _list_blend_files(name: str, value: Any) -> list[str]:
    if name not in BLENDS or not _is_blend(value):
        return []
    local = [prefix for prefix in blend_prefixes(value) if not is_address(prefix)]
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
    if name == EVAL_TASKS:
        missing = (path for path in _list_task_files(value) if not Path(path).is_file())
        yield from (f"no file {path}" for path in missing)
    function_file = _python_file_of(value) if name == EXTERNAL_DATA else None
    if function_file and not Path(function_file).is_file():
        yield f"no file {function_file}"
    is_pretrained = name == PRETRAINED_CHECKPOINT and isinstance(value, str)
    if is_pretrained and not is_address(value) and not Path(value).is_dir():
        yield f"no directory {value}"
    if name == DATA_PHASES:
        for words in _phase_blends(value):
            yield from missing_files("data_path", words)
    if name in BLENDS and _is_blend(value):
        for prefix in blend_prefixes(value):
            if not is_address(prefix):
                yield from _missing_data_set(prefix)


def _missing_data_set(prefix: str) -> Iterator[str]:
    if is_conversation_file(prefix):
        if not Path(prefix).is_file():
            yield f"no file {prefix}"
        return
    absent = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
    if not absent:
        return
    if problem := misnamed_data_set(prefix):
        yield problem
        return
    path = Path(prefix)
    folder = path if path.is_dir() else path.parent
    existing = sorted(str(p.with_suffix("")) for p in folder.glob("*.idx"))[:5]
    hint = f"; existing data sets: {', '.join(existing)}" if existing else ""
    yield f"no data set {prefix}: {' and '.join(prefix + s for s in absent)} missing{hint}"


def misnamed_data_sets(name: str, value: Any) -> Iterator[str]:
    """Yield one message for each data set of a blend that is missing on this machine, if its files
    here show what is meant (:func:`misnamed_data_set`)."""
    if name == DATA_PHASES:
        for words in _phase_blends(value):
            yield from misnamed_data_sets("data_path", words)
    if name in BLENDS and _is_blend(value):
        for prefix in blend_prefixes(value):
            if not is_address(prefix) and not is_conversation_file(prefix):
                yield from filter(None, [misnamed_data_set(prefix)])


def misnamed_data_set(prefix: str) -> str | None:
    """Return the message about a prefix that has no files, but whose name shows what is meant: a
    file of a data set, its beginning, its directory, or a text. None if it has files, or if nothing
    of the kind is on this machine.
    """
    path = Path(prefix)
    if Path(f"{prefix}.idx").is_file() or Path(f"{prefix}.bin").is_file():
        return None
    if path.suffix in (".bin", ".idx"):
        return (
            f"expected the prefix of a data set, without {path.suffix}: write "
            f"{_shown(path.with_suffix(''))}"
        )
    if path.is_file():
        return (
            f"expected the prefix of a data set, found the file {_shown(path)}: convert its text "
            "with tools/data/preprocess.py first"
        )
    pattern = "*.idx" if path.is_dir() else f"{glob.escape(path.name)}_*.idx"
    folder = path if path.is_dir() else path.parent
    existing = [_shown(file.with_suffix("")) for file in sorted(folder.glob(pattern))]
    existing = [text for text in existing if Path(f"{text}.bin").is_file()]
    if not existing:
        return None
    more = f" or {existing[1]}" if len(existing) == 2 else ""
    more = f", or one of {len(existing) - 1} others" if len(existing) > 2 else more
    return f"no data set {_shown(path)}, but there is {existing[0]}.bin: write {existing[0]}{more}"


def _shown(path: Path) -> str:
    """Return a path as a user writes it: relative to the working directory if it is below it."""
    directory = Path.cwd()
    return str(path.relative_to(directory) if path.is_relative_to(directory) else path)
