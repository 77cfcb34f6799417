"""Parts of a checkpoint that a run loads, from the recorded and the current arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.rules.resuming import (
    _schedule_of,
    describe_arguments,
    parts_to_load,
)
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.errors import CheckpointError

LLAMA = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3
--train-iters 6 --global-batch-size 4 --mock-data"""
MOE = LLAMA + " --num-experts 4"
MESHES = LLAMA + " --enable-hetero --hetero-process-meshes 2 1 1 1 1 1 1 1 1 1"
REPLICAS = "--enable-hetero --hetero-mode dp --hetero-micro-batch-sizes 1 1 1 3"


def derive_values(argv: str, world: int) -> dict[str, Any]:
    return vars(derive_arguments(parse_arguments(argv.split()), world))


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ({"layout": {"expert": 1}}, True),
        ({"layout": {"expert": 2}}, False),
        ({"layout": {"expert": 1}, "experts_apart": True}, False),
        ({}, False),
    ],
    ids=["older", "older-apart", "apart", "of-megatron"],
)
def test_optimizer_state_of_experts_must_be_separate(
    content: dict[str, Any], refused: bool
) -> None:
    if not refused:
        assert parts_to_load(content, derive_values(MOE, 2), 2).optimizer
        return
    with pytest.raises(CheckpointError, match="not separate experts from other weights"):
        parts_to_load(content, derive_values(MOE, 2), 2)
    # Without experts the optimizer state has one part.
    assert parts_to_load(content, derive_values(LLAMA, 2), 2).optimizer


@pytest.mark.parametrize(
    ("saved", "family", "refused"),
    [
        pytest.param({"family": "gpt"}, "gpt", False, id="same"),
        pytest.param({"family": "gpt"}, "bert", True, id="another"),
        pytest.param({"num_layers": 4}, "bert", True, id="before-there-were-two"),
        pytest.param({"num_layers": 4}, "gpt", False, id="older"),
        pytest.param({}, "bert", False, id="not-known"),
    ],
)
def test_checkpoint_of_other_family_is_rejected(
    saved: dict[str, Any], family: str, refused: bool
) -> None:
    content, current = {"architecture": saved}, derive_values(f"{LLAMA} --family {family}", 1)
    if not refused:
        assert parts_to_load(content, current, 1).optimizer
        return
    with pytest.raises(CheckpointError, match="model:"):
        parts_to_load(content, current, 1)


LORA = f"{LLAMA} --peft-type lora"


@pytest.mark.parametrize(
    ("saved", "argv", "message"),
    [
        pytest.param(LORA, LORA, None, id="same"),
        pytest.param(LORA, f"{LORA} --lora-dropout 0.1", None, id="other-dropout"),
        pytest.param(LORA, LLAMA, "low-rank adapters only, but this", id="all-weights"),
        pytest.param(LLAMA, LORA, "whole model, but this run trains adapters", id="adapters"),
        pytest.param(
            LORA, f"{LORA} --lora-dim 8", "adapters have rank 16, this run 8", id="other-rank"
        ),
        pytest.param(
            LORA,
            f"{LORA} --lora-target-modules linear_qkv",
            r"'linear_fc1', 'linear_fc2'\], this run \['linear_qkv'\]",
            id="other-layers",
        ),
        pytest.param(
            f"{LORA} --lora-target-modules linear_qkv",
            f"{LORA} --lora-target-modules q_proj v_proj",
            r"adapters have targets \['linear_qkv'\], this run \['q_proj', 'v_proj'\]",
            id="parts-of-a-layer",
        ),
    ],
)
def test_adapters_need_matching_adapter_checkpoint(
    saved: str, argv: str, message: str | None
) -> None:
    content = {**describe_arguments(derive_values(saved, 1), 1), "schedule": {}}
    if message is None:
        assert parts_to_load(content, derive_values(argv, 1), 1).optimizer
        return
    with pytest.raises(CheckpointError, match=message):
        parts_to_load(content, derive_values(argv, 1), 1)


@pytest.mark.parametrize(
    ("sample", "refused"),
    [
        pytest.param({"a.weight": [0.5, -1.0, 0.01]}, False, id="same"),
        pytest.param({"a.weight": [0.502, -0.996, 0.0101]}, False, id="in-16-bits"),
        pytest.param({"a.weight": [0.5, -1.0, 0.1]}, True, id="other-numbers"),
        pytest.param({"b.weight": [0.5, -1.0, 0.01]}, True, id="other-layers"),
        pytest.param(None, False, id="not-known"),
    ],
)
def test_adapters_need_their_base_model(
    sample: dict[str, list[float]] | None, refused: bool
) -> None:
    base = {"pretrained_checkpoint": "/models/one", "base_sample": {"a.weight": [0.5, -1.0, 0.01]}}
    content = {**describe_arguments({**derive_values(LORA, 1), **base}, 1), "schedule": {}}
    current = {
        **derive_values(LORA, 1),
        "pretrained_checkpoint": "/models/other",
        "base_sample": sample,
    }
    if not refused:
        assert parts_to_load(content, current, 1).optimizer
        return
    with pytest.raises(CheckpointError, match=r"another base model than /models/other: a\.weight"):
        parts_to_load(content, current, 1)


MTP = f"{LLAMA} --position-embedding-type rope --mtp-num-layers"


