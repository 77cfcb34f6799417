"""Directories of Hugging Face models as people have them, read as transformers reads them."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.foreign_models import TOKENS, compute_logits, save_model

from flagscale.config.arguments.compat.huggingface.config_reader import read_config
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.chat_template import read_chat_template
from flagscale.train.checkpoint.formats import convert
from flagscale.train.checkpoint.formats.huggingface import HuggingFace
from flagscale.train.checkpoint.formats.lazy_tensors import read_tensor
from flagscale.train.checkpoint.formats.logits import compute_transformers_logits
from flagscale.train.checkpoint.formats.torch_dist import TorchDist
from flagscale.train.data.chat.templates import NAMED_TEMPLATES

pytestmark = [pytest.mark.torch, pytest.mark.integration]

EMBEDDING = "embedding.word_embeddings.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a llama, a tied llama, a ministral and a GPT-2."""
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "llama-tied", "ministral", "gpt2"):
        save_model(name, root / name)
    return root


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def change_config(path: Path, **values: Any) -> None:
    (path / "config.json").write_text(json.dumps({**read_config(path), **values}))


def copy_model(models: Path, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(models / name, tmp_path / "model"))


@pytest.mark.parametrize("old_shards", [True, False], ids=["with-old-shards", "shards-deleted"])
def test_a_single_file_is_the_model_whatever_an_index_says(
    models: Path, tmp_path: Path, old_shards: bool
) -> None:
    path = copy_model(models, tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    if old_shards:
        old_weights = {name: tensor + 1 for name, tensor in weights.items()}
        save_file(old_weights, path / shard, {"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, shard)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = HuggingFace().read(path)
    assert read_tensor(model.tensors[EMBEDDING]).equal(weights["model.embed_tokens.weight"])
    assert compute_logits(path).equal(compute_logits(models / "llama"))
    assert any("model.safetensors.index.json is ignored" in note for note in model.notes)


def _strip_prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        if name.startswith("model."):
            tensors[name.removeprefix("model.")] = tensors.pop(name)


def _strip_transformer(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def _add_frequencies(tensors: Tensors) -> None:
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def _add_masks(tensors: Tensors) -> None:
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4)


def _add_tied_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


LEFT_OUT = {
    "names without model.": ("llama", _strip_prefix, "without the prefix 'model.'"),
    "names without transformer.": ("gpt2", _strip_transformer, "without the prefix 'transformer.'"),
    "frequencies": (
        "llama",
        _add_frequencies,
        "2 buffers are left out, because they are not weights, such as "
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ),
    "masks": (
        "gpt2",
        _add_masks,
        "a buffer is left out, because it is not a weight, such as transformer.h.0.attn.bias",
    ),
    "tied head": ("llama-tied", _add_tied_head, "lm_head.weight is left out: it is the embedding"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_does_not_survive_there_and_back_is_printed(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, change, expected = LEFT_OUT[case]
    path = copy_model(models, tmp_path, name)
    change_tensors(path, change)
    assert convert.main([str(path), str(tmp_path / "ours")]) == 0
    output = capsys.readouterr().out
    assert f"note: {expected}" in output.replace("its tensors are named ", "")
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert_same_weights(models / name, tmp_path / "back")


def assert_same_weights(first: Path, second: Path) -> None:
    expected, actual = (load_file(path / "model.safetensors") for path in (first, second))
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not expected[name].equal(actual[name])] == []


def test_a_head_that_contradicts_its_tie_is_refused(models: Path, tmp_path: Path) -> None:
    path = copy_model(models, tmp_path, "llama")
    change_config(path, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding") as error:
        HuggingFace().read(path)
    assert error.value.hint == "set tie_word_embeddings to false in config.json"


def test_a_model_without_its_defaults_is_the_same(models: Path, tmp_path: Path) -> None:
    path = copy_model(models, tmp_path, "llama-tied")
    config = read_config(path)
    defaults = ("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "num_key_value_heads")
    (path / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name not in defaults})
    )
    assert compute_logits(path).equal(compute_logits(models / "llama-tied"))
    full, short = HuggingFace().read(models / "llama-tied"), HuggingFace().read(path)
    assert short.values == full.values


def test_a_mistral_with_layer_types_survives_there_and_back(models: Path, tmp_path: Path) -> None:
    """transformers loads it as another model type."""
    path = copy_model(models, tmp_path, "ministral")
    classes = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    change_config(path, **classes)
    assert compute_logits(path).equal(compute_logits(models / "ministral"))
    assert HuggingFace().read(path).values == HuggingFace().read(models / "ministral").values
    assert convert.main([str(path), str(tmp_path / "ours")]) == 0
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert_same_weights(path, tmp_path / "back")
    assert read_config(tmp_path / "back") == read_config(path)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda tensors: None, id="fp32"),
        pytest.param(
            lambda tensors: tensors.update(
                {name: tensor.bfloat16() for name, tensor in tensors.items() if "embed" in name}
            ),
            id="embedding-bf16",
        ),
        pytest.param(
            lambda tensors: tensors.update(
                {name: tensor.bfloat16() for name, tensor in tensors.items() if "norm" not in name}
            ),
            id="norms-fp32",
        ),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_logits_are_compared_in_the_precision_of_the_files(
    models: Path, tmp_path: Path, change: Callable[[Tensors], object], key: str
) -> None:
    path = copy_model(models, tmp_path, "llama")
    change_tensors(path, change)
    config = {name: value for name, value in read_config(path).items() if name != "dtype"}
    (path / "config.json").write_text(json.dumps({**config, key: "bfloat16"}))
    assert compute_transformers_logits(path, TOKENS[0]).equal(compute_logits(path)[0])


def test_a_model_that_transformers_cannot_load_is_reported(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy_model(models, tmp_path, "llama")
    change_config(path, use_cache=None)
    assert convert.main([str(path), str(tmp_path / "out"), "--check", "1,2,3"]) == 1
    stderr = capsys.readouterr().err
    assert f"--check: transformers cannot load the model in {path}" in stderr
    assert "use_cache" in stderr and "Traceback" not in stderr


def test_a_checkpoint_keeps_the_template_that_it_was_trained_with(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template replaces those of the tokenizer that is copied with the model."""
    source = copy_model(models, tmp_path, "llama")
    for name in ("chat_template.json", "chat_template.jinja"):
        (source / name).write_text("{}")
    model = replace(HuggingFace().read(source), chat_template="{{ messages[0].content }}\n")
    TorchDist().write(model, tmp_path / "ours", lambda _: None, lambda _: None)
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert "chat template: the one that the model was trained with" in capsys.readouterr().out
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == model.chat_template
    assert not (tmp_path / "back" / "chat_template.json").exists()
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "torch"), "--to", "torch"]) == 0
    assert "torch cannot store the chat template" in capsys.readouterr().out


def test_the_templates_of_a_tokenizer_are_kept_if_they_are_those_of_the_run(
    models: Path, tmp_path: Path
) -> None:
    """Templates for other purposes would be lost with ``tokenizer_config.json``."""
    source = copy_model(models, tmp_path, "llama")
    texts = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    templates = [{"name": name, "template": text} for name, text in texts.items()]
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    model = replace(HuggingFace().read(source), chat_template="{{ messages }}")
    HuggingFace().write(model, tmp_path / "out", lambda _: None, lambda _: None)
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def build_template_arguments(
    chat_template: str | None, *, data: str = "sft", tokenizer_path: Path | None = None
) -> argparse.Namespace:
    values = {"sft": False, "dpo": False, data: True}
    return argparse.Namespace(**values, chat_template=chat_template, tokenizer_path=tokenizer_path)


def test_a_run_records_the_text_of_its_template(tmp_path: Path) -> None:
    for data in ("sft", "dpo"):
        arguments = build_template_arguments("chatml", data=data)
        assert read_chat_template(arguments) == NAMED_TEMPLATES["chatml"]
    assert read_chat_template(build_template_arguments("chatml", data="mock_data")) is None
    (tmp_path / "own.jinja").write_text("{{ messages }}", encoding="utf-8")
    file_arguments = build_template_arguments(str(tmp_path / "own.jinja"))
    assert read_chat_template(file_arguments) == "{{ messages }}"
    with pytest.raises(CheckpointError, match=r"chat_template: /nowhere\.jinja cannot be read"):
        read_chat_template(build_template_arguments("/nowhere.jinja"))
    assert read_chat_template(build_template_arguments(None)) is None
    own = build_template_arguments(None, tokenizer_path=tmp_path)
    assert read_chat_template(own) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ own }}"}')
    assert read_chat_template(own) == "{{ own }}"
