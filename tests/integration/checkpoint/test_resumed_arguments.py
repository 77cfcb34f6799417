"""Resumed runs with changed arguments, proved by their losses.

A run trains two steps and saves; others resume it with one changed argument and train two more.
The first loss after the checkpoint shows a change of the model or the data, the second a change of
the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from integration.checkpoint.checkpoint_lab import CheckpointLab
from support.layout_lab import write_short_documents

from flagscale.config.arguments.rules.resume_effects import RECORDED, Effect, resume_effects

pytestmark = [pytest.mark.integration, pytest.mark.torch]

STEPS, STEPS_AFTER = 2, 3
"""Steps of a run before and after the checkpoint."""
GPT = """--num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2
--ffn-hidden-size 64 --seq-length 16 --micro-batch-size 1 --global-batch-size 2 --lr 2e-3
--min-lr 1e-4 --vocab-size 500 --make-vocab-size-divisible-by 1 --hidden-dropout 0
--attention-dropout 0 --eval-iters 0 --num-workers 0 --clip-grad 0.5 --lr-decay-style cosine
--device cpu --init-method-std 0.1 --no-verify-checkpoint"""
LLAMA = f"""{GPT} --normalization RMSNorm --swiglu --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights"""
LENGTH, MOCK = "--train-iters 6", "--mock-data"
FILES = "--data-path {root}/web --tokenizer-type NullTokenizer --split 90,5,5"
RUNS = {
    "adam": f"{LLAMA} {LENGTH} {MOCK}",
    "samples": f"{LLAMA} --train-samples 12 {MOCK}",
    "files": f"{LLAMA} {LENGTH} {FILES}",
    "bert": f"{GPT} {LENGTH} {MOCK} --family bert",
}
RUNS |= {
    name: f"{RUNS['adam']} {flags}"
    for name, flags in {
        "adam-do": "--use-distributed-optimizer",
        "bf16-do": "--bf16 --use-distributed-optimizer",
        "constant": "--lr-decay-style constant",
        "warmup": "--lr-warmup-iters 4",
        "fraction": "--lr-warmup-fraction 0.5",
        "wsd": "--lr-decay-style WSD --lr-wsd-decay-iters 5",
        "decay": "--start-weight-decay 0.1 --end-weight-decay 5 --weight-decay-incr-style linear",
        "decoupled": "--decoupled-lr 1e-3",
        "decoupled-do": "--decoupled-lr 1e-3 --use-distributed-optimizer",
        "decoupled-bf16": "--decoupled-lr 1e-3 --bf16",
        "sgd": "--optimizer sgd --lr 0.1",
        "sgd-bf16": "--optimizer sgd --lr 0.1 --bf16",
        "sgd-plain": "--optimizer sgd --lr 0.1 --sgd-momentum 0",
        "lion": "--optimizer lion --lr 1e-3",
        "muon": "--optimizer muon --lr 1e-2",
        "muon-bf16-do": "--optimizer muon --lr 1e-2 --bf16 --use-distributed-optimizer",
        "fp16": "--fp16 --initial-loss-scale 1024",
        "fp16-constant": "--fp16 --loss-scale 1024",
        "moe": "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1",
        "moe-capacity": "--num-experts 4 --moe-router-topk 2 --moe-expert-capacity-factor 0.5 "
        "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall",
        "moe-bias": "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-load-balancing-type none",
        "mtp": "--mtp-num-layers 1",
        "lora": "--peft-type lora --pretrained-checkpoint {root}/adam",
    }.items()
}
"""Command lines of runs that save a checkpoint."""
HYPERPARAMETERS = [
    ("lr", "adam", "--lr 1e-3"),
    ("lr", "adam-do", "--lr 1e-3"),
    ("lr", "constant", "--lr 1e-5 --min-lr 1e-6"),
    ("min_lr", "adam", "--min-lr 1e-3"),
    ("decoupled_lr", "decoupled", "--decoupled-lr 1e-4"),
    ("decoupled_lr", "decoupled-do", "--decoupled-lr 1e-4"),
    ("decoupled_min_lr", "decoupled", "--decoupled-min-lr 9e-4"),
    ("lr_decay_style", "adam", "--lr-decay-style linear"),
    ("lr_decay_iters", "adam", "--lr-decay-iters 3"),
    ("lr_decay_samples", "adam", "--lr-decay-samples 6"),
    ("lr_warmup_fraction", "fraction", "--lr-warmup-fraction 0.8"),
    ("lr_warmup_iters", "warmup", "--lr-warmup-iters 5"),
    ("lr_warmup_samples", "adam", "--lr-warmup-samples 10"),
    ("lr_warmup_init", "warmup", "--lr-warmup-init 1e-3"),
    ("lr_wsd_decay_style", "wsd", "--lr-wsd-decay-style linear"),
    ("lr_wsd_decay_iters", "wsd", "--lr-wsd-decay-iters 4"),
    ("lr_wsd_decay_samples", "wsd", "--lr-wsd-decay-samples 8 --lr-wsd-decay-iters 0"),
    ("weight_decay", "adam", "--weight-decay 20"),
    ("start_weight_decay", "decay", "--start-weight-decay 4"),
    ("end_weight_decay", "decay", "--end-weight-decay 50"),
    ("weight_decay_incr_style", "decay", "--weight-decay-incr-style cosine --end-weight-decay 50"),
    ("adam_beta1", "adam", "--adam-beta1 0.5"),
    ("adam_beta1", "adam-do", "--adam-beta1 0.5"),
    ("adam_beta2", "adam", "--adam-beta2 0.5"),
    ("adam_eps", "adam", "--adam-eps 1e-2"),
    ("adam_beta1", "muon", "--adam-beta1 0.5"),
    ("weight_decay", "muon", "--weight-decay 20"),
    ("lion_beta1", "lion", "--lion-beta1 0.1"),
    ("lion_beta2", "lion", "--lion-beta2 0.1"),
    ("sgd_momentum", "sgd", "--sgd-momentum 0.5"),
    ("sgd_momentum", "sgd", "--sgd-momentum 0"),
    ("sgd_momentum", "sgd-bf16", "--sgd-momentum 0"),
    ("sgd_momentum", "sgd-plain", "--sgd-momentum 0.9"),
    ("train_iters", "adam", "--train-iters 12"),
    ("train_samples", "samples", "--train-samples 24"),
]
"""Changed hyperparameters: argument, run and changed flags."""
RARELY_TRIED = {
    "adam": """adam_beta2 adam_eps lr_decay_samples lr_warmup_samples embedding_init_method_std
    attention_softmax_in_fp32 norm_init_weight attention_dropout apply_wd_to_qk_layernorm""",
    "adam-do": "lr adam_beta1",
    "constant": "lr",
    "decay": "end_weight_decay",
    "decoupled": "decoupled_min_lr",
    "decoupled-do": "decoupled_lr",
    "files": "eod_mask_loss",
    "fp16-constant": "loss_scale",
    "lion": "lion_beta2",
    "lora": "lora_in_init_method",
    "moe": """moe_z_loss_coeff moe_router_dtype moe_input_jitter_eps moe_grouped_gemm
    moe_router_force_load_balancing""",
    "moe-capacity": "moe_pad_expert_input_to_capacity",
    "muon": "adam_beta1 weight_decay",
    "muon-bf16-do": "muon_scale_mode",
    "samples": "train_samples",
    "sgd-bf16": "sgd_momentum",
    "warmup": "lr_warmup_init",
    "wsd": "lr_wsd_decay_samples lr_wsd_decay_style",
}
"""Arguments, by run, whose change seldom finds an error that others do not find."""
CHANGES = [
    ("attention_dropout", "adam", "--attention-dropout 0.5"),
    ("hidden_dropout", "adam", "--hidden-dropout 0.5"),
    ("apply_wd_to_qk_layernorm", "adam", "--apply-wd-to-qk-layernorm"),
    ("attention_softmax_in_fp32", "adam", "--no-attention-softmax-in-fp32"),
    ("calculate_per_token_loss", "adam", "--calculate-per-token-loss"),
    ("clip_grad", "adam", "--clip-grad 0.01"),
    ("decoupled_weight_decay", "adam", "--no-decoupled-weight-decay"),
    ("global_batch_size", "samples", "--global-batch-size 1"),
    ("grad_reduce_in_fp32", "decoupled-bf16", "--grad-reduce-in-fp32"),
    ("iterations_to_skip", "adam", "--iterations-to-skip 5"),
    ("loss_scale", "fp16", "--loss-scale 1"),
    ("loss_scale", "fp16-constant", "--loss-scale 0.01"),
    ("initial_loss_scale", "fp16", "--initial-loss-scale 2"),
    ("make_vocab_size_divisible_by", "adam", "--make-vocab-size-divisible-by 2"),
    ("moe_aux_loss_coeff", "moe", "--moe-aux-loss-coeff 10"),
    ("moe_z_loss_coeff", "moe", "--moe-z-loss-coeff 10"),
    ("moe_router_load_balancing_type", "moe", "--moe-router-load-balancing-type none"),
    ("moe_expert_capacity_factor", "moe", "--moe-expert-capacity-factor 0.5"),
    ("moe_input_jitter_eps", "moe", "--moe-input-jitter-eps 0.5"),
    ("moe_router_force_load_balancing", "moe", "--moe-router-force-load-balancing"),
    ("moe_router_dtype", "moe", "--moe-router-dtype fp64"),
    ("moe_token_drop_policy", "moe-capacity", "--moe-token-drop-policy position"),
    ("moe_pad_expert_input_to_capacity", "moe-capacity", "--moe-pad-expert-input-to-capacity"),
    ("moe_router_bias_update_rate", "moe-bias", "--moe-router-bias-update-rate 0.5"),
    ("lora_dropout", "lora", "--lora-dropout 0.5"),
    ("lora_in_init_method", "lora", "--lora-in-init-method normal"),
    ("rampup_batch_size", "samples", "--rampup-batch-size 1 1 12"),
    ("mtp_loss_scaling_factor", "mtp", "--mtp-loss-scaling-factor 5"),
    ("muon_momentum", "muon", "--muon-momentum 0.1"),
    ("muon_scale_mode", "muon-bf16-do", "--muon-scale-mode unit_rms_norm"),
    ("mask_prob", "bert", "--mask-prob 0.5"),
    ("seed", "adam", "--seed 4"),
    ("seq_length", "adam", "--seq-length 12"),
    ("data_path", "files", "--data-path {root}/code"),
    ("data_path", "files", "--data-path 0.5 {root}/web 0.5 {root}/code"),
    ("split", "files", "--split 50,25,25"),
    ("data_phases", "files", "--data-phases samples=6_~{root}/code"),
    ("reset_attention_mask", "files", "--reset-attention-mask"),
    ("eod_mask_loss", "files", "--eod-mask-loss"),
    ("dataloader_type", "files", "--dataloader-type cyclic"),
    ("init_method_std", "adam", "--init-method-std 5"),
    ("embedding_init_method_std", "adam", "--embedding-init-method-std 5"),
    ("norm_init_weight", "adam", "--norm-init-weight 5"),
    ("num_workers", "files", "--num-workers 1"),
    ("recompute_granularity", "adam", "--recompute-granularity full --recompute-method uniform "
     "--recompute-num-layers 1"),
    ("micro_batch_size", "adam", "--micro-batch-size 2"),
    ("transformer_impl", "adam", "--transformer-impl compiled"),
    ("moe_grouped_gemm", "moe", "--moe-grouped-gemm"),
    ("attention_backend", "adam", "--attention-backend local"),
    ("cross_entropy_loss_fusion", "decoupled-bf16", "--cross-entropy-loss-fusion"),
]  # fmt: skip
"""Changes that a resumed run accepts: argument, run and changed flags."""
WITHOUT_EFFECT_HERE = {
    "apply_wd_to_qk_layernorm": "the model has no norms of queries and keys",
    "attention_softmax_in_fp32": "the attention is fused",
    "calculate_per_token_loss": "all sequences have the same number of tokens",
    "iterations_to_skip": "the training loop skips steps, and these runs have none",
    "grad_reduce_in_fp32": "one rank reduces nothing",
    "moe_router_dtype": "only rounding differs",
    "moe_pad_expert_input_to_capacity": "padding is computed and left out",
}
"""Arguments with the effect ``TRAINING`` whose change does not show in these runs, and why."""
REFUSED = [
    ("rotary_base", "adam", "--rotary-base 500"),
    ("layernorm_epsilon", "adam", "--norm-epsilon 0.1"),
    ("window_size", "adam", "--window-size 3 0"),
    ("softmax_scale", "adam", "--softmax-scale 2"),
    ("moe_router_pre_softmax", "moe", "--moe-router-pre-softmax"),
    ("optimizer", "adam", "--optimizer sgd"),
    ("optimizer", "sgd", "--optimizer adam --lr 1e-3"),
    ("optimizer", "adam", "--optimizer muon"),
    ("optimizer", "muon", "--optimizer adam"),
    ("optimizer", "adam", "--optimizer lion"),
    ("optimizer", "lion", "--optimizer adam"),
    ("use_distributed_optimizer", "adam", "--use-distributed-optimizer"),
    ("adam_beta1", "adam", "--adam-beta1 0.5"),
    ("lr", "adam", "--lr 1e-3"),
    ("decoupled_lr", "adam", "--decoupled-lr 1e-4"),
    ("decoupled_lr", "decoupled", "--decoupled-lr 1e-4"),
    ("sgd_momentum", "sgd", "--sgd-momentum 0"),
]
"""Changes that a resumed run refuses by name."""
EVALUATED = [
    ("adam", "--lr 1 --min-lr 0 --lr-decay-style constant --weight-decay 3 --adam-beta1 0.1"),
    ("adam", "--optimizer sgd"),
    ("adam", "--use-distributed-optimizer"),
    ("adam", "--train-iters 1000 --decoupled-lr 1e-4"),
    ("bf16-do", "--no-load-optim"),
]
"""Changes without influence on an evaluation: run and changed flags."""


def case_id(case: tuple[str, ...]) -> str:
    return " ".join(case).replace("{root}/", "")


def make_run(root: Path, name: str, function: str, flags: str, **parameters: Any) -> dict[str, Any]:
    """Build a case of ``checkpoint_worker.py``. A blank within a word is written as an underscore
    followed by a tilde."""
    words = flags.replace("{root}", str(root)).split()
    argv = [word.replace("_~", " ") for word in words]
    return {"id": name, "function": function, "argv": argv, **parameters}


def mark_slow(changes: Sequence[tuple[str, str, str]]) -> list[Any]:
    """Return parameters of tests, marked slow if they are rarely tried."""
    rare = {(name, run) for run, names in RARELY_TRIED.items() for name in names.split()}
    return [
        pytest.param(c, id=case_id(c), marks=[pytest.mark.slow] if c[:2] in rare else [])
        for c in changes
    ]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Train and save every run, and resume it with every change that a selected test needs."""
    tests = [item for item in request.session.items if item.path == request.path]
    callspecs = [callspec for item in tests if (callspec := getattr(item, "callspec", None))]
    selected = {callspec.params.get("change") for callspec in callspecs}
    lab = CheckpointLab(tmp_path_factory.mktemp("resumed"))
    root = lab.root
    write_short_documents(root / "web")
    write_short_documents(root / "code", max_tokens=40)

    def resume(name: str, run: str, flags: str, function: str = "train_and_save") -> dict[str, Any]:
        argv = f"{RUNS[run]} {flags} --load {root / run}"
        return make_run(root, name, function, argv, steps=STEPS_AFTER)

    both = {"steps": STEPS, "steps_after": STEPS_AFTER}
    cases = [resume(f"{run} resumed", run, "") for run in RUNS]
    for change in (change for change in HYPERPARAMETERS if change in selected):
        _, run, flags = change
        name = case_id(change)
        cases += [
            resume(f"{name} override", run, f"{flags} --override-opt-param-scheduler"),
            resume(f"{name} keep", run, f"{flags} --use-checkpoint-opt-param-scheduler"),
        ]
        switched = make_run(root, f"{name} switched", "switch_and_go_on", RUNS[run], **both)
        switched["switched_argv"] = f"{RUNS[run]} {flags}".split()
        cases.append(switched)
    cases += [
        resume(case_id(change), change[1], change[2])
        for change in (*CHANGES, *REFUSED)
        if change in selected
    ]
    cases += [
        resume(f"{run} evaluated", run, "--skip-train", "evaluate")
        for run in {run for run, _ in EVALUATED}
    ]
    cases += [
        resume(f"{case_id(change)} evaluated", change[0], f"{change[1]} --skip-train", "evaluate")
        for change in EVALUATED
    ]
    # Added to a run without it, whose rates were therefore equal.
    added = f"{RUNS['adam']} --decoupled-lr 2e-3 --decoupled-min-lr 1e-4"
    cases += [
        resume("decoupled added", "adam", "--decoupled-lr 1e-4 --override-opt-param-scheduler"),
        make_run(
            root,
            "decoupled added switched",
            "switch_and_go_on",
            added,
            switched_argv=f"{RUNS['adam']} --decoupled-lr 1e-4".split(),
            **both,
        ),
    ]
    lab.add_stage(
        1,
        *(
            make_run(root, f"{run} whole", "save_and_go_on", f"{flags} --save {root / run}", **both)
            for run, flags in RUNS.items()
        ),
    )
    lab.add_stage(1, *cases)
    return lab.run()


