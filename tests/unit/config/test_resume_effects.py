"""Effect of every argument on a resumed run: refused, noted, or a change of execution only.

Each argument is changed in runs of several kinds, because many have an effect only with another
argument. The strongest reaction to the change must be that of the argument's :class:`Effect`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from flagscale.config.arguments.check import check_values, note_substitutions
from flagscale.config.arguments.compat.unused import note_unused
from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.layout import pad_vocabulary
from flagscale.config.arguments.rules.resume_effects import (
    FUNCTION,
    WEIGHTS_KEPT,
    Effect,
    resume_effects,
)
from flagscale.config.arguments.rules.resuming import (
    _schedule_of,
    describe_arguments,
    parts_to_load,
)
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.config.arguments.spec.registry import arguments
from flagscale.errors import CheckpointError, ConfigError

GPT = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2
--seq-length 32 --lr 1e-3 --min-lr 1e-5 --train-iters 100 --global-batch-size 4 --mock-data
--vocab-size 500 --lr-decay-style cosine --device cpu"""
ROPE = f"{GPT} --position-embedding-type rope --normalization RMSNorm"
MOE = f"""{ROPE} --num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 32
--swiglu --disable-bias-linear"""
RUNS = {
    "gpt": GPT,
    "rope": ROPE,
    "llama": f"{ROPE} --swiglu --multiple-of 8 --disable-bias-linear --use-rope-scaling",
    "window": f"{ROPE} --window-size 8 0 --attention-backend local",
    "moe": MOE,
    "mla": f"{ROPE} --multi-latent-attention --rope-type yarn",
    "mtp": f"{ROPE} --mtp-num-layers 1",
    "lora": f"{ROPE} --peft-type lora",
    "moe-groups": f"{MOE} --moe-router-num-groups 2 --moe-router-group-topk 2",
    "moe-sigmoid": f"{MOE} --moe-router-score-function sigmoid",
    "moe-capacity": f"{MOE} --moe-expert-capacity-factor 2",
    "warmup": f"{GPT} --lr-warmup-iters 8",
    "fraction": f"{GPT} --lr-warmup-fraction 0.2",
    "wsd": f"{GPT.replace('cosine', 'WSD')} --lr-wsd-decay-iters 8",
    "wsd-samples": f"{GPT.replace('cosine', 'WSD')} --lr-wsd-decay-samples 32",
    "samples": GPT.replace("--train-iters 100", "--train-samples 400"),
    "decay": f"{GPT} --start-weight-decay 0.01 --end-weight-decay 0.1 "
    "--weight-decay-incr-style linear",
    "decoupled": f"{GPT} --decoupled-lr 1e-4",
    "sgd": f"{GPT} --optimizer sgd",
    "muon": f"{GPT} --optimizer muon",
    "lion": f"{GPT} --optimizer lion",
    "fp16": f"{GPT} --fp16",
    "bf16": f"{GPT} --bf16",
    "lean": f"{GPT} --bf16 --use-distributed-optimizer --use-precision-aware-optimizer",
    "fp8": f"{ROPE} --bf16 --fp8 e4m3 --num-layers 16 --hidden-size 512",
    "bert": GPT + " --family bert",
    "cyclic": GPT + " --dataloader-type cyclic",
    "sft": GPT.replace("--mock-data", "--data-path chats.jsonl")
    + " --sft --tokenizer-type HuggingFaceTokenizer --tokenizer-path t --chat-template chatml",
    "dpo": GPT.replace("--mock-data", "--data-path pairs.jsonl --pretrained-checkpoint m")
    + " --dpo --tokenizer-type HuggingFaceTokenizer --tokenizer-path t --chat-template chatml",
    "files": GPT.replace("--mock-data", "--data-path web")
    + " --tokenizer-type HuggingFaceTokenizer --tokenizer-path t --split 90,5,5",
    "two-files": GPT.replace("--mock-data", "--train-data-path web --valid-data-path v")
    + " --tokenizer-type NullTokenizer --test-data-path t",
    "aquila": GPT.replace("--mock-data", "--data-path web")
    + " --tokenizer-type AquilaTokenizerFS --tokenizer-path v.json --merge-file m.txt"
    " --special-tokens-file s.txt",
    "external": GPT.replace("--mock-data", "--dataloader-type external --external-data a.b:c"),
    "rampup": GPT.replace("--train-iters 100", "--train-samples 400 --rampup-batch-size 2 2 16"),
}
"""Command lines by name. Together they give almost every argument an effect."""
VALUES: dict[str, list[Any]] = {
    "window_size": [[4, 0]],
    "window_attn_skip_freq": [2],
    "no_rope_freq": [2],
    "num_attention_heads": [8],
    "num_query_groups": [4],
    "moe_layer_freq": [2],
    "moe_router_num_groups": [4],
    "moe_router_group_topk": [1],
    "lora_target_modules": [["linear_qkv"]],
    "data_path": [["0.3", "web", "0.7", "code"], ["other"]],
    "data_phases": [["samples=40 other"]],
    "rampup_batch_size": [[2, 2, 16], [2, 2, 24]],
    "iterations_to_skip": [[60]],
    "lr_decay_iters": [50],
    "lr_decay_samples": [200],
    "lr_warmup_fraction": [0.1],
    "train_iters": [200],
    "train_samples": [800],
    "min_lr": [1e-4],
    "tokenizer_type": ["ByteLevelTokenizer"],
    "split": ["80,10,10"],
    "norm_init_weight": [0.5],
    "optimizer": ["sgd"],
    "sgd_momentum": [0.5],
    "adam_beta1": [0.8],
    "adam_beta2": [0.9],
    "moe_expert_capacity_factor": [2.0],
    "mask_prob": [0.3],
    "rotary_percent": [0.5],
    "moe_router_dtype": ["fp32"],
    "loss_scale": [1024.0],
    "multiple_of": [48],
    "hidden_dim_multiplier": [1.5],
    "make_vocab_size_divisible_by": [1000],
    "family": ["bert"],
    "external_data": ["a.b:d"],
    "seq_length": [16],
    "attn_logit_softcapping": [50.0],
    "chat_template": ["llama3"],
    "freeze_parameters": [["embedding"]],
    "trainable_parameters": [["decoder"]],
    "lora_dropout": [0.5],
    "lora_dim": [8],
    "multiple_validation_sets": [True],
    "fp8": ["hybrid"],
    "fp8_recipe": ["rowwise", "blockwise"],
    "qk_pos_emb_head_dim": [32],
    "recompute_granularity": ["full"],
    "offload_modules": [["core_attn"]],
    "moe_ffn_hidden_size": [32],
    "moe_aux_loss_coeff": [0.01],
    "num_moe_experts": [8],
    "activation_func_clamp_value": [7.0],
    "moe_router_topk_scaling_factor": [2.5],
    "max_position_embeddings": [64],
    "lr_warmup_init": [1e-4],
    "start_weight_decay": [0.05],
    "end_weight_decay": [0.2],
    "weight_decay_incr_style": ["cosine"],
    "dpo_beta": [0.5],
    "dpo_label_smoothing": [0.1],
}
"""Values to try where the general rule (:func:`candidates`) finds none that is valid."""
NAMED_DIFFERENTLY = {
    "multiple_of": "ffn_hidden_size",
    "hidden_dim_multiplier": "ffn_hidden_size",
    "data_parallel_sharding_strategy": "use_distributed_optimizer",
}
"""Names in messages of arguments that only determine another argument."""
ONLY_IN = {"seq_length": "rope", "global_batch_size": "samples"}
"""The run in which an argument is changed. In others it determines arguments that are refused."""
CHANGED_WITH: dict[str, dict[str, Any]] = {
    "sft": {"data_path": ["web"], "chat_template": None},
    "dpo": {"data_path": ["web"], "chat_template": None},
    "cpu_offloading": {"cpu_offloading_num_layers": 1},
    "fine_grained_activation_offloading": {"offload_modules": ["core_attn"]},
    "offload_modules": {"fine_grained_activation_offloading": True},
}
"""Further changes without which a value is not valid."""
NOTED = ("finetune", "no_load_optim", "skip_train")
"""Arguments that choose parts of a checkpoint: they do not influence a resumed run otherwise."""
REACTIONS = {
    Effect.MODEL: "refused",
    Effect.ADAPTERS: "refused",
    Effect.OPTIMIZER: "refused",
    Effect.SCHEDULE: "refused",
    Effect.STATES: "noted",
    Effect.TRAINING: "noted",
    Effect.DATA: "noted",
    Effect.START: "noted",
    Effect.EXECUTION: "silent",
}
ORDER = ("in no run", "silent", "noted", "refused")
"""Reactions to a changed argument, in order of strength."""
WORLD_SIZE = 1


