"""Rejected arguments of parallel layouts, recomputation and communication overlap."""

from __future__ import annotations

from typing import Any

import pytest
from unit.config.check_helpers import BOUNDED_ALL_REDUCE, FULL_CUDA_GRAPH, Problems, list_problems

PROBLEMS: Problems = {
    "heads": ({"tensor_model_parallel_size": 3}, "num_attention_heads", "8 is not divisible"),
    "groups-tp": (
        {"num_query_groups": 2, "tensor_model_parallel_size": 4},
        "num_query_groups",
        "2 is not divisible by tensor_model_parallel_size 4",
    ),
    "groups-heads": (
        {"num_query_groups": 3},
        "num_query_groups",
        "3 does not divide num_attention_heads 8",
    ),
    "hidden": ({"hidden_size": 63}, "hidden_size", "num_attention_heads 8"),
    "ffn": (
        {"ffn_hidden_size": 90, "tensor_model_parallel_size": 4},
        "ffn_hidden_size",
        "90 is not divisible",
    ),
    "layers": (
        {"pipeline_model_parallel_size": 3},
        "num_layers",
        "8 layers are not divisible by 3 pipeline stages",
    ),
    "layers-of-the-ends": (
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_in_first_pipeline_stage": 3,
            "num_layers_in_last_pipeline_stage": 4,
        },
        "num_layers",
        "7 layers are assigned to 2 of 2 stages, but num_layers is 8",
    ),
    "layers-of-the-first": (
        {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 9},
        "num_layers",
        "9 layers are assigned to 1 of 3 stages, but num_layers is 8",
    ),
    "layers-vpp": (
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3},
        "num_layers",
        "2 pipeline stages x 3 virtual",
    ),
    "layers-per-stage": (
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
        "num_layers_per_virtual_pipeline_stage",
        "is not divisible by 3 x pipeline_model_parallel_size",
    ),
    "vpp-without-pp": (
        {"num_virtual_stages_per_pipeline_rank": 2},
        "pipeline_model_parallel_size",
        "2 with 2 virtual stages, found",
    ),
    "vpp-p2p": (
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "no_overlap_p2p_communication": True,
        },
        "overlap_p2p_comm",
        "must be true",
    ),
    "vpp-batch": (
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "batch_p2p_comm": True,
        },
        "batch_p2p_comm",
        "must be false",
    ),
    "sp-length": (
        {"sequence_parallel": True, "tensor_model_parallel_size": 4, "seq_length": 30},
        "seq_length",
        "30 is not divisible",
    ),
    "cp-local": (
        {"context_parallel_size": 2, "attention_backend": "local"},
        "context_parallel_size",
        "supported with attention_backend: local; use auto",
    ),
    "cp-length": (
        {"context_parallel_size": 2, "seq_length": 30},
        "seq_length",
        "30 is not divisible by 2 x context_parallel_size 2",
    ),
    "cp-sp-length": (
        {
            "context_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "seq_length": 36,
        },
        "seq_length",
        "36 is not divisible by 2 x context_parallel_size 2 x tensor_model_parallel_size",
    ),
    "cp-unknown": (
        {"context_parallel_size": 2, "cp_comm_type": "ring"},
        "cp_comm_type",
        "expected a2a, all_gather, p2p or a2a+p2p, found ring",
    ),
    "cp-hierarchical-without-sizes": (
        {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "seq_length": 32},
        "cp_comm_type",
        "a2a+p2p requires hierarchical_context_parallel_sizes: [ranks that exchange heads, groups",
    ),
    "cp-hierarchical-product": (
        {
            "context_parallel_size": 4,
            "cp_comm_type": "a2a+p2p",
            "hierarchical_context_parallel_sizes": [2, 4],
        },
        "hierarchical_context_parallel_sizes",
        "[2, 4]: expected two sizes whose product is context_parallel_size 4",
    ),
    "cp-hierarchical-heads": (
        {
            "context_parallel_size": 4,
            "cp_comm_type": "a2a+p2p",
            "hierarchical_context_parallel_sizes": [2, 2],
            "num_attention_heads": 4,
            "num_query_groups": 1,
        },
        "hierarchical_context_parallel_sizes",
        "[2, 2] is not possible: num_query_groups 1 is not divisible by hierarchical",
    ),
    "cp-sizes-alone": (
        {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]},
        "hierarchical_context_parallel_sizes",
        "requires cp_comm_type: a2a+p2p",
    ),
    "cp-sizes-without-cp": (
        {"hierarchical_context_parallel_sizes": [2, 2]},
        "hierarchical_context_parallel_sizes",
        "requires context_parallel_size above 1",
    ),
    "cp-mixed": (
        {"context_parallel_size": 2, "cp_comm_type": ["a2a", "all_gather"]},
        "cp_comm_type",
        "all layers must have the same communication",
    ),
    "cp-a2a-heads": (
        {
            "context_parallel_size": 2,
            "cp_comm_type": ["a2a"],
            "num_attention_heads": 4,
            "num_query_groups": 1,
        },
        "cp_comm_type",
        "a2a is not possible: num_query_groups 1 is not divisible by context_parallel_size 2",
    ),
    **{
        f"layout-{name}": ({"pipeline_model_parallel_size": 2, **values}, key, message)
        for name, (values, key, message) in {
            "letters": (
                {"pipeline_model_parallel_layout": "another"},
                "pipeline_model_parallel_layout",
                "such as Et*3|t*4|t*3L; found another",
            ),
            "stages": (
                {"pipeline_model_parallel_layout": "Et*4|t*4|L"},
                "pipeline_model_parallel_layout",
                "pipeline_model_parallel_size 2, found 3 stages in Et*4|t*4|L",
            ),
            "layers": (
                {"pipeline_model_parallel_layout": "Et*4|t*3L"},
                "pipeline_model_parallel_layout",
                "expected num_layers 8 t, found 7 in Et*4|t*3L",
            ),
            "and-ends": (
                {
                    "pipeline_model_parallel_layout": "Et*4|t*4L",
                    "num_layers_in_first_pipeline_stage": 4,
                },
                "num_layers_in_first_pipeline_stage",
                "be combined with pipeline_model_parallel_layout; leave one out",
            ),
            "ends-and-embedding": (
                {
                    "num_layers_in_first_pipeline_stage": 4,
                    "account_for_embedding_in_pipeline_split": True,
                    "account_for_loss_in_pipeline_split": True,
                    "num_layers": 6,
                },
                "account_for_embedding_in_pipeline_split",
                "combined with num_layers_in_first_pipeline_stage; leave one out",
            ),
            "end-in-chunks": (
                {
                    "num_layers_in_first_pipeline_stage": 3,
                    "num_virtual_stages_per_pipeline_rank": 2,
                    "num_layers": 7,
                },
                "num_layers_in_first_pipeline_stage",
                "3 is not divisible by 2 virtual stages",
            ),
        }.items()
    },
    **{
        f"recompute-{name}": ({"recompute_granularity": "selective", **values}, key, message)
        for name, (values, key, message) in {
            "moe": (
                {"recompute_modules": ["moe"]},
                "recompute_modules",
                "moe requires num_moe_experts",
            ),
            "shared": (
                {"recompute_modules": ["mlp", "shared_experts"]},
                "recompute_modules",
                "shared_experts requires moe_shared_expert_intermediate_size;",
            ),
            "shared-overlapping": (
                {
                    "recompute_modules": ["shared_experts"],
                    "num_experts": 4,
                    "moe_token_dispatcher_type": "alltoall",
                    "moe_shared_expert_intermediate_size": 32,
                    "moe_shared_expert_overlap": True,
                },
                "recompute_modules",
                "shared_experts cannot be combined with moe_shared_expert_overlap",
            ),
            "layers": (
                {"recompute_num_layers": 2},
                "recompute_num_layers",
                "recompute_granularity: selective, which applies to every layer",
            ),
            "shared-out": (
                {
                    "distribute_saved_activations": True,
                    "sequence_parallel": True,
                    "tensor_model_parallel_size": 2,
                },
                "distribute_saved_activations",
                "sequence_parallel, which already distributes activations; leave",
            ),
        }.items()
    },
    "overlap-at-the-ends": (
        {"overlap_p2p_comm_warmup_flush": True},
        "overlap_p2p_comm_warmup_flush",
        "overlap_p2p_comm: true and batch_p2p_comm: false; leave",
    ),
    "recompute-twice": (
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "moe_layer_recompute": True,
            "num_experts": 4,
        },
        "moe_layer_recompute",
        "supported with recompute_granularity: full; leave it out",
    ),
    **{
        f"captured-{name}": ({**FULL_CUDA_GRAPH, name: value}, name, message)
        for name, value, message in (
            (
                "cuda_graph_scope",
                ["attn"],
                "full_iteration, the only supported scope; found ['attn']",
            ),
            (
                "tensor_model_parallel_size",
                2,
                "2 is not supported with cuda_graph_impl: local: ranks",
            ),
            (
                "overlap_grad_reduce",
                True,
                "local: ranks cannot communicate within a captured step",
            ),
            ("fp16", True, "cuda_graph_impl: local: the host updates the loss scale; use"),
            ("num_moe_experts", 4, "4 is not supported with cuda_graph_impl: local: the host"),
            (
                "recompute_granularity",
                "selective",
                "cuda_graph_impl: local: the state of its random number",
            ),
            (
                "attention_dropout",
                0.1,
                "0.1 is not supported with cuda_graph_impl: local: the state",
            ),
        )
    },
    "sharding-replicas": (
        {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "enable_hetero": True,
            "hetero_mode": "dp",
            "hetero_micro_batch_sizes": ["1", "1", "1", "1"],
        },
        "data_parallel_sharding_strategy",
        "optim_grads_params is not supported in heterogeneous training",
    ),
    "instances": (
        {"num_distributed_optimizer_instances": 2},
        "num_distributed_optimizer_instances",
        "2 has no effect, because no state is sharded; set data_parallel_sharding_strategy: optim, "
        "optim_grads or optim_grads_params, or leave it out",
    ),
    "instances-replicas": (
        {
            "num_distributed_optimizer_instances": 2,
            "use_distributed_optimizer": True,
            "enable_hetero": True,
            "hetero_mode": "dp",
            "hetero_micro_batch_sizes": ["1", "1", "1", "1"],
        },
        "num_distributed_optimizer_instances",
        "2 is not supported in heterogeneous training; leave it out",
    ),
    **{
        f"recompute-{name}": (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", name]},
            "recompute_modules",
            f"{name} requires {required}; leave it out",
        )
        for name, required in (
            ("moe_act", "moe_grouped_gemm"),
            ("mla_up_proj", "multi_latent_attention"),
        )
    },
    "copies-without-an-interval": (
        {"replication": True},
        "replication",
        "requires non_persistent_save_interval, the steps between copies in memory",
    ),
    "type-of-copies-without-an-interval": (
        {"non_persistent_ckpt_type": "local"},
        "non_persistent_ckpt_type",
        "requires non_persistent_save_interval",
    ),
    **{
        f"offload-{name}": (values, key, message)
        for name, (values, key, message) in {
            "no-layers": (
                {"cpu_offloading": True},
                "cpu_offloading_num_layers",
                "is required by cpu_offloading: true",
            ),
            "all-layers": (
                {"cpu_offloading_num_layers": 4, "num_layers": 4},
                "cpu_offloading_num_layers",
                "fewer than num_layers 4, because the last layer is needed at once; found 4",
            ),
            "weights": (
                {"cpu_offloading_weights": True},
                "cpu_offloading_weights",
                "weights stay on the device; leave it out",
            ),
            "nothing": (
                {"cpu_offloading_num_layers": 1, "cpu_offloading_activations": False},
                "cpu_offloading_activations",
                "false leaves nothing to offload",
            ),
            "both": (
                {
                    "cpu_offloading_num_layers": 1,
                    "fine_grained_activation_offloading": True,
                    "offload_modules": ["core_attn"],
                },
                "fine_grained_activation_offloading",
                "cannot be combined with cpu_offloading_num_layers; leave one out",
            ),
            "recomputed": (
                {"cpu_offloading_num_layers": 1, "recompute_granularity": "auto"},
                "cpu_offloading_num_layers",
                "is not supported with recompute_granularity: auto, which keeps the inputs",
            ),
            "captured": (
                {**FULL_CUDA_GRAPH, "cpu_offloading_num_layers": 1},
                "cpu_offloading_num_layers",
                "is not supported with cuda_graph_impl: local; leave one out",
            ),
            "no-modules": (
                {"fine_grained_activation_offloading": True},
                "offload_modules",
                "is required by fine_grained_activation_offloading: true",
            ),
            "projection-alone": (
                {"fine_grained_activation_offloading": True, "offload_modules": ["attn_proj"]},
                "offload_modules",
                "attn_proj requires core_attn, which keeps the same tensor; add core_attn",
            ),
            "no-experts": (
                {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
                "offload_modules",
                "moe_act requires moe_grouped_gemm; leave it out",
            ),
            "one-graph": (
                {
                    "fine_grained_activation_offloading": True,
                    "offload_modules": ["core_attn"],
                    "transformer_impl": "compiled",
                },
                "fine_grained_activation_offloading",
                "transformer_impl: compiled, whose layers are one graph each; use cpu_offloading_n",
            ),
        }.items()
    },
    "recompute-part-of-experts": (
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe", "moe_act"],
            "num_experts": 4,
            "moe_grouped_gemm": True,
            "disable_bias_linear": True,
        },
        "recompute_modules",
        "moe_act is a part of moe, which is recomputed as a whole; leave one out",
    ),
    "sgd": (
        {"optimizer": "sgd", "use_distributed_optimizer": True},
        "optimizer",
        "megatron.core shards only Adam",
    ),
    "bounded": (
        {**BOUNDED_ALL_REDUCE, "use_distributed_optimizer": True},
        "use_distributed_optimizer",
        "reduce_scatter, which is not bounded; set it to false, or leave",
    ),
    "ep": ({"expert_model_parallel_size": 2}, "expert_model_parallel_size", "num_moe_experts"),
    "experts": (
        {"expert_model_parallel_size": 2, "num_moe_experts": 3},
        "num_moe_experts",
        "3 is not divisible",
    ),
    "top-1": ({"num_moe_experts": 4, "moe_router_topk": 1}, "moe_router_topk", "pre_softmax"),
    "moe-pattern": (
        {"num_moe_experts": 4, "moe_layer_freq": "[0]+[1]*6"},
        "moe_layer_freq",
        "layer (num_layers 8), found 7",
    ),
    "moe-never": ({"moe_layer_freq": 0}, "moe_layer_freq", "has experts) or a list, found 0"),
    "grouped-bias": (
        {"num_moe_experts": 4, "moe_grouped_gemm": True, "add_bias_linear": True},
        "moe_grouped_gemm",
        "requires disable_bias_linear:",
    ),
    "grouped-dense": ({"moe_grouped_gemm": True}, "moe_grouped_gemm", "requires num_moe_experts"),
    "gather": ({"overlap_param_gather": True}, "overlap_param_gather", "use_distributed_opt"),
}


@pytest.mark.parametrize(("values", "name", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_invalid_layout_argument_is_rejected(
    values: dict[str, Any], name: str, message: str
) -> None:
    ((argument, text),) = list_problems(values)
    assert message in text
    assert argument == name or name not in values
