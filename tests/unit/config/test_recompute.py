"""Recomputation per pipeline stage and micro-batch: parsing of rows, and rejected rows."""

from __future__ import annotations

import pytest
from support.arguments import train_arguments, values_by_yaml_name

from flagscale.config.arguments.derive import derive_arguments, rank_arguments
from flagscale.config.arguments.rules.recompute import (
    RecomputeChoice,
    RecomputePlan,
    recompute_plan,
)
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.config.arguments.spec.system_arguments import STAGE_LAYERS, STAGE_METHOD
from flagscale.errors import ConfigError

MODEL = """--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3
--train-iters 6 --mock-data --global-batch-size 4"""
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BLOCK = FULL.replace("uniform", "block")
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
GRANULARITY = "--recompute-granularity-per-stage-micro-batch"
METHOD = "--recompute-method-per-stage-micro-batch"
NUM_LAYERS = "--recompute-num-layers-per-stage-micro-batch"
MESHES = "--enable-hetero --hetero-process-meshes 2 1 1 1 1 1 1 1 2 1 --micro-batch-size 2"


def derive_plan(argv: list[str], world: int, rank: int = 0) -> RecomputePlan | None:
    args = rank_arguments(derive_arguments(parse_arguments(argv), world), rank)
    return recompute_plan(vars(args), args.num_microbatches)


UNIFORM_1, BLOCK_1 = RecomputeChoice("uniform", 1), RecomputeChoice("block", 1)
PLANS = {
    "alike": (FULL, 2, None),
    "granularity": (
        f"{PP2} {FULL} {GRANULARITY} 1,1,0,3,1 1,4,0",
        2,
        ((None, UNIFORM_1, UNIFORM_1, UNIFORM_1), (None,) * 4),
    ),
    "method": (
        f"{PP2} {FULL} {METHOD} 1,4,0 1,3,1,1,0",
        2,
        ((UNIFORM_1,) * 4, (BLOCK_1, BLOCK_1, BLOCK_1, UNIFORM_1)),
    ),
    "layers": (
        f"{PP2} {BLOCK} {NUM_LAYERS} 2,1,0,1,1,1,2,1,3",
        2,
        ((None, BLOCK_1, RecomputeChoice("block", 2), RecomputeChoice("block", 3)),) * 2,
    ),
    "off-is-off": (f"{PP2} {FULL} {GRANULARITY} 2,4,0 {NUM_LAYERS} 2,4,2", 2, ((None,) * 4,) * 2),
    "virtual-stages": (
        f"{VPP2} {FULL} {GRANULARITY} 3,4,1 1,4,0",
        2,
        ((UNIFORM_1,) * 4, (UNIFORM_1,) * 4, (UNIFORM_1,) * 4, (None,) * 4),
    ),
    "data-parallel": (f"{FULL} {GRANULARITY} 1,1,0,1,1", 2, ((None, UNIFORM_1),)),
    "meshes": (
        f"{MESHES} {FULL} {GRANULARITY} 1,2,1 1,2,0",
        4,
        ((UNIFORM_1, UNIFORM_1), (None, None)),
    ),
}


@pytest.mark.parametrize(("argv", "world", "expected"), PLANS.values(), ids=PLANS)
def test_plan_of_recomputation(argv: str, world: int, expected: RecomputePlan | None) -> None:
    assert derive_plan(f"{MODEL} {argv}".split(), world, rank=world - 1) == expected