def candidates(argument: Argument) -> Iterator[Any]:
    """Yield other values than the default."""
    default = argument.default
    if argument.name in VALUES:
        yield from VALUES[argument.name]
    elif argument.choices:
        for choice in argument.choices:
            if choice != default:
                yield [choice] if argument.many else choice
    elif argument.kind == "bool":
        yield from (not default, default)
    elif argument.kind == "str":
        yield ["another"] if argument.many else "another"
    else:
        typed = int if argument.kind == "int" else float
        for value in (2, 4, 8, 0.5, 3 if argument.many else (default or 0) + 1):
            if typed(value) > 0:
                yield [typed(value)] if argument.many else typed(value)


@cache
def parsed_run(run: str) -> argparse.Namespace:
    return parse_arguments(RUNS[run].split())


def changed(run: str, name: str, value: Any) -> argparse.Namespace:
    args = copy.copy(parsed_run(run))
    vars(args).update({name: value, **CHANGED_WITH.get(name, {})})
    return args


def vocabulary_of(values: dict[str, Any]) -> list[int]:
    size = pad_vocabulary(values["vocab_size"], values)
    return [size - values["make_vocab_size_divisible_by"] + 1, size]


@cache
def manifest_of(run: str) -> dict[str, Any]:
    """Return the manifest of a checkpoint of a run, as a rank writes it."""
    values = vars(derive_arguments(parsed_run(run), WORLD_SIZE))
    return {
        **describe_arguments(values, WORLD_SIZE),
        "vocabulary": vocabulary_of(values),
        "optimizer": values["optimizer"],
        "schedule": _schedule_of(values),
    }


