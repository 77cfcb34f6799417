"""Tests of calculated memory, FLOP and time, compared with each other."""

from __future__ import annotations

from argparse import Namespace

import pytest

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.rules.parallel_layout import layers_of_stages
from flagscale.config.arguments.spec.parser import parse_arguments
from flagscale.estimate import op_times
from flagscale.estimate.arithmetic import LayerKind
from flagscale.estimate.forecast import Forecast, forecast_step
from flagscale.estimate.op_times import DevicePeaks

LLAMA = """
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 --lr 1e-3
--train-iters 1 --mock-data --use-distributed-optimizer --vocab-size 128256 --seq-length 4096
"""
VOCABULARY = 128256
COMPILED, LOCAL = "--transformer-impl compiled", "--transformer-impl local"
WHOLE = "--num-layers 32 --global-batch-size 16"
TP2_PP2 = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"


def llama(more: str, world: int = 1) -> Namespace:
    return derive_arguments(parse_arguments(f"{LLAMA} {more}".split()), world)


def llama_forecast(more: str, world: int = 1) -> Forecast:
    return forecast_step(llama(more, world), VOCABULARY)


def test_context_parallelism_keeps_all_keys_and_values() -> None:
    long = f"{COMPILED} {WHOLE} --seq-length 65536 --context-parallel-size"
    kept = [llama_forecast(f"{long} {cp}", 8).stages[0].memory.activations for cp in (4, 8)]
    # Of 32 layers keys and values of 8 heads of 128 each; all else is shared out.
    whole = 32 * 65536 * 2 * 8 * 128 * 2
    assert kept[0] - whole == 2 * (kept[1] - whole)


@pytest.mark.parametrize(("ends", "eight"), [("", 32), ("--first-last-layers-bf16", 30)])
def test_fp8_copies_are_added_to_weights(ends: str, eight: int) -> None:
    plain, cast = (
        llama_forecast(f"{COMPILED} {WHOLE} {fp8}").stages[0].memory
        for fp8 in ("", f"--fp8 hybrid {ends}")
    )
    assert cast.weights - plain.weights == 2 * eight * (4096 * (2 * 4096 + 2048 + 3 * 14336))
    assert cast.activations < plain.activations


def test_adapters_alone_have_gradients_and_an_optimizer() -> None:
    lora = "--peft-type lora --lora-dim 8 --lora-target-modules linear_qkv linear_fc2"
    stages = llama_forecast(f"{WHOLE} {lora} {TP2_PP2}", 4).stages
    each = 8 * (4096 + 6144 // 2 + 4096 + 14336 // 2)
    assert stages[0].memory.gradients == 4 * 16 * each
    assert stages[0].memory.optimizer == 12 * 16 * each


def test_the_8b_model_has_8_billion_weights() -> None:
    (stage,) = llama_forecast(WHOLE).stages
    assert stage.memory.weights / 2 == 8_030_261_248
    assert stage.memory.gradients == 4 * 8_030_261_248
    assert stage.memory.optimizer == 12 * 8_030_261_248


def test_flops_of_stages_add_up() -> None:
    found = llama_forecast(f"{WHOLE} {TP2_PP2}", 4)
    done = sum(sum(stage.flops) * stage.ranks for stage in found.stages)
    assert done * found.micro_batches == pytest.approx(found.flops_per_step)


@pytest.mark.parametrize(
    ("less", "of"),
    [
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         "activations"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 20",
         "activations"),
        ("--transformer-impl compiled", "transient"),
        (TP2_PP2, "weights"),
        ("--context-parallel-size 2", "activations"),
    ],
)  # fmt: skip
def test_memory_savings(less: str, of: str) -> None:
    before = llama_forecast(f"{LOCAL} {WHOLE}", 4).stages[0].memory
    after = llama_forecast(f"{LOCAL} {WHOLE} {less}", 4).stages[0].memory
    assert getattr(after, of) < 0.6 * getattr(before, of)


def test_recomputing_all_keeps_the_inputs_of_layers() -> None:
    more = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4"
    memory = llama_forecast(f"{WHOLE} {more}").stages[0].memory
    assert memory.activations == 8 * 4096 * 4096 * 2


