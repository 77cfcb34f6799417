"""Experiments whose arguments are judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flagscale.config.checks import check_arguments
from flagscale.config.schema import Commands, Environments, Experiment, Runner, Task, Train

Problems = dict[str, tuple[dict[str, Any], str, str]]
"""By name: what is given, the argument that is wrong, and part of what is said of it."""
GOOD: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "lr": 1e-3,
    "train_iters": 10,
    "mock_data": True,
}


def experiment_of(values: dict[str, Any], *, external: bool = False) -> Experiment:
    given = {name: value for name, value in {**GOOD, **values}.items() if value is not None}
    return Experiment(
        name="x",
        exp_dir=Path("/x"),
        task=Task(entrypoint=Path("/x.py"), external=external),
        runner=Runner(),
        envs=Environments(),
        cmds=Commands(),
        train=Train(model={"inner": given}),
        config_file=Path("/x.yaml"),
    )


ADAPTERS = {"peft_type": "lora", "pretrained_checkpoint": "/x"}
CAPTURED = {
    "cuda_graph_impl": "local",
    "cuda_graph_scope": ["full_iteration"],
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
}
BOUNDED = {"distributed_backend": "fsccl", "comm": ["tail=bounded"]}
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
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
TALKS = {"sft": True, "data_path": "a.jsonl", "mock_data": False}


def refused(values: dict[str, Any]) -> list[tuple[str, str]]:
    """The arguments that are refused, each with what is said of it."""
    found = check_arguments(experiment_of(values))
    return [(problem.key.rpartition(".")[2], problem.message) for problem in found]
