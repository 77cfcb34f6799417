"""What a tokenizer's files tell before any of it is used: its tokens, and how many there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
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
_OF_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_BYTES = 257
"""Of ByteLevelTokenizer: one for each byte, and the end of a document."""


def too_few_tokens(experiment: Experiment) -> Iterator[Problem]:
    """That the model is to have fewer tokens than its tokenizer. Nothing is said where that cannot
    be told from files on this machine, or where hosts have files of their own: the ranks look."""
    if experiment.task.external or experiment.task.is_command or experiment.runner.no_shared_fs:
        return
    args = Arguments.of(experiment)
    wanted = args["vocab_size"]
    kind, path, separate = args[_TYPE], args["tokenizer_path"], bool(args["merge_file"])
    found = vocabulary(kind, path, separate=separate) if wanted and kind else None
    if found is not None and found.size > wanted:
        of = "tokenizer_path" if path else f"{_TYPE} {kind}"
        message = f"{wanted} is less than the {found.size} tokens of {of}"
        yield args.problem("vocab_size", f"{message}; raise it, or leave it out to take these")


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer's files say. ``size``: one more than the largest number of a token."""

    size: int
    names: frozenset[str]
    """Its tokens, where files of Hugging Face's list them."""


def vocabulary(
    kind: str | None, path: Any, *, separate: bool = False, most_bytes: int | None = None
) -> Vocabulary | None:
    """The vocabulary of a tokenizer of a kind, any of Hugging Face's if None; None where its files
    do not tell.

    Args:
        path: its directory or file.
        separate: GPT-2's two files are named one by one, and ``path`` is the first.
        most_bytes: a file that is larger is not read.
    """
    if kind == "ByteLevelTokenizer":
        return Vocabulary(_BYTES, frozenset())
    if not isinstance(path, str):
        return None
    try:
        file = _file_of(kind, Path(path), separate=separate)
        if file is None or (most_bytes is not None and file.stat().st_size > most_bytes):
            return None
        return _of_sentencepiece(file) if kind in _OF_SENTENCEPIECE else _of_json(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the ranks tell what is wrong with it


def _file_of(kind: str | None, path: Path, *, separate: bool) -> Path | None:
    """The file that lists the tokens; None where they are in none that is known."""
    if kind in _OF_SENTENCEPIECE:
        return path / "tokenizer.model" if path.is_dir() else path
    if kind is not None and kind not in _OF_DIRECTORIES:
        return None
    if kind == "GPT2BPETokenizer" and separate:
        return path
    folder = path.parent if path.is_file() else path
    if (file := folder / "tokenizer.json").is_file():
        return file
    file = folder / "vocab.json"
    return file if file.is_file() and (folder / "merges.txt").is_file() else None


def _of_json(file: Path) -> Vocabulary:
    """Of ``tokenizer.json``, or of GPT-2's ``vocab.json``, a map of tokens alone."""
    found = json.loads(file.read_bytes())
    if file.name != "tokenizer.json":
        return Vocabulary(_most(found), frozenset(found))
    listed = found["model"]["vocab"]
    added = {token["content"]: token["id"] for token in found.get("added_tokens") or ()}
    names = [item[0] for item in listed] if isinstance(listed, list) else listed
    return Vocabulary(max(_most(listed), _most(added)), frozenset((*names, *added)))


def _of_sentencepiece(file: Path) -> Vocabulary | None:
    """Of a model of SentencePiece's, by its library where that is installed."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        return None
    try:
        size = SentencePieceProcessor(model_file=str(file)).get_piece_size()
    except RuntimeError:
        return None
    return Vocabulary(int(size), frozenset())


def _most(vocabulary: Any) -> int:
    """One more than the largest number of a vocabulary, which is a map or (Unigram's) a list."""
    if isinstance(vocabulary, list):
        return len(vocabulary)
    return int(max(vocabulary.values(), default=-1)) + 1
