"""Memory by calculation, beside what runs on H200s took (docs/results)."""

from __future__ import annotations

from argparse import Namespace

import pytest

from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.pipeline import layers_of_stages
from flagscale.config.arguments.resolve import resolve
from flagscale.estimate.forecast import Forecast, forecast

LLAMA = """
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 --lr 1e-3
--train-iters 1 --mock-data --use-distributed-optimizer --vocab-size 128256 --seq-length 4096
"""
VOCABULARY = 128256
COMPILED, LOCAL = "--transformer-impl compiled", "--transformer-impl local"
EIGHT, WHOLE = "--num-layers 8 --global-batch-size 16", "--num-layers 32 --global-batch-size 16"
TP2_PP2 = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"


def llama(more: str, world: int = 1) -> Namespace:
    return resolve(parse_arguments(f"{LLAMA} {more}".split()), world)


def llama_forecast(more: str, world: int = 1) -> Forecast:
    return forecast(llama(more, world), VOCABULARY)


def most_gib(more: str, world: int = 1) -> float:
    return max(stage.memory.all for stage in llama_forecast(more, world).stages) / 2**30


@pytest.mark.parametrize(
    ("more", "world", "measured"),
    [
        pytest.param(f"{COMPILED} {EIGHT} --micro-batch-size 2", 1, 59.21, id="compiled"),
        pytest.param(f"{COMPILED} {EIGHT} --seq-length 8192", 1, 59.21, id="compiled-8k"),
        pytest.param(f"{LOCAL} {EIGHT}", 1, 54.5, id="local"),
        pytest.param(f"{LOCAL} {EIGHT} --micro-batch-size 2", 1, 62.1, id="local-2"),
        pytest.param(f"{LOCAL} {WHOLE} --micro-batch-size 2", 4, 110.0, id="dp4-2"),
        pytest.param(f"{LOCAL} {WHOLE}", 4, 90.7, id="dp4"),
        pytest.param(f"{LOCAL} {WHOLE} {TP2_PP2}", 4, 43.2, id="tp2-pp2"),
    ],
)
def test_as_measured(more: str, world: int, measured: float) -> None:
    assert most_gib(more, world) == pytest.approx(measured, rel=0.05)


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


def test_every_operation_is_somebodys() -> None:
    found = llama_forecast(f"{WHOLE} {TP2_PP2}", 4)
    done = sum(sum(stage.work) * stage.ranks for stage in found.stages)
    assert done * found.micro_batches == pytest.approx(found.work)


@pytest.mark.parametrize(
    ("less", "of"),
    [
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         "activations"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 20",
         "activations"),
        ("--transformer-impl compiled", "moment"),
        (TP2_PP2, "weights"),
        ("--context-parallel-size 2", "activations"),
    ],
)  # fmt: skip
def test_what_takes_less(less: str, of: str) -> None:
    before = llama_forecast(f"{LOCAL} {WHOLE}", 4).stages[0].memory
    after = llama_forecast(f"{LOCAL} {WHOLE} {less}", 4).stages[0].memory
    assert getattr(after, of) < 0.6 * getattr(before, of)


def test_recomputing_all_keeps_the_inputs_of_layers() -> None:
    more = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4"
    memory = llama_forecast(f"{WHOLE} {more}").stages[0].memory
    assert memory.activations == 8 * 4096 * 4096 * 2


@pytest.mark.parametrize(
    ("gib", "expected"),
    [(20, None), (42, [7, 1, 0, 5]), (46, [5, 0, 0, 0]), (60, [0, 0, 0, 0])],
    ids=["too-little", "most", "first-stage", "enough"],
)
def test_as_few_layers_as_fit_are_recomputed(gib: int, expected: list[int] | None) -> None:
    pipeline = f"{WHOLE} --pipeline-model-parallel-size 4 --recompute-granularity"
    stages = forecast(llama(f"{pipeline} auto", 4), VOCABULARY, [gib * 2.0**30] * 4).stages

    def otherwise(index: int, count: int) -> float:
        block = f"full --recompute-method block --recompute-num-layers {count}" if count else ""
        way = f"{pipeline} {block}" if count else pipeline.rpartition(" ")[0]
        return llama_forecast(way, 4).stages[index].memory.all

    for index, stage in enumerate(stages):
        others = [otherwise(index, count) for count in range(9)]
        assert stage.memory.all == others[stage.recomputed]
        if expected is None:
            assert stage.memory.all == min(others)
        else:
            assert stage.recomputed == expected[index]
            assert stage.memory.all <= gib * 2**30 < min(others[: stage.recomputed], default=1e18)


@pytest.mark.parametrize(
    ("method", "factor"),
    [("uniform --recompute-num-layers 4", 1 / 3), ("block --recompute-num-layers 8", 1 / 12)],
)
def test_recomputing_takes_time(method: str, factor: float) -> None:
    plain = llama_forecast(WHOLE)
    found = llama_forecast(f"{WHOLE} --recompute-granularity full --recompute-method {method}")
    layers = plain.stages[0].work[0] - 3 * 2 * 4096 * VOCABULARY * 4096
    more = found.seconds(lambda _: 1e15) - plain.seconds(lambda _: 1e15)
    assert more == pytest.approx(16 * factor * layers / 1e15)


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
