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
    "groups-heads": ({"num_query_groups": 3}, "num_query_groups", "3 does not divide 8 heads"),
    "hidden": ({"hidden_size": 63}, "hidden_size", "num_attention_heads 8"),
    "ffn": (
        {"ffn_hidden_size": 90, "tensor_model_parallel_size": 4},
        "ffn_hidden_size",
        "90 is not divisible",
    ),
    "layers": (
        {"pipeline_model_parallel_size": 3},
        "num_layers",
        "8 layers do not divide into 3 pipeline stages",
    ),
    "layers-of-the-ends": (
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_in_first_pipeline_stage": 3,
            "num_layers_in_last_pipeline_stage": 4,
        },
        "num_layers",
        "7 of 8 layers are given to 2 of 2 stages",
    ),
    "layers-of-the-first": (
        {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 9},
        "num_layers",
        "9 of 8 layers are given to 1 of 3 stages",
    ),
    "layers-vpp": (
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3},
        "num_layers",
        "2 pipeline stages x 3 virtual",
    ),
    "layers-per-stage": (
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
        "num_layers_per_virtual_pipeline_stage",
        "do not divide into 3 x",
    ),
    "vpp-without-pp": (
        {"num_virtual_stages_per_pipeline_rank": 2},
        "pipeline_model_parallel_size",
        "need a pipeline of at least 2",
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
        "cannot split a sequence over ranks; take auto",
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
        "36 is not divisible by 2 x context_parallel_size 2 x tensor 2",
    ),
    "cp-ring": (
        {"context_parallel_size": 2, "cp_comm_type": "p2p"},
        "cp_comm_type",
        "p2p: keys and values are gathered here",
    ),
    **{
        f"layout-{name}": ({"pipeline_model_parallel_size": 2, **values}, key, message)
        for name, (values, key, message) in {
            "letters": (
                {"pipeline_model_parallel_layout": "another"},
                "pipeline_model_parallel_layout",
                "another: expected E (the embedding) first, t (a layer)",
            ),
            "stages": (
                {"pipeline_model_parallel_layout": "Et*4|t*4|L"},
                "pipeline_model_parallel_layout",
                "Et*4|t*4|L has 3 stages, expected pipeline_model_parallel_size 2",
            ),
            "layers": (
                {"pipeline_model_parallel_layout": "Et*4|t*3L"},
                "pipeline_model_parallel_layout",
                "Et*4|t*3L has 7 t, but num_layers is 8",
            ),
            "and-ends": (
                {
                    "pipeline_model_parallel_layout": "Et*4|t*4L",
                    "num_layers_in_first_pipeline_stage": 4,
                },
                "num_layers_in_first_pipeline_stage",
                "4 with pipeline_model_parallel_layout, which names the layers",
            ),
            "ends-and-embedding": (
                {
                    "num_layers_in_first_pipeline_stage": 4,
                    "account_for_embedding_in_pipeline_split": True,
                    "account_for_loss_in_pipeline_split": True,
                    "num_layers": 6,
                },
                "account_for_embedding_in_pipeline_split",
                "true with num_layers_in_first_pipeline_stage 4: leave one of them out",
            ),
            "end-in-chunks": (
                {
                    "num_layers_in_first_pipeline_stage": 3,
                    "num_virtual_stages_per_pipeline_rank": 2,
                    "num_layers": 7,
                },
                "num_layers_in_first_pipeline_stage",
                "3 does not divide into 2 virtual stages",
            ),
        }.items()
    },
    **{
        f"recompute-{name}": ({"recompute_granularity": "selective", **values}, key, message)
        for name, (values, key, message) in {
            "moe": ({"recompute_modules": ["moe"]}, "recompute_modules", "moe needs num_moe_exp"),
            "shared": (
                {"recompute_modules": ["mlp", "shared_experts"]},
                "recompute_modules",
                "shared_experts needs moe_shared_expert_intermediate_size; leave it out",
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
                "shared_experts with moe_shared_expert_overlap; leave one of them out",
            ),
            "layers": (
                {"recompute_num_layers": 2},
                "recompute_num_layers",
                "2 with recompute_granularity selective, which is of every layer",
            ),
            "shared-out": (
                {
                    "distribute_saved_activations": True,
                    "sequence_parallel": True,
                    "tensor_model_parallel_size": 2,
                },
                "distribute_saved_activations",
                "true with sequence_parallel, which shares them out already",
            ),
        }.items()
    },
    "overlap-at-the-ends": (
        {"overlap_p2p_comm_warmup_flush": True},
        "overlap_p2p_comm_warmup_flush",
        "true needs overlap_p2p_comm, and batch_p2p_comm: false",
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
        "true with recompute_granularity full; leave it out",
    ),
    "permute": ({"moe_permute_fusion": True}, "moe_permute_fusion", "needs Transformer Engine"),
    "router": ({"moe_router_fusion": True}, "moe_router_fusion", "needs Transformer Engine"),
    **{
        f"captured-{name}": ({**FULL_CUDA_GRAPH, name: value}, name, message)
        for name, value, message in (
            ("cuda_graph_scope", ["attn"], "['attn']: only whole steps are captured here"),
            ("tensor_model_parallel_size", 2, "2: ranks would communicate within a captured step"),
            ("overlap_grad_reduce", True, "true: ranks would communicate within a captured step"),
            ("fp16", True, "true cannot be captured (cuda_graph_impl): the loss scale"),
            ("num_moe_experts", 4, "4 cannot be captured (cuda_graph_impl): how many tokens"),
            (
                "recompute_granularity",
                "selective",
                "'selective' cannot be captured (cuda_graph_impl)",
            ),
            ("attention_dropout", 0.1, "0.1 cannot be captured (cuda_graph_impl): the state of"),
        )
    },
    "instances": (
        {"num_distributed_optimizer_instances": 2},
        "num_distributed_optimizer_instances",
        "2: the optimizer here is sharded over all data-parallel ranks",
    ),
    **{
        f"recompute-{name}": (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", name]},
            "recompute_modules",
            f"{name} needs",
        )
        for name in ("layernorm", "moe_act", "mla_up_proj")
    },
    "sgd": (
        {"optimizer": "sgd", "use_distributed_optimizer": True},
        "optimizer",
        "megatron.core shards Adam alone",
    ),
    "bounded": (
        {**BOUNDED_ALL_REDUCE, "use_distributed_optimizer": True},
        "use_distributed_optimizer",
        "true with comm: {tail: bounded}: it sums gradients by reduce_scatter, which is exact",
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
        "7 items, but num_layers is 8",
    ),
    "moe-never": ({"moe_layer_freq": 0}, "moe_layer_freq", "0: expected 1 for every layer"),
    "grouped-bias": (
        {"num_moe_experts": 4, "moe_grouped_gemm": True, "add_bias_linear": True},
        "moe_grouped_gemm",
        "have no biases",
    ),
    "grouped-dense": ({"moe_grouped_gemm": True}, "moe_grouped_gemm", "needs num_moe_experts"),
    "gather": ({"overlap_param_gather": True}, "overlap_param_gather", "use_distributed_opt"),
}


@pytest.mark.parametrize(("values", "name", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_invalid_layout_argument_is_rejected(
    values: dict[str, Any], name: str, message: str
) -> None:
    ((argument, text),) = list_problems(values)
    assert message in text
    assert argument == name or name not in values
