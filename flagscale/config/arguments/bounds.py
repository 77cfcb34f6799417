"""Limits of megatron.core's arguments, whose dataclasses state types but no limits."""

from __future__ import annotations

from flagscale.config.arguments.mixtures import BALANCING
from flagscale.config.arguments.recompute import MODULES

_AT_LEAST_ONE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "recompute_num_layers",
    "bucket_size",
    "num_distributed_optimizer_instances",
    "num_dataset_builder_threads",
    "microbatch_group_size_per_vp_stage",
    "initial_loss_scale",
)
_NOT_NEGATIVE = (
    "moe_router_num_groups",
    "moe_router_group_topk",
    "lr",
    "decoupled_lr",
    "decoupled_min_lr",
    "weight_decay",
    "clip_grad",
    "adam_eps",
    "layernorm_epsilon",
    "init_method_std",
    "loss_scale",
    "hysteresis",
)
_SHARES = ("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2", "sgd_momentum")

BOUNDS: dict[str, tuple[float | None, float | None]] = {
    **dict.fromkeys(_AT_LEAST_ONE, (1, None)),
    **dict.fromkeys(_NOT_NEGATIVE, (0, None)),
    **dict.fromkeys(_SHARES, (0, 1)),
}
"""Least and greatest value by name, inclusive; None is "no limit"."""

CHOICES: dict[str, tuple[str, ...]] = {
    "moe_router_load_balancing_type": BALANCING,
    "recompute_modules": MODULES,
}
"""Values of texts that it compares with, but does not list in their types."""
