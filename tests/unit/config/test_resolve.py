from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.rules.optimizer import schedule_lengths
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.errors import ConfigError


def make_arguments(**changes: Any) -> Namespace:
    base: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "seq_length": 32,
        "lr": 1e-3,
        "train_iters": 10,
        "micro_batch_size": 2,
        "global_batch_size": 16,
    }
    return Namespace(**{**vars(parse_arguments([])), **base, **changes})


MTP = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
LEAN = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
PP2 = {"pipeline_model_parallel_size": 2}


def derive_error(world_size: int = 8, **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        derive_arguments(make_arguments(**changes), world_size)
    return str(error.value)


def test_data_parallel_size_and_microbatches_are_derived() -> None:
    args = derive_arguments(
        make_arguments(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 8
    )
    assert (args.data_parallel_size, args.num_microbatches) == (2, 4)


def test_input_arguments_are_not_modified() -> None:
    args = make_arguments(global_batch_size=None)
    assert derive_arguments(args, 4).global_batch_size == 8
    assert args.global_batch_size is None


WIDTHS = {
    "megatron": ({}, 128),
    "given": ({"ffn_hidden_size": 100, "multiple_of": 256}, 100),
    "rounded-up": ({"hidden_size": 4096, "multiple_of": 256}, 11008),
    "multiplied": ({"hidden_size": 8192, "multiple_of": 4096, "hidden_dim_multiplier": 1.3}, 28672),
    "not-gated": ({"multiple_of": 256, "swiglu": False}, None),
}


@pytest.mark.parametrize(("changes", "width"), WIDTHS.values(), ids=WIDTHS)
def test_gated_mlp_width(changes: dict[str, Any], width: int | None) -> None:
    args = derive_arguments(make_arguments(**{"swiglu": True, **changes}), 1)
    assert args.ffn_hidden_size == width


def test_train_samples_are_rounded_to_steps() -> None:
    args = derive_arguments(make_arguments(train_iters=None, train_samples=100), 1)
    assert (args.train_iters, args.train_samples) == (6, 100)


RAMPUP: dict[str, Any] = {
    "train_iters": None,
    "train_samples": 100,
    "rampup_batch_size": (4, 4, 24),
}


def test_batch_size_rampup_takes_more_steps() -> None:
    args = derive_arguments(make_arguments(**RAMPUP), 1)
    # Batches 4 4 | 8 | 12 | 16 16 16 16: grown after 8, 16 and 24 (here 28) sequences.
    assert list(args.rampup.batch_sizes) == [4, 8, 12, 16]
    assert (args.train_iters, args.num_microbatches) == (8, 8)
    assert derive_arguments(make_arguments(), 1).rampup is None


INVALID_RAMPUPS = {
    "two-numbers": ({"rampup_batch_size": (4, 4)}, "expected three numbers"),
    "never-there": ({"rampup_batch_size": (4, 5, 24)}, "4 does not reach global_batch_size 16 in"),
    "too-large": ({"rampup_batch_size": (32, 4, 24)}, "32 does not reach global_batch_size"),
    "to-nothing": ({"global_batch_size": None}, "global_batch_size: is required"),
    "in-steps": (
        {"train_iters": 10, "train_samples": None},
        "requires train_samples instead of train_iters",
    ),
    "decay-in-steps": ({"lr_decay_iters": 5}, "batch sizes differ; set lr_decay_samples"),
    "by-micro-batch": (
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "recompute_granularity_per_stage_micro_batch": "[[1, 8, 1]]",
        },
        "is not supported with rampup_batch_size",
    ),
    "not-shared-out": (
        {"rampup_batch_size": (6, 5, 24), "micro_batch_size": 4},
        "6 is not divisible by micro_batch_size",
    ),
    "not-by-stages": (
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "rampup_batch_size": (2, 2, 24),
        },
        "2 has 1 micro-batches, which is not divisible by",
    ),
}


@pytest.mark.parametrize(("changes", "message"), INVALID_RAMPUPS.values(), ids=INVALID_RAMPUPS)
def test_invalid_rampup_is_rejected(changes: dict[str, Any], message: str) -> None:
    world = changes.get("pipeline_model_parallel_size", 1)
    assert message in derive_error(world, **{**RAMPUP, **changes})


NO_LENGTH: dict[str, Any] = {"train_iters": None, "train_samples": None}
EVALUATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "schedule": ({}, 10),
    "neither-rate-nor-length": ({"lr": None, **NO_LENGTH}, 0),
    "samples": ({"lr": None, "train_iters": None, "train_samples": 100}, 6),
    "both-lengths": ({"train_samples": 100}, 10),
    "minimum-above-no-rate": ({"lr": None, "min_lr": 1e-4, "lr_warmup_init": 1e-5}, 10),
    "warm-up-without-end": ({**NO_LENGTH, "lr_warmup_iters": 20, "lr_warmup_fraction": 0.1}, 0),
    "decay-in-both-units": ({"lr_decay_iters": 5, "lr_decay_samples": 5}, 10),
    "wsd-without-final-phase": ({"lr_decay_style": "WSD"}, 10),
    "weight-decay": ({"start_weight_decay": 1.0, "end_weight_decay": 0.5}, 10),
    "decoupled": ({"lr": None, "decoupled_lr": 1e-4, "decoupled_min_lr": 1e-3}, 10),
    "both-sources": (
        dict.fromkeys(("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"), True),
        10,
    ),
    "rampup": (RAMPUP, 6),
    "rampup-in-steps": ({**RAMPUP, "train_samples": None, "train_iters": 10}, 10),
    "rampup-not-divisible": ({**RAMPUP, "rampup_batch_size": (3, 13, 24)}, 6),
}