def reaction(run: str, name: str, value: Any) -> tuple[str, str]:
    """Return the reaction of a resumed run to a changed argument, and the message."""
    args = changed(run, name, value)
    if getattr(parsed_run(run), name) == value:
        return "in no run", "the same value"
    violations = check_values(vars(args))
    unused = [n for names, _ in note_unused(vars(args), [name]) for n in names]
    replaced = [n for n, _ in note_substitutions(vars(args))]
    if violations or name in unused or name in replaced:
        return "in no run", f"{violations or ''}{unused or ''}{replaced or ''}"
    try:
        values = vars(derive_arguments(args, WORLD_SIZE))
    except ConfigError as error:
        return "in no run", str(error)
    try:
        parts = parts_to_load(manifest_of(run), values, WORLD_SIZE, vocabulary_of(values))
    except CheckpointError as error:
        return "refused", str(error)
    text = "; ".join(parts.notes)
    return ("noted" if name in text else "silent"), text


@cache
def strongest_reaction(name: str) -> tuple[str, str, str]:
    """Return the strongest reaction to a changed argument in any run, its message, and the run."""
    strongest = (ORDER[0], "", "")
    for run in (ONLY_IN[name],) if name in ONLY_IN else RUNS:
        for value in candidates(arguments()[name]):
            current = (*reaction(run, name, value), run)
            strongest = max(strongest, current, key=lambda item: ORDER.index(item[0]))
            if strongest[0] == ORDER[-1]:
                return strongest
    return strongest


@pytest.mark.parametrize("name", arguments())
def test_changed_argument_is_refused_noted_or_changes_execution_only(name: str) -> None:
    effect = resume_effects().get(name)
    kind, message, run = strongest_reaction(name)
    if effect is None:
        # No run takes another value: it is refused, or noted as unused at every start.
        assert kind == "in no run", f"{name} has no effect on a resumed run: {message} ({run})"
        return
    if name in NOTED:
        assert kind == "noted" and name in message
        return
    if effect is Effect.EXECUTION:
        assert kind in ("silent", "in no run"), f"{message} ({run})"
        return
    assert kind == REACTIONS[effect], f"{message} ({run})"
    assert NAMED_DIFFERENTLY.get(name, name) in message


def test_every_argument_of_the_function_is_compared() -> None:
    assert set(WEIGHTS_KEPT) < set(FUNCTION)
    assert {name for name in FUNCTION if resume_effects()[name] is not Effect.MODEL} == set()


@pytest.mark.parametrize("name", WEIGHTS_KEPT)
def test_finetune_notes_another_function_of_the_same_weights(name: str) -> None:
    _, _, run = strongest_reaction(name)
    parts = None
    for value in candidates(arguments()[name]):
        if reaction(run, name, value)[0] == "refused":
            args = changed(run, name, value)
            args.finetune = True
            values = vars(derive_arguments(args, WORLD_SIZE))
            parts = parts_to_load(manifest_of(run), values, WORLD_SIZE, vocabulary_of(values))
    assert parts is not None
    assert f"its weights with another function: {name} from " in parts.notes[0]


@pytest.mark.parametrize("choice", ["override", "use_checkpoint"])
@pytest.mark.parametrize(
    "name", [name for name, effect in resume_effects().items() if effect is Effect.SCHEDULE]
)
def test_each_hyperparameter_is_taken_or_kept_by_choice(name: str, choice: str) -> None:
    _, _, run = strongest_reaction(name)
    for value in candidates(arguments()[name]):
        if reaction(run, name, value)[0] == "refused":
            break
    args = changed(run, name, value)
    setattr(args, f"{choice}_opt_param_scheduler", True)
    values = vars(derive_arguments(args, WORLD_SIZE))
    parts = parts_to_load(manifest_of(run), values, WORLD_SIZE, vocabulary_of(values))
    saved = manifest_of(run)["schedule"]
    current = _schedule_of(values)
    changed_keys = {key for key in saved if saved[key] != current[key]}
    assert changed_keys
    assert f"({choice}_opt_param_scheduler): " in parts.notes[0]
    assert name in parts.notes[0]
    if choice == "override":
        assert parts.kept_schedule == {}
    else:
        assert parts.kept_schedule.items() <= saved.items()
        assert parts.kept_schedule.keys() <= changed_keys
