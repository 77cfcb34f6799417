"""Vocabulary sizes read from tokenizer files, and models with a smaller vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flagscale.config.actions import Purpose
from flagscale.config.model_files import read_vocabulary
from flagscale.errors import ConfigError

from .conftest import Workspace

_VOCABULARY = {"a": 0, "b": 1, "c": 2}
_ADDED_TOKENS = [{"content": "<eod>", "id": 3}, {"content": "a", "id": 0}]


def _tokenizer_json(vocabulary: Any, added: Any = None) -> str:
    return json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added})


TOKENIZERS: dict[str, tuple[dict[str, str], str, int | None]] = {
    "pairs": ({"tokenizer.json": _tokenizer_json(_VOCABULARY)}, "HuggingFaceTokenizer", 3),
    "added": (
        {"tokenizer.json": _tokenizer_json(_VOCABULARY, _ADDED_TOKENS)},
        "Llama3TokenizerFS",
        4,
    ),
    "gaps": ({"tokenizer.json": _tokenizer_json({"a": 0, "b": 7})}, "HuggingFaceTokenizer", 8),
    "unigram": (
        {"tokenizer.json": _tokenizer_json([["a", -1.0], ["b", -2.0]])},
        "HFTokenizerFS",
        2,
    ),
    "gpt2": ({"vocab.json": json.dumps(_VOCABULARY), "merges.txt": ""}, "GPT2BPETokenizer", 3),
    "bytes": ({}, "ByteLevelTokenizer", 257),
    "other": ({"vocab.txt": "a"}, "HuggingFaceTokenizer", None),
    "broken": ({"tokenizer.json": "{"}, "HuggingFaceTokenizer", None),
    "no-sentencepiece": ({"tokenizer.model": ""}, "SentencePieceTokenizer", None),
    "counted": ({}, "NullTokenizer", None),
}


def _tokenizer_overrides(kind: str, size: int) -> tuple[str, ...]:
    path = "train.data.tokenizer.tokenizer_path=tokens"
    return (f"train.data.tokenizer.tokenizer_type={kind}", path, f"+train.model.vocab_size={size}")


@pytest.mark.parametrize("purpose", ["launch", "plan"])
@pytest.mark.parametrize(("files", "kind", "size"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_vocabulary_smaller_than_tokenizer_is_rejected(
    files: dict[str, str], kind: str, size: int | None, purpose: Purpose, workspace: Workspace
) -> None:
    (workspace.root / "tokens").mkdir()
    for name, text in files.items():
        workspace.write(f"tokens/{name}", text)
    if size is None:
        workspace.load(*_tokenizer_overrides(kind, 1), purpose=purpose)
        return
    workspace.load(*_tokenizer_overrides(kind, size), purpose=purpose)
    with pytest.raises(ConfigError) as error:
        workspace.load(*_tokenizer_overrides(kind, size - 1), purpose=purpose)
    (problem,) = error.value.problems
    assert problem.key == "train.model.vocab_size"
    assert f"{size - 1} is less than the {size} tokens of tokenizer_" in problem.message


def test_local_tokenizer_is_not_checked_without_shared_filesystem(
    workspace: Workspace,
) -> None:
    workspace.write("tokens/tokenizer.json", _tokenizer_json(_VOCABULARY))
    overrides = _tokenizer_overrides("HuggingFaceTokenizer", 1)
    workspace.load(*overrides, "+experiment.runner.no_shared_fs=true", purpose="plan")


@pytest.mark.torch  # sentencepiece is in this extra
@pytest.mark.parametrize("path", ["tokens", "tokens/tokenizer.model"])
def test_vocabulary_size_of_sentencepiece_model(path: str, workspace: Workspace) -> None:
    from sentencepiece import SentencePieceTrainer

    folder = workspace.root / "tokens"
    folder.mkdir()
    with (folder / "tokenizer.model").open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(["a few words of a text"] * 9),
            model_writer=file,
            vocab_size=15,
            minloglevel=2,
        )
    vocabulary = read_vocabulary("Llama2Tokenizer", str(workspace.root / path))
    assert vocabulary is not None and vocabulary.size == 15
    assert read_vocabulary("Llama2Tokenizer", str(workspace.root / path), max_bytes=9) is None
    overrides = (
        "train.data.tokenizer.tokenizer_type=Llama2Tokenizer",
        "+train.model.vocab_size=14",
    )
    with pytest.raises(ConfigError, match="14 is less than the 15 tokens of tokenizer_path"):
        workspace.load(*overrides, f"train.data.tokenizer.tokenizer_path={path}")