@pytest.mark.parametrize(("changes", "steps"), EVALUATIONS.values(), ids=EVALUATIONS)
def test_evaluation_needs_no_schedule(changes: dict[str, Any], steps: int) -> None:
    args = derive_arguments(make_arguments(skip_train=True, **changes), 2)
    assert (args.lr, args.train_iters, args.rampup) == (0.0, steps, None)
    assert schedule_lengths(vars(args))["lr_warmup_steps"] == 0


def test_evaluation_needs_a_layout() -> None:
    message = derive_error(3, skip_train=True, lr=None, **NO_LENGTH)
    assert "global_batch_size" in message


def test_train_samples_are_derived_from_steps() -> None:
    assert derive_arguments(make_arguments(), 1).train_samples == 160


def test_virtual_stages_enable_overlapped_p2p() -> None:
    args = derive_arguments(
        make_arguments(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2), 2
    )
    assert args.virtual_pipeline_model_parallel_size == 2
    assert (args.overlap_p2p_comm, args.batch_p2p_comm) == (True, False)


def test_one_virtual_stage_disables_interleaving() -> None:
    args = derive_arguments(
        make_arguments(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=1), 2
    )
    assert args.virtual_pipeline_model_parallel_size is None


def test_swiglu_width_is_two_thirds() -> None:
    assert (
        derive_arguments(make_arguments(swiglu=True, hidden_size=4096), 1).ffn_hidden_size == 10880
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr": None}, "lr: is required"),
        ({"num_layers": None}, "num_layers: is required"),
        (
            {"context_parallel_size": 2, "attention_backend": "local"},
            "context_parallel_size: 2 is not supported with attention_backend",
        ),
        (
            {"tensor_model_parallel_size": 3, "num_attention_heads": 9, "hidden_size": 72},
            "8 ranks are not divisible by tensor 3 x pipeline 1 =",
        ),
        (
            {"expert_model_parallel_size": 3},
            "expert_model_parallel_size: 3 requires num_moe_experts",
        ),
        (
            {"expert_model_parallel_size": 3, "num_moe_experts": 3},
            "8 ranks are not divisible by expert-parallel size 3 x expert tensor-parallel size 1",
        ),
        (
            {"sequence_parallel": True, "tensor_model_parallel_size": 2, "seq_length": 33},
            "33 is not divisible by",
        ),
        ({"global_batch_size": 12}, "12 is not divisible by micro_batch_size 2 x"),
        ({"train_samples": 100}, "found both"),
        ({"train_iters": None}, "found neither"),
        ({"max_position_embeddings": 16}, "16 is less than seq_length 32"),
        (
            {"num_virtual_stages_per_pipeline_rank": 2},
            "must be at least 2 with 2 virtual stages, found 1",
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
            "8 is not divisible by 3 x pipeline_model_parallel_size",
        ),
        (
            {
                "pipeline_model_parallel_size": 4,
                "num_virtual_stages_per_pipeline_rank": 2,
                "global_batch_size": 8,
            },
            "2 micro-batches, which is not",
        ),
        ({"overlap_param_gather": True}, "requires use_distributed_optimizer"),
        (
            {"overlap_param_gather": True, "use_distributed_optimizer": True},
            "requires overlap_grad_reduce: true",
        ),
        (
            {"save": "/c", "export_huggingface": "/c/"},
            "export_huggingface: /c/ is the directory of save; give another one",
        ),
        (
            {"export_huggingface": "/e", "export_peft": "/e"},
            "export_peft: /e is the directory of export_huggingface",
        ),
        ({"bf16": True, "fp16": True}, "fp16: cannot be combined with bf16"),
        ({"cross_entropy_loss_fusion": True}, "cross_entropy_loss_fusion: requires bf16"),
        ({"fp8": "hybrid"}, "fp8: hybrid requires bf16:"),
        (
            {"exp_avg_dtype": "bf16"},
            "exp_avg_dtype: bf16 requires use_precision_aware_optimizer: true",
        ),
        (
            {"use_precision_aware_optimizer": True},
            "use_precision_aware_optimizer: requires use_distributed_optimizer: true",
        ),
        (
            {**LEAN, "optimizer": "sgd"},
            "use_precision_aware_optimizer: requires optimizer: adam, found sgd",
        ),
        (
            {**LEAN, "bf16": True, "main_params_dtype": "fp16"},
            "main_params_dtype: fp16 is not supported for a model in bf16; use fp32, which takes 2",
        ),
        (
            {**LEAN, "main_params_dtype": "bf16"},
            "main_params_dtype: bf16 is not supported for a model in fp32; use fp32",
        ),
        (
            {**LEAN, "fp16": True, "main_params_dtype": "fp8"},
            "main_params_dtype: fp8 is not supported for a model in fp16; use fp32 or fp16",
        ),
        (
            {**LEAN, "main_grads_dtype": "bf16"},
            "main_grads_dtype: bf16 requires a model in bf16, found fp32",
        ),
        (
            {**LEAN, "bf16": True, "main_grads_dtype": "fp16"},
            "main_grads_dtype: fp16 is not supported; use fp32 or bf16",
        ),
        (
            {**LEAN, "bf16": True, "main_grads_dtype": "bf16", "grad_reduce_in_fp32": True},
            "main_grads_dtype: bf16 cannot be combined with accumulate_allreduce_grads_in_fp32",
        ),
        ({"gradient_accumulation_fusion": True, "transformer_impl": "local"}, "Apex"),
        ({"reset_attention_mask": True, "attention_backend": "fused"}, "cannot separate documents"),
        ({"min_lr": 1.0}, "min_lr: 1.0 exceeds lr 0.001"),
        ({"lr_warmup_iters": 10}, "10 steps must be shorter than the decay"),
        (
            {"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1},
            "lr_warmup_iters or lr_warmup_samples; leave one",
        ),
        ({"lr_warmup_samples": 160}, "lr_warmup_samples: warm-up of 10 steps must"),
        (
            {"lr_warmup_samples": 20, "lr_decay_iters": 1, "global_batch_size": None},
            "the decay of 1 steps, which includes it",
        ),
        ({"lr_decay_style": "WSD"}, "is required by lr_decay_style: WSD"),
        ({"start_weight_decay": 0.2, "end_weight_decay": 0.1}, "exceeds end_weight_decay"),
        (
            {"start_weight_decay": 0.1, "end_weight_decay": 0.2},
            "end_weight_decay 0.2; use linear or cosine",
        ),
        ({"optimizer": "soap"}, "expected 'adam' (AdamW), 'muon', 'lion' or 'sgd'"),
        ({"optimizer": "dist_muon"}, "dist_muon requires use_distributed_optimizer: true"),
        ({"optimizer": "muon", "fp16": True}, "muon is not supported with fp16; use bf16"),
        (
            {"optimizer": "muon", "decoupled_weight_decay": False},
            "decoupled_weight_decay: false is not supported by muon",
        ),
        (
            {"optimizer": "lion", "decoupled_weight_decay": False},
            "decoupled_weight_decay: false is not supported by lion",
        ),
        ({**LEAN, "optimizer": "lion"}, "requires optimizer: adam, found lion"),
        ({**LEAN, "optimizer": "muon"}, "requires optimizer: adam, found muon"),
        ({"mtp_num_layers": -1}, "mtp_num_layers: expected a number of layers of"),
        (
            {**MTP, "mtp_loss_scaling_factor": -0.1},
            "mtp_loss_scaling_factor: must not be negative, found -0.1",
        ),
        ({**MTP, "mtp_num_layers": 32}, "less than seq_length 32, found 32"),
        ({**MTP, "family": "bert"}, "mtp_num_layers: is not supported with"),
        ({**MTP, "window_size": [4, 0]}, "window_size [4, 0]: its layers"),
        (
            {"mtp_num_layers": 1, "position_embedding_type": "learned_absolute"},
            "be learned twice; use rope",
        ),
        (
            {**MTP, **PP2, "pipeline_model_parallel_layout": "Ettttm|ttttL"},
            "1 m (mtp_num_layers) in the last stage, before",
        ),
        (
            {**PP2, "pipeline_model_parallel_layout": "Etttt|ttttmL"},
            "0 m (mtp_num_layers) in the last stage, before",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_invalid_arguments_are_rejected(changes: dict[str, Any], expected: str) -> None:
    assert expected in derive_error(**changes)


def test_all_errors_are_reported_at_once() -> None:
    text = derive_error(mtp_num_layers=-1, fp8="hybrid", optimizer="adagrad")
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (160, 0, None)),
        ({"lr_decay_iters": 5, "lr_warmup_iters": 2}, (80, 32, None)),
        ({"lr_decay_samples": 100, "lr_warmup_samples": 7}, (100, 7, None)),
        ({"lr_warmup_fraction": 0.25}, (160, 40.0, None)),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3}, (160, 0, 48)),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_samples": 3}, (160, 0, 3)),
    ],
)
def test_schedule_lengths_are_in_samples(
    changes: dict[str, Any], expected: tuple[float, float, int | None]
) -> None:
    lengths = schedule_lengths(vars(derive_arguments(make_arguments(**changes), 1)))
    assert lengths["wd_incr_steps"] == 160
    steps = (lengths["lr_decay_steps"], lengths["lr_warmup_steps"], lengths["wsd_decay_steps"])
    assert steps == expected