@pytest.mark.parametrize(
    ("saved", "argv", "message"),
    [
        pytest.param(f"{MTP} 1", f"{MTP} 1", None, id="same"),
        pytest.param(
            f"{MTP} 1",
            f"{MTP} 0 --finetune",
            "without its 1 multi-token prediction layers",
            id="weights-alone",
        ),
        pytest.param(f"{MTP} 1", f"{MTP} 0 --no-load-optim", "without its 1", id="no-optimizer"),
        pytest.param(f"{MTP} 1", f"{MTP} 0", "1 multi-token prediction layers", id="optimizer"),
        pytest.param(f"{MTP} 0", f"{MTP} 2 --finetune", "has 0 .*, this run 2", id="none"),
        pytest.param(f"{MTP} 2", f"{MTP} 1", "the checkpoint has 2, the run 1", id="fewer"),
    ],
)
def test_mtp_layers_are_loaded_skipped_or_rejected(
    saved: str, argv: str, message: str | None
) -> None:
    content, current = (
        {**describe_arguments(derive_values(saved, 1), 1), "schedule": {}},
        derive_values(argv, 1),
    )
    if message is None or message.startswith("without"):
        notes = parts_to_load(content, current, 1).notes
        assert notes[:1] == () if message is None else notes[0].startswith(message)
        return
    with pytest.raises(CheckpointError, match=message):
        parts_to_load(content, current, 1)


def test_rng_states_need_same_rank_order() -> None:
    """Ranks of heterogeneous pipeline replicas are numbered replica by replica."""
    homogeneous = derive_values(f"{LLAMA} --pipeline-model-parallel-size 2", 4)
    heterogeneous = derive_values(f"{LLAMA} --pipeline-model-parallel-size 2 {REPLICAS}", 4)
    assert parts_to_load(
        {**describe_arguments(heterogeneous, 4), "schedule": {}}, heterogeneous, 4
    ).rng
    assert not parts_to_load(
        {**describe_arguments(homogeneous, 4), "schedule": {}}, heterogeneous, 4
    ).rng
    homogeneous, heterogeneous = derive_values(LLAMA, 2), derive_values(f"{LLAMA} {REPLICAS}", 2)
    assert parts_to_load(
        {**describe_arguments(homogeneous, 2), "schedule": {}}, heterogeneous, 2
    ).rng


def test_rng_states_need_same_meshes() -> None:
    current = derive_values(MESHES, 3)
    saved = {**describe_arguments(current, 3), "schedule": {}}
    assert parts_to_load(saved, current, 3).rng
    assert not parts_to_load(
        saved, derive_values(MESHES + " --hetero-pipeline-layer-split 3 1", 3), 3
    ).rng
    assert not parts_to_load(saved, derive_values(LLAMA, 3 + 1), 4).rng


def test_changed_schedule_is_rejected_with_hint_except_in_evaluation() -> None:
    saved = {**describe_arguments(derive_values(LLAMA, 1), 1), "schedule": {"lr_decay_steps": 12}}
    longer = f"{LLAMA} --train-iters 9"
    with pytest.raises(CheckpointError) as refused:
        parts_to_load(saved, derive_values(longer, 1), 1)
    assert "train.model.override_opt_param_scheduler: true" in str(refused.value.hint)
    parts = parts_to_load(saved, derive_values(f"{longer} --skip-train", 1), 1)
    assert not parts.optimizer
    assert parts.progress
    assert parts.notes == ("without optimizer and schedule (skip_train)",)


CONSTANT = f"{LLAMA} --lr-decay-style constant"


@pytest.mark.parametrize(
    ("saved", "argv"),
    [
        pytest.param(CONSTANT, f"{CONSTANT} --train-iters 9", id="length-of-constant-rates"),
        pytest.param(CONSTANT, f"{CONSTANT} --min-lr 1e-5", id="minimum-of-constant-rates"),
        pytest.param(LLAMA, f"{LLAMA} --lr-warmup-init 1e-4", id="start-without-warm-up"),
        pytest.param(LLAMA, f"{LLAMA} --lr-wsd-decay-style linear", id="final-phase-without-wsd"),
        pytest.param(LLAMA, f"{LLAMA} --sgd-momentum 0.1", id="momentum-of-adam"),
        pytest.param(
            f"{LLAMA} --lr-decay-iters 6",
            f"{LLAMA} --lr-decay-iters 6 --train-iters 9",
            id="length-without-schedule",
        ),
    ],
)
def test_hyperparameters_without_effect_are_not_compared(saved: str, argv: str) -> None:
    values = derive_values(saved, 1)
    content = {**describe_arguments(values, 1), "schedule": _schedule_of(values)}
    parts = parts_to_load(content, derive_values(argv, 1), 1)
    assert (parts.notes, parts.kept_schedule) == ((), {})


def test_decoupled_rate_of_the_checkpoint_cannot_be_kept_without_the_argument() -> None:
    """The weights of embedding and output layer have groups of their own only with it."""
    values = derive_values(f"{LLAMA} --decoupled-lr 1e-4", 1)
    content = {**describe_arguments(values, 1), "schedule": _schedule_of(values)}
    current = derive_values(f"{LLAMA} --use-checkpoint-opt-param-scheduler", 1)
    with pytest.raises(CheckpointError, match="cannot add it") as refused:
        parts_to_load(content, current, 1)
    assert refused.value.hint == "set decoupled_lr: 0.0001"


def test_manifest_survives_json() -> None:
    """A checkpoint's manifest is JSON, and an unchanged run must not differ from it."""
    values = derive_values(f"{LLAMA} --window-size 8 0 --attention-backend local", 1)
    content = {**describe_arguments(values, 1), "schedule": _schedule_of(values)}
    assert parts_to_load(json.loads(json.dumps(content)), values, 1).notes == ()
