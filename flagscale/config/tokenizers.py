"""What a tokenizer's files tell without the libraries that read them: how many tokens it has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flagscale.config.checks import Arguments
from flagscale.config.schema import Experiment
from flagscale.errors import Problem

_TYPE = "tokenizer_type"
_OF_DIRECTORIES = (
    "HuggingFaceTokenizer",
    "Llama3TokenizerFS",
    "QwenTokenizerFS",
    "Qwen2TokenizerFS",
    "HFTokenizerFS",
    "HFTokenizersTokenizerFS",
    "GPT2BPETokenizer",
)
"""Types whose files are Hugging Face's."""
_BYTES = 257
"""Of ByteLevelTokenizer: one for each byte, and the end of a document."""


def too_few_tokens(experiment: Experiment) -> Iterator[Problem]:
    """That the model is to have fewer tokens than its tokenizer. Nothing is said where that cannot
    be told from files on this machine, or where hosts have files of their own: the ranks look."""
    if experiment.task.external or experiment.task.is_command or experiment.runner.no_shared_fs:
        return
    args = Arguments.of(experiment)
    wanted = args["vocab_size"]
    there = _tokens(args) if wanted else None
    if there is not None and there > wanted:
        of = "tokenizer_path" if args[_TYPE] in _OF_DIRECTORIES else f"{_TYPE} {args[_TYPE]}"
        message = f"{wanted} is less than the {there} tokens of {of}"
        yield args.problem("vocab_size", f"{message}; raise it, or leave it out to take these")


def _tokens(args: Arguments) -> int | None:
    """How many tokens the tokenizer has; None where its files do not tell."""
    kind, path = args[_TYPE], args["tokenizer_path"]
    if kind == "ByteLevelTokenizer":
        return _BYTES
    if kind not in _OF_DIRECTORIES or not isinstance(path, str):
        return None
    try:
        if kind == "GPT2BPETokenizer" and args["merge_file"]:
            return _most(json.loads(Path(path).read_bytes()))
        return _of_directory(Path(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the ranks tell what is wrong with it


def _of_directory(path: Path) -> int | None:
    folder = path.parent if path.is_file() else path
    if (file := folder / "tokenizer.json").is_file():
        found = json.loads(file.read_bytes())
        added = {token["content"]: token["id"] for token in found.get("added_tokens") or ()}
        return max(_most(found["model"]["vocab"]), _most(added))
    if (file := folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _most(json.loads(file.read_bytes()))
    return None


def _most(vocabulary: Any) -> int:
    """One more than the largest number of a vocabulary, which is a map or (Unigram's) a list."""
    if isinstance(vocabulary, list):
        return len(vocabulary)
    return int(max(vocabulary.values(), default=-1)) + 1