def losses(results: dict[str, Any], name: str) -> list[float]:
    assert name in results, results["stderr"][-4000:]
    assert "error" not in results[name], results[name]["error"]
    values: list[float] = results[name]["loss"]
    return values


@pytest.mark.parametrize("run", RUNS)
def test_unchanged_run_continues_like_the_uninterrupted_one(
    run: str, results: dict[str, Any]
) -> None:
    assert losses(results, f"{run} resumed") == losses(results, f"{run} whole")[STEPS:]
    assert "\n" not in results[f"{run} resumed"]["report"]


@pytest.mark.parametrize("change", mark_slow(HYPERPARAMETERS))
def test_override_takes_the_hyperparameters_of_the_arguments(
    change: tuple[str, str, str], results: dict[str, Any]
) -> None:
    """The losses are those of a run that changes the values in memory."""
    name = case_id(change)
    taken = losses(results, f"{name} override")
    assert taken == pytest.approx(losses(results, f"{name} switched")[STEPS:], abs=1e-6)
    assert taken[1:] != losses(results, f"{change[1]} resumed")[1:]
    report = results[f"{name} override"]["report"]
    assert "(override_opt_param_scheduler): " in report and change[0] in report


@pytest.mark.parametrize("change", mark_slow(HYPERPARAMETERS))
def test_hyperparameters_of_the_checkpoint_are_kept_on_request(
    change: tuple[str, str, str], results: dict[str, Any]
) -> None:
    name = f"{case_id(change)} keep"
    assert losses(results, name) == losses(results, f"{change[1]} resumed")
    report = results[name]["report"]
    assert "(use_checkpoint_opt_param_scheduler): " in report and change[0] in report


