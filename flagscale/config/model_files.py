"""Files of a model on this machine: the config.json of a pretrained model, and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flagscale.config.arguments.compat.huggingface.models import (
    config_in,
    disagreements,
    is_huggingface_model,
    missing_arguments,
)
from flagscale.config.arguments.spec.paths import PRETRAINED_CHECKPOINT
from flagscale.config.arguments.spec.train_arguments import GivenArgument, TrainArguments
from flagscale.config.schema import Experiment
from flagscale.errors import CheckpointError, Problem


def fill_from_pretrained(experiment: Experiment) -> tuple[Experiment, list[Problem]]:
    """The experiment with the arguments of the model that its YAML leaves out, and what is wrong
    with the model or disagrees with it.

    Nothing is done where the directory is not on this machine, or is none of Hugging Face; the
    ranks compare in any case.
    """
    args = experiment.train
    path = args[PRETRAINED_CHECKPOINT]
    if experiment.task.external:
        return experiment, []
    if not isinstance(path, str):
        return experiment, list(_check_load(args))
    try:
        config = config_in(Path(path))
        if config is None:
            return experiment, list(_check_pretrained_directory(args, Path(path)))
        added = missing_arguments(args.values, args.given, config)
        train = args.with_added(_added_entries(added))
        filled = replace(experiment, train=train, filled=tuple(added))
        wrong = _find_disagreements(train, config)
    except CheckpointError as error:
        return experiment, [args.problem(PRETRAINED_CHECKPOINT, f"{path}: {error.message}")]
    return filled, wrong


def _check_load(args: TrainArguments) -> Iterator[Problem]:
    """``load`` takes checkpoints, from which training goes on."""
    load = args["load"]
    if isinstance(load, str) and is_huggingface_model(Path(load)):
        message = f"{load} is a model of Hugging Face; {PRETRAINED_CHECKPOINT} starts from one"
        yield args.problem("load", message)


def _check_pretrained_directory(args: TrainArguments, path: Path) -> Iterator[Problem]:
    if path.is_dir() and not any((*path.glob("iter_*"), *path.glob("**/mp_rank_*"))):
        message = f"{path} holds neither config.json, as a model of Hugging Face does, nor iter_…"
        yield args.problem(
            PRETRAINED_CHECKPOINT, f"{message} directories, as one of checkpoints does"
        )


def _added_entries(added: dict[str, Any]) -> Iterator[GivenArgument]:
    """Yield the added arguments, under keys that no YAML has."""
    for name, value in added.items():
        key = f"train.model.{PRETRAINED_CHECKPOINT}.{name}"
        yield GivenArgument(key, name, value, value, argument=name, canonical=value)


def _find_disagreements(args: TrainArguments, config: dict[str, Any]) -> list[Problem]:
    values = args.values
    if any(values[name] is None for name in ("num_layers", "hidden_size", "seq_length")):
        return []  # told elsewhere
    return [args.problem(name, message) for name, message in disagreements(config, values)]


_TOKENIZER_TYPE = "tokenizer_type"
_HUGGINGFACE_TOKENIZERS = (
    "HuggingFaceTokenizer",
    "Llama3TokenizerFS",
    "QwenTokenizerFS",
    "Qwen2TokenizerFS",
    "HFTokenizerFS",
    "HFTokenizersTokenizerFS",
    "GPT2BPETokenizer",
)
"""Types whose files are Hugging Face's."""
_SENTENCEPIECE_TOKENIZERS = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
)
_BYTE_TOKENS = 257
"""Of ByteLevelTokenizer: one for each byte, and the end of a document."""


def check_vocabulary_size(experiment: Experiment) -> Iterator[Problem]:
    """Check that the model has at least as many tokens as its tokenizer. The ranks check this
    instead if the files are unreadable here or differ between hosts."""
    if experiment.task.external or experiment.task.is_command or experiment.runner.no_shared_fs:
        return
    args = experiment.train
    expected = args["vocab_size"]
    kind, path, separate = args[_TOKENIZER_TYPE], args["tokenizer_path"], bool(args["merge_file"])
    actual = read_vocabulary(kind, path, separate=separate) if expected and kind else None
    if actual is not None and actual.size > expected:
        of = "tokenizer_path" if path else f"{_TOKENIZER_TYPE} {kind}"
        message = f"{expected} is less than the {actual.size} tokens of {of}"
        yield args.problem("vocab_size", f"{message}; raise it, or leave it out to take these")


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of a tokenizer's files. ``size`` is one more than the largest token id."""

    size: int
    names: frozenset[str]
    """Its tokens, where files of Hugging Face's list them."""


def read_vocabulary(
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
        return Vocabulary(_BYTE_TOKENS, frozenset())
    if not isinstance(path, str):
        return None
    try:
        file = _token_file(kind, Path(path), separate=separate)
        if file is None or (most_bytes is not None and file.stat().st_size > most_bytes):
            return None
        return (
            _read_sentencepiece_vocabulary(file)
            if kind in _SENTENCEPIECE_TOKENIZERS
            else _read_json_vocabulary(file)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the ranks tell what is wrong with it


def _token_file(kind: str | None, path: Path, *, separate: bool) -> Path | None:
    """The file that lists the tokens; None where they are in none that is known."""
    if kind in _SENTENCEPIECE_TOKENIZERS:
        return path / "tokenizer.model" if path.is_dir() else path
    if kind is not None and kind not in _HUGGINGFACE_TOKENIZERS:
        return None
    if kind == "GPT2BPETokenizer" and separate:
        return path
    folder = path.parent if path.is_file() else path
    if (file := folder / "tokenizer.json").is_file():
        return file
    file = folder / "vocab.json"
    return file if file.is_file() and (folder / "merges.txt").is_file() else None


def _read_json_vocabulary(file: Path) -> Vocabulary:
    """Read ``tokenizer.json``, or GPT-2's ``vocab.json``, which holds the tokens only."""
    content = json.loads(file.read_bytes())
    if file.name != "tokenizer.json":
        return Vocabulary(_count_ids(content), frozenset(content))
    listed = content["model"]["vocab"]
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    names = [item[0] for item in listed] if isinstance(listed, list) else listed
    return Vocabulary(max(_count_ids(listed), _count_ids(added)), frozenset((*names, *added)))


def _read_sentencepiece_vocabulary(file: Path) -> Vocabulary | None:
    """Read a SentencePiece model with its library, if that is installed."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        return None
    try:
        size = SentencePieceProcessor(model_file=str(file)).get_piece_size()
    except RuntimeError:
        return None
    return Vocabulary(int(size), frozenset())


def _count_ids(vocabulary: Any) -> int:
    """One more than the largest number of a vocabulary, which is a map or (Unigram's) a list."""
    if isinstance(vocabulary, list):
        return len(vocabulary)
    return int(max(vocabulary.values(), default=-1)) + 1