@pytest.mark.parametrize(
    ("gib", "expected"),
    [(20, None), (42, [8, 2, 0, 5]), (46, [6, 0, 0, 0]), (60, [0, 0, 0, 0])],
    ids=["too-little", "most", "first-stage", "enough"],
)
def test_as_few_layers_as_fit_are_recomputed(gib: int, expected: list[int] | None) -> None:
    pipeline = f"{WHOLE} --pipeline-model-parallel-size 4 --recompute-granularity"
    stages = forecast_step(llama(f"{pipeline} auto", 4), VOCABULARY, [gib * 2.0**30] * 4).stages

    def otherwise(index: int, count: int) -> float:
        block = f"full --recompute-method block --recompute-num-layers {count}" if count else ""
        way = f"{pipeline} {block}" if count else pipeline.rpartition(" ")[0]
        return llama_forecast(way, 4).stages[index].memory.total

    for index, stage in enumerate(stages):
        others = [otherwise(index, count) for count in range(9)]
        assert stage.memory.total == others[stage.recomputed_layers]
        if expected is None:
            assert stage.memory.total == min(others)
        else:
            assert stage.recomputed_layers == expected[index]
            assert (
                stage.memory.total
                <= gib * 2**30
                < min(others[: stage.recomputed_layers], default=1e18)
            )


@pytest.mark.parametrize(
    ("method", "factor"),
    [("uniform --recompute-num-layers 4", 1), ("block --recompute-num-layers 8", 1 / 4)],
)
def test_recomputing_takes_time(method: str, factor: float) -> None:
    plain = llama_forecast(WHOLE)
    found = llama_forecast(f"{WHOLE} --recompute-granularity full --recompute-method {method}")
    chip = DevicePeaks(1e15)
    layer = op_times.layer_load(llama(WHOLE), LayerKind(is_moe=False)).forward.duration(chip)
    more = found.simulate([chip]).seconds - plain.simulate([chip]).seconds
    assert more == pytest.approx(16 * factor * 32 * layer)


def test_a_device_waits_for_a_host_unless_steps_are_captured() -> None:
    tiny = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --seq-length 64"
    tiny += " --num-attention-heads 2 --num-query-groups 2 --global-batch-size 16"
    captured = "--cuda-graph-impl local --cuda-graph-scope full_iteration"
    slow, quick = (llama_forecast(f"{tiny} {more}") for more in ("", captured))
    assert (
        quick.simulate([DevicePeaks(1e15)]).seconds
        < 0.3 * slow.simulate([DevicePeaks(1e15)]).seconds
    )
    # A device ten times as quick is of no use where the host is slow.
    assert slow.simulate([DevicePeaks(1e16)]).seconds == slow.simulate([DevicePeaks(1e15)]).seconds
    assert quick.simulate([DevicePeaks(1e16)]).seconds < quick.simulate([DevicePeaks(1e15)]).seconds


def test_earlier_stages_hold_more_micro_batches() -> None:
    stages = llama_forecast(f"{WHOLE} --pipeline-model-parallel-size 4", 4).stages
    kept = [stage.memory.activations for stage in stages]
    assert kept == pytest.approx([kept[-1] * count for count in (4, 3, 2, 1)])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--pipeline-model-parallel-size 4", [(8,)] * 4),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
         [(8, 8), (8, 8)]),
        ("--pipeline-model-parallel-size 4 --num-layers-in-first-pipeline-stage 2",
         [(2,), (10,), (10,), (10,)]),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*20|t*12,L",
         [(20,), (12,)]),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|(t*10|)*2t*12L",
         [(0,), (10,), (10,), (12,)]),
        ("--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split", [(16,), (16,)]),
    ],
    ids=["even", "chunks", "first", "layout", "layout-with-groups", "ends-count"],
)  # fmt: skip
def test_layers_of_stages(options: str, expected: list[tuple[int, ...]]) -> None:
    assert layers_of_stages(vars(llama(f"{WHOLE} {options}", 4))) == expected


def test_stages_that_recompute_by_rows() -> None:
    pipeline = f"{WHOLE} --pipeline-model-parallel-size 4 --recompute-granularity full"
    full = f"{pipeline} --recompute-method uniform --recompute-num-layers 1"
    rows = "--recompute-granularity-per-stage-micro-batch 1,16,1 1,8,1,8,0 2,16,0"
    plain = llama_forecast(f"{WHOLE} --pipeline-model-parallel-size 4", 4).stages
    all_of_them = llama_forecast(full, 4).stages
    found = llama_forecast(f"{full} {rows}", 4).stages
    assert found[0].memory == all_of_them[0].memory
    assert [stage.memory for stage in found[1:]] == [stage.memory for stage in plain[1:]]