def test_decoupled_rate_can_be_added(results: dict[str, Any]) -> None:
    taken = losses(results, "decoupled added")
    assert taken == pytest.approx(losses(results, "decoupled added switched")[STEPS:], abs=1e-6)
    assert taken[1] != losses(results, "adam resumed")[1]


@pytest.mark.parametrize("change", mark_slow(CHANGES))
def test_other_changes_are_taken_and_noted(
    change: tuple[str, str, str], results: dict[str, Any]
) -> None:
    argument, run, _ = change
    changed, unchanged = losses(results, case_id(change)), losses(results, f"{run} resumed")
    effect = resume_effects()[argument]
    takes_effect = effect in (Effect.TRAINING, Effect.DATA) and argument not in WITHOUT_EFFECT_HERE
    if takes_effect:
        assert changed != pytest.approx(unchanged, abs=1e-5)
    else:
        assert changed == pytest.approx(unchanged, abs=1e-4)
    report = results[case_id(change)]["report"]
    if effect is Effect.EXECUTION:
        assert "\n" not in report
    else:
        assert f"{argument} from " in report
    assert ("without effect on a resumed run" in report) == (effect is Effect.START)


@pytest.mark.parametrize("change", REFUSED, ids=case_id)
def test_incompatible_changes_are_refused_by_name(
    change: tuple[str, str, str], results: dict[str, Any]
) -> None:
    result = results[case_id(change)]
    assert result.get("kind") == "CheckpointError"
    assert change[0] in result["error"]
    assert "the checkpoint" in result["error"] and "hint: " in result["error"]


