"""Experiments and argument sets used by the tests of the configuration checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.arguments import train_arguments

from flagscale.config.checks import check_arguments
from flagscale.config.schema import Commands, Environments, Experiment, Runner, Task

Problems = dict[str, tuple[dict[str, Any], str, str]]
"""Cases by name: argument values, the rejected argument, and a part of its message."""
VALID_ARGUMENTS: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "lr": 1e-3,
    "train_iters": 10,
    "mock_data": True,
}


def build_experiment(values: dict[str, Any], *, external: bool = False) -> Experiment:
    arguments = {
        name: value for name, value in {**VALID_ARGUMENTS, **values}.items() if value is not None
    }
    return Experiment(
        name="x",
        exp_dir=Path("/x"),
        task=Task(entrypoint=Path("/x.py"), external=external),
        runner=Runner(),
        envs=Environments(),
        cmds=Commands(),
        train=train_arguments(model={"inner": arguments}),
        config_file=Path("/x.yaml"),
    )


ADAPTERS = {"peft_type": "lora", "pretrained_checkpoint": "/x"}
EXPERT_ADAPTERS = {**ADAPTERS, "num_experts": 4, "lora_target_modules": ["linear_fc1"]}
FULL_CUDA_GRAPH = {
    "cuda_graph_impl": "local",
    "cuda_graph_scope": ["full_iteration"],
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
}
BOUNDED_ALL_REDUCE = {"distributed_backend": "fsccl", "comm": ["tail=bounded"]}
LATENT = {"multi_latent_attention": True, "position_embedding_type": "rope"}
LATENT_FP8 = {
    **LATENT,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"), 16),
    **dict.fromkeys(("qk_head_dim", "v_head_dim"), 8),
    **{"fp8": "e4m3", "bf16": True, "fp8_recipe": "blockwise"},
}
LLAMA = {
    **{"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False},
    **{"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
}
SIGMOID_ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CHAT_DATA = {"sft": True, "data_path": "a.jsonl", "mock_data": False}
PAIR_DATA = {
    "dpo": True,
    "data_path": "a.jsonl",
    "mock_data": False,
    "pretrained_checkpoint": "m",
    "eval_iters": 0,
}


def list_problems(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the name and the message of each argument that `check_arguments` rejects."""
    problems = check_arguments(build_experiment(values))
    return [(problem.key.rpartition(".")[2], problem.message) for problem in problems]
