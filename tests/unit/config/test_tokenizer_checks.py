"""A missing tokenizer or chat template is reported before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.config.actions import Purpose
from flagscale.errors import ConfigError
from flagscale.tokenizer_files import find_vocabulary_files

from .conftest import Workspace

TEMPLATE = json.dumps({"chat_template": "{{ messages }}"})
NAMED = json.dumps({"chat_template": [{"name": "tool_use", "template": "{{ messages }}"}]})
HUGGING_FACE = "HuggingFaceTokenizer"
TOKENIZER_JSON = json.dumps({"model": {"vocab": {"a": 0}}})


def load(
    workspace: Workspace, kind: str, files: dict[str, str], *overrides: str, purpose: Purpose
) -> list[str]:
    """Return the messages about an experiment with a tokenizer of these files."""
    (workspace.root / "tokens").mkdir()
    for name, text in files.items():
        workspace.write(f"tokens/{name}", text)
    section = "train.data.tokenizer"
    try:
        workspace.load(
            f"{section}.tokenizer_type={kind}",
            f"{section}.tokenizer_path=tokens",
            *overrides,
            purpose=purpose,
        )
    except ConfigError as error:
        return [f"{problem.key}: {problem.message}" for problem in error.problems]
    return []


REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "empty": (HUGGING_FACE, {}, "tokens holds no tokenizer: expected tokenizer.json, or"),
    "yaml": (HUGGING_FACE, {"train.yaml": ""}, "found train.yaml"),
    "settings-alone": (
        HUGGING_FACE,
        {"config.json": "{}", "tokenizer_config.json": "{}", "model.safetensors": ""},
        "found config.json, model.safetensors, tokenizer_config.json",
    ),
    "index": (HUGGING_FACE, {"model.safetensors.index.json": "{}"}, "holds no tokenizer"),
    "no-json": (
        "Qwen2TokenizerFS",
        {"tokenizer.json": TOKENIZER_JSON, "tokenizer_config.json": "{"},
        "tokenizer_config.json: not JSON",
    ),
    "no-sentencepiece": ("Llama2Tokenizer", {}, "no tokenizer.model in tokens, as Llama2Tokeniz"),
    "other-type": (
        "SentencePieceTokenizer",
        {"tokenizer.json": TOKENIZER_JSON},
        "it has a tokenizer.json: use tokenizer_type: HuggingFaceTokenizer",
    ),
}


@pytest.mark.parametrize("purpose", ["launch", "plan"])
@pytest.mark.parametrize(("kind", "files", "part"), REFUSED.values(), ids=REFUSED)
def test_directory_without_tokenizer_is_refused(
    kind: str, files: dict[str, str], part: str, purpose: Purpose, workspace: Workspace
) -> None:
    (message,) = load(workspace, kind, files, purpose=purpose)
    assert message.startswith("train.data.tokenizer.tokenizer_path: ")
    assert part in message


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        pytest.param(HUGGING_FACE, {"tokenizer.json": TOKENIZER_JSON}, id="fast"),
        pytest.param(HUGGING_FACE, {"vocab.txt": "a", "tokenizer_config.json": "{}"}, id="bert"),
        pytest.param(HUGGING_FACE, {"spiece.model": ""}, id="t5"),
        pytest.param(HUGGING_FACE, {"tekken.json": "{}"}, id="mistral"),
        pytest.param("GPT2BPETokenizer", {"vocab.json": "{}", "merges.txt": ""}, id="gpt2"),
        pytest.param("Llama2Tokenizer", {"tokenizer.model": ""}, id="sentencepiece"),
        pytest.param("ByteLevelTokenizer", {}, id="bytes"),
    ],
)
def test_directory_with_tokenizer_is_accepted(
    kind: str, files: dict[str, str], workspace: Workspace
) -> None:
    assert load(workspace, kind, files, purpose="launch") == []


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        pytest.param(
            "{}", "it has neither chat_template.jinja nor chat_template in tok", id="none"
        ),
        pytest.param(
            NAMED, "its chat templates are tool_use, and none is named default", id="named"
        ),
        pytest.param(TEMPLATE, "", id="setting"),
    ],
)
def test_conversations_need_a_chat_template(settings: str, part: str, workspace: Workspace) -> None:
    files = {"tokenizer.json": TOKENIZER_JSON, "tokenizer_config.json": settings}
    workspace.write("data/chat.jsonl", "")
    overrides = ("train.data.data_path=data/chat.jsonl", "train.data.sft=true")
    messages = load(workspace, HUGGING_FACE, files, *overrides, purpose="plan")
    if not part:
        assert messages == []
        return
    (message,) = messages
    assert message.startswith("train.data.chat_template: is required: the tokenizer in tokens has")
    assert part in message
    assert message.endswith("set it to chatml or llama3, or to a .jinja file")


@pytest.mark.parametrize("override", ["train.data.chat_template=chatml", "train.data.sft=false"])
def test_template_is_needed_for_conversations_without_another(
    override: str, workspace: Workspace
) -> None:
    workspace.write("data/chat.jsonl", "")
    is_sft = override != "train.data.sft=false"
    overrides = ["train.data.data_path=data/chat.jsonl", "train.data.sft=true"] if is_sft else []
    files = {"tokenizer.json": TOKENIZER_JSON}
    assert load(workspace, HUGGING_FACE, files, *overrides, override, purpose="plan") == []


def test_template_file_counts(workspace: Workspace) -> None:
    workspace.write("data/chat.jsonl", "")
    files = {"tokenizer.json": TOKENIZER_JSON, "chat_template.jinja": "{{ messages }}"}
    overrides = ("train.data.data_path=data/chat.jsonl", "train.data.sft=true")
    assert load(workspace, HUGGING_FACE, files, *overrides, purpose="plan") == []


@pytest.mark.parametrize("kind", [HUGGING_FACE, "Llama2Tokenizer", "GPT2BPETokenizer"])
def test_tokenizer_path_is_required(kind: str, workspace: Workspace) -> None:
    path = "train.data.tokenizer.tokenizer_path=null"
    (message,) = load(workspace, kind, {}, path, purpose="plan")
    assert f"tokenizer_path: is required by tokenizer_type: {kind}" in message


@pytest.mark.parametrize("purpose", ["launch", "plan"])
def test_tokenizer_type_is_required(purpose: Purpose, workspace: Workspace) -> None:
    override = "train.data.tokenizer.tokenizer_type=null"
    with pytest.raises(ConfigError, match="tokenizer_type: is required without mock_data: Hugg"):
        workspace.load(override, purpose=purpose)
    workspace.load(override, "train.data.data_path=null", "train.data.mock_data=true")


def test_tokenizer_of_the_pretrained_model_is_suggested(workspace: Workspace) -> None:
    workspace.write("model/tokenizer.json", TOKENIZER_JSON)
    overrides = (
        "train.data.tokenizer.tokenizer_path=null",
        "train.system.pretrained_checkpoint=model",
        "train.system.finetune=true",
    )
    messages = load(workspace, HUGGING_FACE, {}, *overrides, purpose="plan")
    assert any(f"write `tokenizer_path: {workspace.root / 'model'}`" in text for text in messages)


def test_files_of_other_hosts_are_not_checked(workspace: Workspace) -> None:
    no_shared_fs = "experiment.runner.no_shared_fs=true"
    assert load(workspace, HUGGING_FACE, {}, no_shared_fs, purpose="plan") == []


NAMES = st.sampled_from(
    ["tokenizer.json", "vocab.json", "config.json", "a.safetensors", "a.yaml", "spiece.model"]
)


@given(names=st.sets(NAMES))
def test_files_without_tokens_are_no_vocabulary(
    names: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    for name in names:
        (directory / name).touch()
    expected = names & {"tokenizer.json", "vocab.json", "spiece.model"}
    assert {path.name for path in find_vocabulary_files(directory)} == expected
