"""Files of a model on this machine: the config.json of a pretrained model, and tokenizers.

Used by ``config.checks`` to complete and check an experiment, and by the estimate.
"""

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
from flagscale.errors import CheckpointError, DataError, Problem
from flagscale.tokenizer_files import iter_declared_tokens, read_settings, token_text


def fill_from_pretrained(experiment: Experiment) -> tuple[Experiment, list[Problem]]:
    """Add the arguments of the pretrained model that the YAML leaves out.

    Nothing is added if the directory is not on this machine or has no Hugging Face model. The ranks
    compare their arguments with the model in any case.

    Returns:
        The experiment, and the problems: an unreadable model, or arguments that contradict it.
    """
    args = experiment.train
    path = args[PRETRAINED_CHECKPOINT]
    if experiment.task.external:
        return experiment, []
    if not isinstance(path, str):
        reason = _explain_load_problem(args["load"])
        return experiment, [args.problem("load", reason)] if reason else []
    try:
        config = config_in(Path(path))
        if config is None:
            return experiment, list(_check_pretrained_directory(args, Path(path)))
        added_values = missing_arguments(args.values, args.given, config)
        train = args.with_added(_added_entries(added_values))
        filled = replace(experiment, train=train, filled_arguments=tuple(added_values))
        problems = _find_disagreements(train, config)
    except CheckpointError as error:
        return experiment, [args.problem(PRETRAINED_CHECKPOINT, f"{path}: {error.message}")]
    return filled, problems


def _explain_load_problem(load: Any) -> str | None:
    """Return why training cannot resume from the path ``load``, or None."""
    if isinstance(load, str) and is_huggingface_model(Path(load)):
        return f"{load} is a Hugging Face model; to start from one, use {PRETRAINED_CHECKPOINT}"
    return None


def _check_pretrained_directory(args: TrainArguments, path: Path) -> Iterator[Problem]:
    if path.is_dir() and not any((*path.glob("iter_*"), *path.glob("**/mp_rank_*"))):
        message = (
            f"{path} is neither a Hugging Face model (no config.json) nor a directory of "
            "checkpoints (no iter_… directories)"
        )
        yield args.problem(PRETRAINED_CHECKPOINT, message)


def _added_entries(added: dict[str, Any]) -> Iterator[GivenArgument]:
    """Yield the added arguments, under keys that no YAML has."""
    for name, value in added.items():
        key = f"train.model.{PRETRAINED_CHECKPOINT}.{name}"
        yield GivenArgument(key, name, value, value, argument=name, canonical=value)


def _find_disagreements(args: TrainArguments, config: dict[str, Any]) -> list[Problem]:
    values = args.values
    if any(values[name] is None for name in ("num_layers", "hidden_size", "seq_length")):
        return []  # missing sizes are reported by the rules of arguments
    return [args.problem(name, message) for name, message in disagreements(config, values)]


_TOKENIZER_TYPE = "tokenizer_type"
HUGGINGFACE_TOKENIZERS = (
    "HuggingFaceTokenizer",
    "Llama3TokenizerFS",
    "QwenTokenizerFS",
    "Qwen2TokenizerFS",
    "HFTokenizerFS",
    "HFTokenizersTokenizerFS",
    "GPT2BPETokenizer",
)
"""Types whose files are Hugging Face's."""
SENTENCEPIECE_TOKENIZERS = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
)
"""Types whose file is a SentencePiece model."""
_BYTE_TOKENS = 257
"""Tokens of ByteLevelTokenizer: one for each byte, and the end of a document."""


def check_vocabulary_size(experiment: Experiment) -> Iterator[Problem]:
    """Check that the model has at least as many tokens as its tokenizer. The ranks check this
    instead if the files are unreadable here or differ between hosts."""
    if experiment.task.external or experiment.task.is_command or experiment.runner.no_shared_fs:
        return
    args = experiment.train
    expected = args["vocab_size"]
    kind = args[_TOKENIZER_TYPE]
    path = args["tokenizer_path"]
    has_merge_file = bool(args["merge_file"])
    vocabulary = (
        read_vocabulary(kind, path, has_merge_file=has_merge_file) if expected and kind else None
    )
    if vocabulary is not None and vocabulary.size > expected:
        tokenizer_key = "tokenizer_path" if path else f"{_TOKENIZER_TYPE} {kind}"
        message = f"{expected} is less than the {vocabulary.size} tokens of {tokenizer_key}"
        yield args.problem("vocab_size", f"{message}; raise it, or leave it out to use this number")


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of a tokenizer's files. ``size`` is one more than the largest token id."""

    size: int
    names: frozenset[str]
    """The tokens themselves, if Hugging Face's files list them; otherwise empty."""


def read_vocabulary(
    kind: str | None, path: Any, *, has_merge_file: bool = False, max_bytes: int | None = None
) -> Vocabulary | None:
    """Read the vocabulary of a tokenizer.

    Args:
        kind: Type of the tokenizer (``tokenizer_type``); None for any of Hugging Face's.
        path: Directory or file of the tokenizer.
        has_merge_file: True if GPT-2's vocabulary and merges are given as two files; ``path`` is
            then the vocabulary.
        max_bytes: Size in bytes above which a file is not read; None for no limit.

    Returns:
        The vocabulary; None if the files are missing, too large, unreadable or of an unknown type.
    """
    if kind == "ByteLevelTokenizer":
        return Vocabulary(_BYTE_TOKENS, frozenset())
    if not isinstance(path, str):
        return None
    try:
        file = _token_file(kind, Path(path), has_merge_file=has_merge_file)
        if file is None or (max_bytes is not None and file.stat().st_size > max_bytes):
            return None
        return (
            _read_sentencepiece_vocabulary(file)
            if kind in SENTENCEPIECE_TOKENIZERS
            else _read_json_vocabulary(file)
        )
    except (DataError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the ranks report an unreadable tokenizer


def _token_file(kind: str | None, path: Path, *, has_merge_file: bool) -> Path | None:
    """Return the file that lists the tokens; None if no supported file does."""
    if kind in SENTENCEPIECE_TOKENIZERS:
        return path / "tokenizer.model" if path.is_dir() else path
    if kind is not None and kind not in HUGGINGFACE_TOKENIZERS:
        return None
    if kind == "GPT2BPETokenizer" and has_merge_file:
        return path
    folder = path.parent if path.is_file() else path
    if (file := folder / "tokenizer.json").is_file():
        return file
    file = folder / "vocab.json"
    return file if file.is_file() and (folder / "merges.txt").is_file() else None


def _read_json_vocabulary(file: Path) -> Vocabulary:
    """Read ``tokenizer.json``, or GPT-2's ``vocab.json``, with the tokens that other files of the
    directory add.

    transformers gives tokens without an id of their own the ids after the largest one. The size is
    a lower bound, because some tokenizer classes add tokens that no file names.
    """
    content = json.loads(file.read_bytes())
    ids: dict[str, int] = {}
    if file.name == "tokenizer.json":
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram's pairs of token and score
            vocabulary = {item[0]: index for index, item in enumerate(vocabulary)}
        added_tokens = content.get("added_tokens") or ()
        ids = {**vocabulary, **{token["content"]: token["id"] for token in added_tokens}}
    else:
        ids = dict(content)
    settings = read_settings(file.parent)
    for token, index in iter_declared_tokens(file.parent, settings):
        text = token_text(token)
        if text is not None and text not in ids:
            ids[text] = max(ids.values(), default=-1) + 1 if index is None else index
    return Vocabulary(max(ids.values(), default=-1) + 1, frozenset(ids))


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
