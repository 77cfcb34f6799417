"""How many tokens a tokenizer has, by its files, and what is said of a model with fewer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flagscale.config.actions import Purpose
from flagscale.config.tokenizers import vocabulary
from flagscale.errors import ConfigError

from .conftest import Workspace

_WORDS = {"a": 0, "b": 1, "c": 2}
_ADDED = [{"content": "<eod>", "id": 3}, {"content": "a", "id": 0}]


def _file(vocabulary: Any, added: Any = None) -> str:
    return json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added})


TOKENIZERS: dict[str, tuple[dict[str, str], str, int | None]] = {
    "pairs": ({"tokenizer.json": _file(_WORDS)}, "HuggingFaceTokenizer", 3),
    "added": ({"tokenizer.json": _file(_WORDS, _ADDED)}, "Llama3TokenizerFS", 4),
    "gaps": ({"tokenizer.json": _file({"a": 0, "b": 7})}, "HuggingFaceTokenizer", 8),
    "unigram": ({"tokenizer.json": _file([["a", -1.0], ["b", -2.0]])}, "HFTokenizerFS", 2),
    "gpt2": ({"vocab.json": json.dumps(_WORDS), "merges.txt": ""}, "GPT2BPETokenizer", 3),
    "bytes": ({}, "ByteLevelTokenizer", 257),
    "none": ({}, "HuggingFaceTokenizer", None),
    "broken": ({"tokenizer.json": "{"}, "HuggingFaceTokenizer", None),
    "no-sentencepiece": ({"tokenizer.model": ""}, "SentencePieceTokenizer", None),
    "counted": ({}, "NullTokenizer", None),
}


def _overrides(kind: str, size: int) -> tuple[str, ...]:
    path = "train.data.tokenizer.tokenizer_path=tokens"
    return (f"+train.data.tokenizer.tokenizer_type={kind}", path, f"+train.model.vocab_size={size}")


@pytest.mark.parametrize("purpose", ["launch", "plan"])
@pytest.mark.parametrize(("files", "kind", "size"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_model_has_as_many_tokens_as_its_tokenizer(
    files: dict[str, str], kind: str, size: int | None, purpose: Purpose, workspace: Workspace
) -> None:
    (workspace.root / "tokens").mkdir()
    for name, text in files.items():
        workspace.write(f"tokens/{name}", text)
    if size is None:
        workspace.load(*_overrides(kind, 1), purpose=purpose)
        return
    workspace.load(*_overrides(kind, size), purpose=purpose)
    with pytest.raises(ConfigError) as error:
        workspace.load(*_overrides(kind, size - 1), purpose=purpose)
    (problem,) = error.value.problems
    assert problem.key == "train.model.vocab_size"
    assert f"{size - 1} is less than the {size} tokens of tokenizer_" in problem.message


def test_hosts_with_files_of_their_own_are_not_judged_by_this_machines(
    workspace: Workspace,
) -> None:
    workspace.write("tokens/tokenizer.json", _file(_WORDS))
    given = _overrides("HuggingFaceTokenizer", 1)
    workspace.load(*given, "+experiment.runner.no_shared_fs=true", purpose="plan")


@pytest.mark.torch  # whose extra brings the library
@pytest.mark.parametrize("named", ["tokens", "tokens/tokenizer.model"])
def test_a_model_of_sentencepiece_says_how_many_it_has(named: str, workspace: Workspace) -> None:
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
    found = vocabulary("Llama2Tokenizer", str(workspace.root / named))
    assert found is not None and found.size == 15
    assert vocabulary("Llama2Tokenizer", str(workspace.root / named), most_bytes=9) is None
    given = ("+train.data.tokenizer.tokenizer_type=Llama2Tokenizer", "+train.model.vocab_size=14")
    with pytest.raises(ConfigError, match="14 is less than the 15 tokens of tokenizer_path"):
        workspace.load(*given, f"train.data.tokenizer.tokenizer_path={named}")
