"""Logits of models whose config.json is short, old or contradictory, compared with transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.checkpoint.checkpoint_lab import CheckpointLab
from integration.checkpoint.foreign_lab import build_argv
from support.foreign_models import LLAMA3_ROPE

from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.huggingface import HuggingFace
from flagscale.train.checkpoint.formats.logits import compute_transformers_logits

pytestmark = [pytest.mark.torch, pytest.mark.integration]

TOKENS = [(7 * i + 1) % 130 for i in range(24)]
TOLERANCE = 2e-5
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
SLIDING, FULL = "sliding_attention", "full_attention"
SOME_SLIDING = {"sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "scaling replaces parameters": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
        "rope_scaling": LINEAR,
    },
    "base next to parameters": {
        "model_type": "llama",
        "rope_theta": 50.0,
        "rope_parameters": LINEAR,
    },
    "original length next to the scaling": {
        "model_type": "llama",
        "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 16},
        "original_max_position_embeddings": 8192,
    },
    "mistral with layer types": {"model_type": "mistral", **SOME_SLIDING},
    "mistral whose layer types are null": {
        "model_type": "mistral",
        "sliding_window": 5,
        "layer_types": None,
    },
    "mixtral with a window": {
        "model_type": "mixtral",
        "num_experts": 4,
        "sliding_window": 5,
    },
    "qwen2 with layer types": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        **SOME_SLIDING,
    },
    "qwen3 with the default head": {"model_type": "qwen3"},
    "qwen3 experts, windows in all layers": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "gemma with its old activation": {"model_type": "gemma", "hidden_act": "gelu"},
    "gemma 2 with a pattern that it has not": {
        "model_type": "gemma2",
        "sliding_window": 5,
        "sliding_window_pattern": 3,
    },
    "gemma 3 with a pattern": {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "rope_theta": 100.0,
        "rope_local_base_freq": 20.0,
        "rope_scaling": LINEAR,
    },
    "gemma 3 with scaling next to parameters": {
        "model_type": "gemma3_text",
        **SOME_SLIDING,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 40.0},
            SLIDING: {"rope_type": "default", "rope_theta": 20.0},
        },
        "rope_scaling": LINEAR,
    },
    "deepseek v2 with defaults": {
        "model_type": "deepseek_v2",
        **LATENT,
        "num_experts_per_tok": 3,
        "q_lora_rank": None,
    },
    "deepseek v3 with YaRN": {
        "model_type": "deepseek_v3",
        **LATENT,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "rope_scaling": YARN,
        "rope_theta": 50.0,
    },
}
"""Keys in addition to :data:`SIZES`, or instead of them."""
LEFT_OUT: Mapping[str, list[str]] = {
    **{name: [] for name in CONFIGS},
    "qwen3 with the default head": ["head_dim"],
}
"""Keys of :data:`SIZES` that a config.json leaves out."""


def write_random_model(path: Path, config: Mapping[str, Any]) -> None:
    """Write a model of random weights that has exactly this config.json."""
    import transformers

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(path)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Results of a rank that loads every model and compares its logits, by name."""
    root = tmp_path_factory.mktemp("configs")
    cases = []
    for name, keys in CONFIGS.items():
        path = root / "models" / name.replace(" ", "-")
        config = {
            key: value for key, value in {**SIZES, **keys}.items() if key not in LEFT_OUT[name]
        }
        write_random_model(path, config)
        reference = path / "reference.pt"
        torch.save(compute_transformers_logits(path, TOKENS)[None], reference)
        argv = [*build_argv(name, path, "one"), "--pretrained-checkpoint", str(path)]
        case = {"id": name, "function": "start_and_compare", "argv": argv}
        cases.append({**case, "reference": str(reference), "tokens": [TOKENS]})
    lab = CheckpointLab(root)
    lab.add_stage(1, *cases)
    return lab.run()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_means_what_transformers_reads_of_it(
    results: Mapping[str, Any], name: str
) -> None:
    assert name in results, results["stderr"][-4000:]
    (rank,) = results[name]["ranks"]
    assert rank.get("max_difference", 1) <= TOLERANCE, rank


def test_yarn_next_to_parameters_is_refused(tmp_path: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4}
    config = {**SIZES, "model_type": "llama", "rope_parameters": parameters, "rope_scaling": YARN}
    write_random_model(tmp_path / "model", config)
    with pytest.raises(CheckpointError, match="rope_scaling: 'yarn' is not supported"):
        HuggingFace().read(tmp_path / "model")