REFUSED = {
    "no-row": (
        f"{FULL} {GRANULARITY} 1 4 1",
        1,
        "1] is not [stages, micro-batches, value, micro-batches",
    ),
    "a-pair-too-few": (f"{FULL} {GRANULARITY} 1,4", 1, "1,4] is not [stages, micro-batches"),
    "no-number": (f"{FULL} {NUM_LAYERS} 1,4,x", 1, "1,4,x] is not [stages, micro-batches"),
    "negative": (f"{FULL} {NUM_LAYERS} 1,4,-1", 1, "1,4,-1] is not [stages, micro-batches"),
    "no-stages": (
        f"{FULL} {GRANULARITY} 0,4,1 1,4,1",
        1,
        "number of stages or micro-batches below 1",
    ),
    "granularity": (
        f"{FULL} {GRANULARITY} 1,4,2",
        1,
        "value 2, expected 0 (keep) or 1 (recompute)",
    ),
    "method": (f"{FULL} {METHOD} 1,4,2", 1, "has the value 2, expected 0 (uniform) or 1 (block)"),
    "stages": (
        f"{FULL} {PP2} {GRANULARITY} 1,4,1",
        2,
        "expected rows for 2 stages, found rows for 1",
    ),
    "virtual-stages": (
        f"{FULL} {VPP2} {GRANULARITY} 2,4,1",
        2,
        "expected rows for 4 stages, found rows for 2",
    ),
    "meshes": (
        f"{FULL} {MESHES} {GRANULARITY} 1,2,1",
        4,
        "expected rows for 2 stages, found rows for 1",
    ),
    "micro-batches": (
        f"{FULL} {PP2} {GRANULARITY} 1,4,1 1,1,0,2,1",
        2,
        "row [1, 1, 0, 2, 1]: expected 4 micro-batches (a step), found 3",
    ),
    "micro-batches-of-meshes": (
        f"{FULL} {MESHES} {GRANULARITY} 2,4,1",
        4,
        "2, 4, 1]: expected 2 micro-batches",
    ),
    "nothing-to-refine": (
        f"{GRANULARITY} 1,4,1",
        1,
        "_per_stage_micro_batch: requires recompute_granularity: full, found none",
    ),
    "auto-layers": (
        "--recompute-granularity auto --recompute-num-layers 1",
        1,
        "recompute_num_layers: is chosen by recompute_granularity: auto",
    ),
    "auto-rows": (
        f"--recompute-granularity auto {GRANULARITY} 1,4,1",
        1,
        "recompute_granularity: full, found auto",
    ),
    "auto-of-chosen-layers": (
        f"{MESHES} --recompute-granularity auto --hetero-pipeline-layer-split auto",
        4,
        "auto requires the number of layers of each stage",
    ),
    "auto-of-chosen-meshes": (
        "--enable-hetero --hetero-process-meshes auto --recompute-granularity auto",
        4,
        "recompute_granularity: auto requires a known number of stages",
    ),
    "selective": (
        f"--recompute-granularity selective {GRANULARITY} 1,4,1",
        1,
        "recompute_granularity: full, found selective",
    ),
    "offloaded-stage": (
        f"{PP2} --cpu-offloading-num-layers 4",
        2,
        "cpu_offloading_num_layers: 4 layers of each pipeline stage (or virtual stage) must be "
        "fewer than its 4 layers",
    ),
    "full-how": ("--recompute-granularity full", 1, "recompute_method: is required by"),
    "full-what": (
        "--recompute-granularity full --recompute-method block",
        1,
        "recompute_num_layers: is required by",
    ),
    "units": (f"{PP2} {FULL[:-1]}3", 2, "0: 4 layers are not divisible by 3; recompute_method"),
    "units-of-a-row": (
        f"{PP2} {FULL} {NUM_LAYERS} 1,4,4 1,2,1,2,3",
        2,
        "1: 4 layers are not divisible by 3; recompute_method",
    ),
    "units-of-an-uneven-stage": (
        f"{PP2} {FULL[:-1]}2 --num-layers-in-first-pipeline-stage 3",
        2,
        "0: 3 layers are not divisible by",
    ),
    "units-of-a-virtual-stage": (
        f"{VPP2} {FULL} {NUM_LAYERS} 3,4,1 1,4,2 --num-layers 4",
        2,
        "1 layers are not divisible by 2; recompute_method",
    ),
    "units-of-meshes": (
        f"{MESHES} {FULL[:-1]}3 --hetero-pipeline-layer-split 6 2",
        4,
        "1: 2 layers are not divisible by",
    ),
    "replicas": (
        f"{FULL} --enable-hetero --hetero-mode dp --hetero-micro-batch-sizes 1 1 1 3 "
        f"{GRANULARITY} 1,1,1",
        2,
        "replicas have different numbers of micro-batches",
    ),
}


@pytest.mark.parametrize(("argv", "world", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_rows_are_rejected(argv: str, world: int, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        derive_plan(f"{MODEL} {argv}".split(), world)
    assert message in str(raised.value)


def test_block_method_accepts_any_number_of_layers() -> None:
    assert derive_plan(f"{MODEL} {PP2} {BLOCK[:-1]}3".split(), 2) is None


def test_rows_can_be_lists_of_lists() -> None:
    section = {"recompute": {STAGE_METHOD: [[1, 4, 0], [1, 3, 1, 1, 0]], STAGE_LAYERS: ["1, 4, 2"]}}
    words = {STAGE_METHOD: ["1,4,0", "1,3,1,1,0"], STAGE_LAYERS: ["1, 4, 2"]}
    assert values_by_yaml_name(train_arguments(system=section)) == words


def test_rows_in_flagscale_command_line_syntax() -> None:
    argv = [*f"{MODEL} {PP2} {FULL} {NUM_LAYERS}".split(), "[1, 4, 2]", "1, 2, 1, 2, 4"]
    two, four = RecomputeChoice("uniform", 2), RecomputeChoice("uniform", 4)
    assert derive_plan(argv, 2) == ((two,) * 4, (UNIFORM_1, UNIFORM_1, four, four))
