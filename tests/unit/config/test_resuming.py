"""What a run takes of a checkpoint, by what both say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import resolve
from flagscale.config.arguments.resuming import describe, parts_to_load
from flagscale.errors import CheckpointError

LLAMA = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3
--train-iters 6 --global-batch-size 4 --mock-data"""
MOE = LLAMA + " --num-experts 4"
MESHES = LLAMA + " --enable-hetero --hetero-process-meshes 2 1 1 1 1 1 1 1 1 1"
REPLICAS = "--enable-hetero --hetero-mode dp --hetero-micro-batch-sizes 1 1 1 3"


def values(argv: str, world: int) -> dict[str, Any]:
    return vars(resolve(parse_arguments(argv.split()), world))


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
def test_experts_have_their_own_part_of_the_optimizer(
    content: dict[str, Any], refused: bool
) -> None:
    if not refused:
        assert parts_to_load(content, values(MOE, 2), 2).optimizer
        return
    with pytest.raises(CheckpointError, match="kept experts and other weights together"):
        parts_to_load(content, values(MOE, 2), 2)
    # Without experts there is nothing to keep apart.
    assert parts_to_load(content, values(LLAMA, 2), 2).optimizer


@pytest.mark.parametrize(
    ("saved", "own", "refused"),
    [
        pytest.param({"family": "gpt"}, "gpt", False, id="same"),
        pytest.param({"family": "gpt"}, "bert", True, id="another"),
        pytest.param({"num_layers": 4}, "bert", True, id="before-there-were-two"),
        pytest.param({"num_layers": 4}, "gpt", False, id="older"),
        pytest.param({}, "bert", False, id="not-known"),
    ],
)
def test_weights_are_of_one_family(saved: dict[str, Any], own: str, refused: bool) -> None:
    content, ours = {"architecture": saved}, values(f"{LLAMA} --family {own}", 1)
    if not refused:
        assert parts_to_load(content, ours, 1).optimizer
        return
    with pytest.raises(CheckpointError, match="family: the checkpoint has 'gpt', the model 'bert'"):
        parts_to_load(content, ours, 1)


LORA = f"{LLAMA} --peft-type lora"


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        pytest.param(LORA, LORA, None, id="same"),
        pytest.param(LORA, f"{LORA} --lora-dropout 0.1", None, id="other-dropout"),
        pytest.param(LORA, LLAMA, "holds low-rank adapters alone", id="all-weights"),
        pytest.param(LLAMA, LORA, "holds a whole model, and this run trains", id="adapters"),
        pytest.param(LORA, f"{LORA} --lora-dim 8", "have rank 16, this run's 8", id="other-rank"),
        pytest.param(
            LORA,
            f"{LORA} --lora-target-modules linear_qkv",
            "have targets .*'linear_fc2'.*this run's .'linear_qkv'.",
            id="other-layers",
        ),
        pytest.param(
            f"{LORA} --lora-target-modules linear_qkv",
            f"{LORA} --lora-target-modules q_proj v_proj",
            "have targets .'linear_qkv'., this run's .'q_proj', 'v_proj'.",
            id="parts-of-a-layer",
        ),
    ],
)
def test_adapters_are_loaded_as_adapters(saved: str, own: str, message: str | None) -> None:
    content = {**describe(values(saved, 1), 1), "schedule": {}}
    if message is None:
        assert parts_to_load(content, values(own, 1), 1).optimizer
        return
    with pytest.raises(CheckpointError, match=message):
        parts_to_load(content, values(own, 1), 1)


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
def test_adapters_go_on_with_the_model_that_they_are_of(
    sample: dict[str, list[float]] | None, refused: bool
) -> None:
    base = {"pretrained_checkpoint": "/models/one", "base_sample": {"a.weight": [0.5, -1.0, 0.01]}}
    content = {**describe({**values(LORA, 1), **base}, 1), "schedule": {}}
    own = {**values(LORA, 1), "pretrained_checkpoint": "/models/other", "base_sample": sample}
    if not refused:
        assert parts_to_load(content, own, 1).optimizer
        return
    with pytest.raises(CheckpointError, match=r"another model than /models/other: a\.weight"):
        parts_to_load(content, own, 1)


MTP = f"{LLAMA} --position-embedding-type rope --mtp-num-layers"


@pytest.mark.parametrize(
    ("saved", "own", "said"),
    [
        pytest.param(f"{MTP} 1", f"{MTP} 1", None, id="same"),
        pytest.param(f"{MTP} 1", f"{MTP} 0 --finetune", "without its 1 layers", id="weights-alone"),
        pytest.param(f"{MTP} 1", f"{MTP} 0 --no-load-optim", "without its 1", id="no-optimizer"),
        pytest.param(f"{MTP} 1", f"{MTP} 0", "optimizer is of 1 layers", id="optimizer"),
        pytest.param(f"{MTP} 0", f"{MTP} 2 --finetune", "has 0 .*, this run 2", id="none"),
        pytest.param(f"{MTP} 2", f"{MTP} 1", "checkpoint has 2, the model 1", id="fewer"),
    ],
)
def test_layers_that_predict_further_are_taken_or_left(
    saved: str, own: str, said: str | None
) -> None:
    content, ours = {**describe(values(saved, 1), 1), "schedule": {}}, values(own, 1)
    if said is None or said.startswith("without"):
        notes = parts_to_load(content, ours, 1).notes
        assert notes[:1] == () if said is None else notes[0].startswith(said)
        return
    with pytest.raises(CheckpointError, match=said):
        parts_to_load(content, ours, 1)


def test_random_states_are_of_one_order_of_ranks() -> None:
    """Replicas that are pipelines are numbered one after another where they are unlike."""
    like = values(f"{LLAMA} --pipeline-model-parallel-size 2", 4)
    unlike = values(f"{LLAMA} --pipeline-model-parallel-size 2 {REPLICAS}", 4)
    assert parts_to_load({**describe(unlike, 4), "schedule": {}}, unlike, 4).rng
    assert not parts_to_load({**describe(like, 4), "schedule": {}}, unlike, 4).rng
    like, unlike = values(LLAMA, 2), values(f"{LLAMA} {REPLICAS}", 2)
    assert parts_to_load({**describe(like, 2), "schedule": {}}, unlike, 2).rng


def test_random_states_are_of_one_layout_of_meshes() -> None:
    own = values(MESHES, 3)
    saved = {**describe(own, 3), "schedule": {}}
    assert parts_to_load(saved, own, 3).rng
    assert not parts_to_load(saved, values(MESHES + " --hetero-pipeline-layer-split 3 1", 3), 3).rng
    assert not parts_to_load(saved, values(LLAMA, 3 + 1), 4).rng