@pytest.mark.parametrize("change", EVALUATED, ids=case_id)
def test_evaluation_needs_neither_schedule_nor_optimizer(
    change: tuple[str, str], results: dict[str, Any]
) -> None:
    evaluated = losses(results, f"{case_id(change)} evaluated")
    assert evaluated == losses(results, f"{change[0]} evaluated")


NOT_TRIED = {
    "needs fp8 on a GPU": """first_last_layers_bf16 fp8 fp8_recipe fp8_wgrad
    num_layers_at_end_in_bf16 num_layers_at_start_in_bf16""",
    "needs many steps with overflows": "hysteresis loss_scale_window min_loss_scale",
    "needs files of conversations": """chat_template dpo dpo_beta dpo_label_smoothing dpo_loss sft
    sft_format sft_packing sft_too_long""",
    "needs another tokenizer": """merge_file special_tokens_file tokenizer_path tokenizer_type""",
    "is read like data_path": "train_data_path valid_data_path test_data_path mock_data",
    "chooses evaluation data": "multiple_validation_sets",
    "changes no number of these models": """apply_query_key_layer_scaling enable_autocast
    lora_dropout_position lora_out_init_method mid_level_dataset_surplus
    moe_enable_routing_replay perform_initialization reset_position_ids""",
    "needs a module of the user": "external_data",
    "needs Muon": """muon_extra_scale_factor muon_fp32_matmul_prec muon_num_ns_steps
    muon_split_qkv muon_tp_mode muon_use_nesterov""",
    "needs lean optimizer states": """exp_avg_dtype exp_avg_sq_dtype main_grads_dtype
    main_params_dtype""",
}
"""Arguments whose change a resumed run notes that are not tried here, by reason."""


def test_every_argument_that_changes_losses_is_tried() -> None:
    hyperparameters = {n for n, effect in resume_effects().items() if effect is Effect.SCHEDULE}
    assert {change[0] for change in HYPERPARAMETERS} == hyperparameters
    noted = {name for name, effect in resume_effects().items() if effect in RECORDED}
    untried = {name for names in NOT_TRIED.values() for name in names.split()}
    assert noted - {change[0] for change in CHANGES} == untried
