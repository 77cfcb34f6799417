"""Checks that relate the values of several arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.arguments import train_arguments, values_by_yaml_name
from unit.config.check_helpers import (
    ADAPTERS,
    BOUNDED_ALL_REDUCE,
    EXPERT_ADAPTERS,
    FULL_CUDA_GRAPH,
    LATENT,
    LATENT_FP8,
    LLAMA,
    SIGMOID_ROUTER,
    Problems,
    build_experiment,
    list_problems,
)

from flagscale.config.arguments.rules.resuming import needs_checkpoint
from flagscale.config.checks import check_arguments, check_world, experiment_notes
from flagscale.config.schema import Environments

VALID: dict[str, dict[str, Any]] = {
    "captured": FULL_CUDA_GRAPH,
    "plain": {},
    "tp": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "groups": {"num_query_groups": 4, "tensor_model_parallel_size": 4},
    "gqa-switch": {"num_query_groups": 4, "group_query_attention": True},
    "pp": {"pipeline_model_parallel_size": 4},
    "vpp": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
    "vpp-chunks": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 4},
    "vpp-explicit": {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "overlap_p2p_communication": True,
        "batch_p2p_comm": False,
    },
    "vpp-off": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1},
    "uneven": {
        "pipeline_model_parallel_size": 3,
        "num_layers_in_first_pipeline_stage": 2,
        "num_layers_in_last_pipeline_stage": 3,
    },
    "two-stages-of-their-own": {
        "pipeline_model_parallel_size": 2,
        "num_layers_in_first_pipeline_stage": 3,
        "num_layers_in_last_pipeline_stage": 5,
    },
    "layout": {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et|t*4|t*3L"},
    "embedding": {
        "pipeline_model_parallel_size": 5,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    "channels": {"hidden_size": 60, "kv_channels": 16},
    "samples": {"train_iters": None, "train_samples": 10},
    "experts": {"num_moe_experts": 4, "expert_model_parallel_size": 2},
    "adapters-of-experts": {**EXPERT_ADAPTERS, "lora_dropout": 0.1},
    "latent": {
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "tensor_model_parallel_size": 2,
        "position_embedding_type": "rope",
    },
    "adapters": {
        "peft_type": "lora",
        "lora_target_modules": ["q_proj", "v_proj", "up_proj"],
        "lora_dropout": 0.1,
        "lora_dropout_position": "post",
        "lora_in_init_method": "xavier",
        "lora_out_init_method": "zero",
        "pretrained_checkpoint": "/x",
    },
    "adapters-for-peft": {**ADAPTERS, "export_peft": "/x", **LLAMA},
    "fp8": {"fp8": "hybrid", "bf16": True, "kv_channels": 12, "num_query_groups": 2},
    "bounded": BOUNDED_ALL_REDUCE,
    "exact": {**BOUNDED_ALL_REDUCE, "comm": ["tail=exact"], "use_distributed_optimizer": True},
    "fp8-latent": LATENT_FP8,
    "window": {"window_size": [4, 0], "window_attn_skip_freq": 2},
    "window-of-the-core": {"window_size": [4, 0], "attention_backend": "local"},
    "windows-and-documents": {"window_size": [4, 0], "reset_attention_mask": True},
    "window-list": {"window_size": [4, 0], "window_attn_skip_freq": [1, 0] * 4},
    "softmax": {"softmax_type": "off-by-one", "attention_backend": "local"},
    "softmax-vanilla": {"softmax_type": "vanilla"},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "offloaded-layers": {"cpu_offloading_num_layers": 2, "cpu_offloading_double_buffering": True},
    "offloaded-kept-activations": {
        "cpu_offloading": True,
        "cpu_offloading_num_layers": 2,
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp"],
    },
    "offloaded-modules": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn", "attn_proj"],
    },
    "recompute-experts": {
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm", "moe_act", "core_attn"],
        "num_moe_experts": 2,
        "moe_grouped_gemm": True,
        "add_bias_linear": False,
    },
    "flex": {
        "moe_token_dispatcher_type": "flex",
        "num_moe_experts": 2,
        "expert_model_parallel_size": 2,
    },
    "flex-of-no-experts": {"moe_token_dispatcher_type": "flex"},
    "last-phase": {
        "lr_decay_style": "WSD",
        "lr_wsd_decay_iters": 8,
        "lr_warmup_iters": 2,
    },
    "evaluation": {"skip_train": True, "lr": None, "train_iters": None},
    "evaluation-with-a-schedule": {
        "skip_train": True,
        "lr": None,
        "min_lr": 1e-4,
        "lr_decay_style": "WSD",
        "lr_warmup_iters": 20,
    },
    "evaluation-of-its-own-data": {
        "skip_train": True,
        "lr": None,
        "train_iters": None,
        "mock_data": False,
        "valid_data_path": ["/x"],
    },
    "half-turned": {"position_embedding_type": "rope", "kv_channels": 7, "rotary_percent": 0.5},
    "rope": {"no_position_embedding": True, "position_embedding_type": "rope"},
}


@pytest.mark.parametrize("values", VALID.values(), ids=VALID)
def test_valid_arguments_are_accepted(values: dict[str, Any]) -> None:
    assert check_arguments(build_experiment(values)) == []


PROBLEMS: Problems = {
    "no-layers": ({"num_layers": None}, "num_layers", "is required"),
    "no-lr": ({"lr": None}, "lr", "is required"),
    "opposite": (
        {"no_rope_fusion": False, "transformer_impl": "local"},
        "no_rope_fusion",
        "or Apex for it (`no_rope_fusion: false` is `apply_rope_fusion: true`)",
    ),
    "switch-of-a-value": (
        {"use_flash_attn": True, "window_size": [4, 0]},
        "window_size",
        "is not supported by attention_backend: flash; use auto",
    ),
    "graph": (
        {"cuda_graph_impl": "transformer_engine"},
        "cuda_graph_impl",
        "transformer_engine requires Transformer Engine; use local with cuda_graph_scope: full_ite",
    ),
    "precision": ({"bf16": True, "fp16": True}, "fp16", "cannot be combined with bf16"),
    "positions": ({"max_position_embeddings": 16}, "max_position_embeddings", "less than"),
    "warmup": ({"lr_warmup_iters": 10}, "lr_warmup_iters", "10 steps must be shorter than"),
    "profile": (
        {"profile": True, "profile_step_start": 5, "profile_step_end": 5},
        "profile_step_end",
        "greater than profile_step_start 5, found 5",
    ),
    "two-choices": (
        {"mock_data": None, "data_path": ["a"], "train_data_path": ["b"]},
        "train_data_path",
        "cannot be combined with data_path",
    ),
}


@pytest.mark.parametrize(("values", "name", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_invalid_argument_is_rejected(values: dict[str, Any], name: str, message: str) -> None:
    ((argument, text),) = list_problems(values)
    assert message in text
    assert argument == name or name not in values


FALLBACKS: dict[str, tuple[dict[str, Any], str]] = {
    "te": (
        {"transformer_impl": "transformer_engine"},
        "auto' is used instead of 'transformer_engine",
    ),
    "torch": ({"dist_ckpt_format": "torch"}, "torch_dist' is used instead of 'torch':"),
    "overlap": (
        {"delay_wgrad_compute": True},
        "false is used instead of true: this overlap requires Transformer Engine",
    ),
    "norm": ({"persist_layer_norm": True}, "false is used instead of true: it requires Apex;"),
    "sp": ({"sequence_parallel": True}, "false is used instead of true: sequence parallelism"),
    "frozen-biases": (
        {"moe_router_bias_update_rate": 0.1, "num_experts": 4, **ADAPTERS}
        | {"lora_target_modules": ["linear_proj"], **SIGMOID_ROUTER},
        "0.0 is used instead of 0.1: expert biases are frozen like the",
    ),
    "ring-with-documents": (
        {"cp_comm_type": "p2p", "context_parallel_size": 2, "reset_attention_mask": True},
        "'all_gather' is used instead of 'p2p': documents are separate, for which keys and values",
    ),
    "ring-with-dropout": (
        {"cp_comm_type": "p2p", "context_parallel_size": 2, "attention_dropout": 0.1},
        "'all_gather' is used instead of 'p2p': attention has dropout",
    ),
    "ring-with-windows": (
        {"cp_comm_type": "p2p", "context_parallel_size": 2, "window_size": [4, 0]}
        | {"attention_dropout": 0.0},
        "'all_gather' is used instead of 'p2p': layers have sliding windows",
    ),
    "sp-meshes": (
        {
            "sequence_parallel": True,
            "enable_hetero": True,
            "hetero_process_meshes": [1] * 10,
            "hetero_device_types": ["a", "b"],
        },
        "false is used instead of true: sequence parallelism",
    ),
}


@pytest.mark.parametrize(
    "envs",
    [
        Environments(common={"FSCCL_TAIL": "bounded"}),
        Environments(by_host={"node1": {"FSCCL_TAIL": "bounded"}}),
    ],
    ids=["all hosts", "one"],
)
def test_bounded_all_reduce_set_by_environment_is_rejected(envs: Environments) -> None:
    experiment = replace(build_experiment({"use_distributed_optimizer": True}), envs=envs)
    (problem,) = check_arguments(experiment)
    assert problem.key == "train.model.inner.use_distributed_optimizer"
    assert "FSCCL_TAIL=bounded of experiment.envs: it reduces" in problem.message


@pytest.mark.parametrize(("values", "note"), FALLBACKS.values(), ids=FALLBACKS)
def test_substitution_is_noted_or_rejected(values: dict[str, Any], note: str) -> None:
    experiment = build_experiment(values)
    assert not check_arguments(experiment)
    (text,) = experiment_notes(experiment, 1)
    assert note in text
    (problem,) = check_arguments(build_experiment({**values, "allow_fallbacks": False}))
    assert problem.key.endswith(next(iter(values)))
    assert "or allow_fallbacks: true" in problem.message


PHASES: dict[str, Any] = {"mock_data": None, "data_path": "a", "micro_batch_size": 1}
WITHOUT_EFFECT: dict[str, tuple[dict[str, Any], str]] = {
    "experts": (
        {"moe_router_topk": 2, "moe_aux_loss_coeff": 0.1},
        "moe_router_topk, moe_aux_loss_coeff have no effect: requires num_moe_experts",
    ),
    "loss-scale": (
        {"bf16": True, "initial_loss_scale": 1024, "min_loss_scale": 1.0},
        "initial_loss_scale, min_loss_scale have no effect: requires fp16",
    ),
    "nothing-exchanged": (
        {"tp_comm_overlap": True},
        "tp_comm_overlap has no effect: requires sequence_parallel",
    ),
    "other-optimizer": ({"sgd_momentum": 0.8}, "sgd_momentum has no effect: requires optimizer:"),
    "adapters-of-mixtures": (
        {**ADAPTERS, "num_experts": 4, "lora_target_modules": ["all-linear"]},
        "lora_target_modules: ['all-linear'] trains adapters of linear_qkv, linear_proj only: in a "
        "model with experts (num_moe_experts), MLPs and experts get adapters if linear_fc1",
    ),
    "adapters-of-named-layers": (
        {**ADAPTERS, "num_experts": 4, "lora_target_modules": ["linear_proj"]},
        "",
    ),
    "latent-documents": (
        {**LATENT, "reset_position_ids": True, "reset_attention_mask": True},
        "reset_position_ids has no effect: documents are separate",
    ),
    "no-shared-expert": (
        {"moe_shared_expert_overlap": True, "num_experts": 4},
        "moe_shared_expert_overlap has no effect: requires moe_shared_expert_intermediate_size",
    ),
    "skipped-behind-the-end": (
        {"skip_train_iters": [5, 500]},
        "skip_train_iters has no effect: [500]: training ends after step 10",
    ),
    "skipped-in-time": ({"iterations_to_skip": [10]}, ""),
    "phase-behind-the-end": (
        {**PHASES, "data_phases": ["samples=9 b", "samples=10 c"]},
        "data_phases has no effect: phase at sample 10: training ends",
    ),
    "phase-in-time": ({**PHASES, "data_phases": ["samples=9 b"]}, ""),
    "alias": (
        {"dataloader_fast_cache_load": True},
        "dataloader_fast_cache_load has no effect: caches",
    ),
    "megatron-fsdp": (
        {"use_megatron_fsdp": True},
        "use_megatron_fsdp has no effect: data_parallel_sharding_strategy alone says what is",
    ),
    "on-by-default": (
        {"no_gradient_reduce_div_fusion": True},
        "no_gradient_reduce_div_fusion has no effect",
    ),
    "foreign": ({"log_progress": True}, "log_progress has no effect: this metric, trace or"),
    "off": ({"moe_per_layer_logging": False, "fsdp_double_buffer": False, "auto_tune": False}, ""),
    "satisfied": ({"fp16": True, "initial_loss_scale": 1024}, ""),
}


@pytest.mark.parametrize(("values", "note"), WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
def test_argument_without_effect_is_noted(values: dict[str, Any], note: str) -> None:
    experiment = build_experiment(values)
    assert not check_arguments(experiment)
    notes = "; ".join(experiment_notes(experiment, 1))
    assert note in notes and bool(note) == bool(notes)


def test_unsaved_adapters_need_no_pretrained_checkpoint() -> None:
    experiment = build_experiment({"peft_type": "lora"})
    assert [problem.key for problem in check_arguments(experiment)] == [
        "train.system.pretrained_checkpoint"
    ]
    unsaved = experiment.train.with_added(train_arguments(system={"save": None}).entries)
    assert check_arguments(replace(experiment, train=unsaved)) == []


def test_arguments_of_external_program_are_not_checked() -> None:
    experiment = build_experiment({"transformer_impl": "transformer_engine"}, external=True)
    (note,) = experiment_notes(experiment, 1)
    assert "its own parser checks the arguments" in note


HYBRID = {
    "data_parallel_sharding_strategy": "optim_grads",
    "num_distributed_optimizer_instances": 2,
    "global_batch_size": 12,
}
WORLDS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "one": ({}, 1, None),
    "dp": ({"global_batch_size": 8}, 8, None),
    "tp-pp": ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 8, None),
    "tp-pp-no": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        6,
        "6 ranks are not divisible by tensor 2 x pipeline 2 = 4",
    ),
    "too-few": ({"tensor_model_parallel_size": 2}, 1, "1 ranks are not divisible by tensor 2"),
    "batch": ({"global_batch_size": 6, "micro_batch_size": 2}, 2, "6 is not divisible by micro"),
    "vpp-micro": (
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "global_batch_size": 3,
        },
        2,
        "3 has 3 micro-batches, which is not divisible",
    ),
    "experts-tp": (
        {"num_moe_experts": 4, "expert_tensor_parallel_size": 2},
        1,
        "1 ranks are not divisible by expert-parallel size 1 x expert tensor-parallel size 2",
    ),
    "rampup-of-an-evaluation": (
        {"skip_train": True, "rampup_batch_size": [3, 5, 8], "global_batch_size": 8},
        2,
        None,
    ),
    "ep": (
        {"num_moe_experts": 4, "expert_model_parallel_size": 4},
        2,
        "2 ranks are not divisible by expert-parallel size 4",
    ),
    "instances": ({**HYBRID, "context_parallel_size": 2, "global_batch_size": 4}, 8, None),
    "instances-no": (
        {**HYBRID, "num_distributed_optimizer_instances": 3, "global_batch_size": 8},
        8,
        "3 does not divide data-parallel size 8; use 1, 2, 4 or 8",
    ),
    "instances-context": (
        {**HYBRID, "num_distributed_optimizer_instances": 4, "context_parallel_size": 2},
        6,
        "4 does not divide data-parallel size 3 x context 2 = 6; use 1, 2, 3 or 6",
    ),
    "instances-experts": (
        {**HYBRID, "num_moe_experts": 4, "expert_model_parallel_size": 4},
        4,
        "2 does not divide the 1 data-parallel ranks of experts (expert-parallel size 4 x expert "
        "tensor-parallel size 1); use 1",
    ),
}


@pytest.mark.parametrize(("values", "world", "message"), WORLDS.values(), ids=WORLDS)
def test_world_size_is_checked(values: dict[str, Any], world: int, message: str | None) -> None:
    problems = check_world(build_experiment(values), world)
    assert len(problems) == (message is not None)
    assert all((message or "") in p.message for p in problems)


def test_model_of_external_program_is_not_checked() -> None:
    experiment = build_experiment({"num_layers": None, "context_parallel_size": 2}, external=True)
    assert check_arguments(experiment) == []
    assert "context 2" in check_world(experiment, 3)[0].message
    assert "its own parser" in experiment_notes(experiment, 2)[0]


@pytest.mark.parametrize(
    ("external", "words", "multiple", "tp", "dtype", "expected"),
    [
        (True, 128_257, 1, 1, {"bf16": True}, True),
        (True, 128_264, 1, 2, {"fp16": True}, True),
        (True, 128_257, 128, 1, {"bf16": True}, False),
        (True, 128_256, 1, 2, {"bf16": True}, False),
        (True, 128_257, 1, 1, {}, False),
        (False, 128_257, 1, 1, {"bf16": True}, False),
    ],
    ids=["odd", "odd-per-rank", "padded", "even", "fp32", "own-program-splits-them"],
)
def test_unaligned_vocabulary_is_noted(
    external: bool, words: int, multiple: int, tp: int, dtype: dict[str, Any], expected: bool
) -> None:
    values = {"vocab_size": words, "make_vocab_size_divisible_by": multiple}
    values |= {"tensor_model_parallel_size": tp, **dtype}
    notes = experiment_notes(build_experiment(values, external=external), tp)
    assert any("not a multiple of 8" in note for note in notes) == expected


@pytest.mark.parametrize(
    ("values", "world", "note"),
    [
        (
            {"train_samples": 800, "global_batch_size": 4},
            1,
            "200 steps: train_samples 800 / global",
        ),
        (
            {"train_samples": 801, "global_batch_size": 4},
            1,
            "is not an integer: the last 1 samples",
        ),
        ({"train_samples": 64, "micro_batch_size": 2}, 4, "8 steps"),
        ({"train_iters": 3}, 1, None),
        ({"skip_train": True, "train_iters": None, "skip_train_iters": [500]}, 1, None),
        ({"skip_train": True, "train_samples": 800, "global_batch_size": 4}, 1, None),
        ({"data_path": ["a"], "split": "1,0,0"}, 1, "no evaluation: split 1,0,0"),
        ({"data_path": ["a"], "split": "1,0,0", "eval_iters": 0}, 1, None),
        ({"data_path": ["a"], "split": "9,1"}, 1, None),
    ],
)
def test_notes_of_experiment(values: dict[str, Any], world: int, note: str | None) -> None:
    notes = experiment_notes(build_experiment(values), world)
    assert [note in text for text in notes if note] == [True] * bool(note)
    assert bool(notes) == bool(note)


def test_problem_has_source_location() -> None:
    experiment = build_experiment({"context_parallel_size": 2, "attention_backend": "local"})
    locations = {"train.model.inner.context_parallel_size": "a.yaml:3"}
    train = train_arguments(
        model={"inner": values_by_yaml_name(experiment.train)}, locations=locations
    )
    assert str(check_arguments(replace(experiment, train=train))[0]).startswith(
        "a.yaml:3: train.model.inner.context_parallel_size: 2 is not supported"
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        pytest.param({"load": "/a", "save": "/b"}, None, id="plain"),
        pytest.param({"load": "/a", "save": "/b", "finetune": True}, "finetune", id="finetune"),
        pytest.param({"load": "/a", "save": "/a", "finetune": True}, "finetune", id="finetune-own"),
        pytest.param({"finetune": True}, "finetune", id="finetune-nothing"),
        pytest.param(
            {"load": "/a", "save": "/a", "exit_on_missing_checkpoint": True},
            "exit_on_missing_checkpoint",
            id="exit-on-missing",
        ),
        pytest.param({"load": "/a", "no_load_optim": True}, None, id="others-optimizer"),
        pytest.param({"load": "/a", "no_load_rng": True}, None, id="others-generators"),
        pytest.param({"load": "/a", "save": "/a", "no_load_optim": True}, None, id="own-optimizer"),
        pytest.param({"no_load_rng": True}, None, id="no-load"),
        pytest.param({"load": "/a", "save": "/a", "skip_train": True}, "skip_train", id="evaluate"),
        pytest.param({"skip_train": True, "pretrained_checkpoint": "/p"}, None, id="evaluate-p"),
    ],
)
def test_arguments_that_require_a_checkpoint(changes: dict[str, Any], name: str | None) -> None:
    values = build_experiment({}).train.values
    assert needs_checkpoint({**values, **changes}) == name
