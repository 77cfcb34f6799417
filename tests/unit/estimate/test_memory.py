"""Tests of calculated memory, FLOP and time, compared with each other."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import astuple

import pytest

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.rules.parallel_layout import layers_of_stages
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.estimate import op_times
from flagscale.estimate.arithmetic import LayerKind
from flagscale.estimate.forecast import Forecast, forecast_step
from flagscale.estimate.memory import count_model_weights
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


def llama_arguments(more: str, world: int = 1) -> Namespace:
    return derive_arguments(parse_arguments(f"{LLAMA} {more}".split()), world)


def forecast_llama(more: str, world: int = 1) -> Forecast:
    return forecast_step(llama_arguments(more, world), VOCABULARY)


def test_context_parallelism_divides_activations_and_gathers_keys_within_a_layer() -> None:
    long = f"{COMPILED} {WHOLE} --seq-length 65536 --context-parallel-size"
    stages = [forecast_llama(f"{long} {cp}", 8).stages[0].memory for cp in ("4", "8")]
    assert stages[0].activations == 2 * stages[1].activations
    gathered = forecast_llama(f"{long} 8 --cp-comm-type all_gather", 8).stages[0].memory
    assert gathered.activations == stages[1].activations
    # The head's backward pass hides a part of what a layer gathers.
    kv_bytes = 65536 * 2 * 8 * 128 * 2
    assert 0 <= gathered.transient - stages[1].transient <= 2 * kv_bytes
    ring = forecast_llama(f"{long} 8 --cp-comm-type p2p", 8).stages[0].memory
    assert ring.activations == gathered.activations
    assert stages[1].transient <= ring.transient <= gathered.transient


@pytest.mark.parametrize(("ends", "eight"), [("", 32), ("--first-last-layers-bf16", 30)])
def test_fp8_copies_are_added_to_weights(ends: str, eight: int) -> None:
    bf16_stages, fp8_stages = (
        forecast_llama(f"{COMPILED} {WHOLE} {fp8}").stages[0].memory
        for fp8 in ("", f"--fp8 hybrid {ends}")
    )
    assert fp8_stages.weights - bf16_stages.weights == 2 * eight * (
        4096 * (2 * 4096 + 2048 + 3 * 14336)
    )
    assert fp8_stages.activations < bf16_stages.activations


@pytest.mark.parametrize(
    ("recipe", "bytes_per_weight", "layers"),
    [("tensorwise", 1 / 4, 32), ("rowwise", 2, 1)],
    ids=["shard-of-values", "copies-of-the-layer-that-arrives"],
)
def test_fp8_copies_of_sharded_weights_are_not_kept(
    recipe: str, bytes_per_weight: float, layers: int
) -> None:
    sharded = f"{COMPILED} {WHOLE} --data-parallel-sharding-strategy optim_grads_params"
    bf16_stage, fp8_stage = (
        forecast_llama(f"{sharded} {fp8}", 4).stages[0].memory
        for fp8 in ("", f"--fp8 e4m3 --fp8-recipe {recipe}")
    )
    assert fp8_stage.weights - bf16_stage.weights == bytes_per_weight * layers * (
        4096 * (2 * 4096 + 2048 + 3 * 14336)
    )


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_instances_keep_as_much_as_fewer_ranks(strategy: str) -> None:
    options = f"{WHOLE} --data-parallel-sharding-strategy {strategy}"
    hybrid_options = f"{options} --num-distributed-optimizer-instances 2"
    memory, expected, most_sharded = (
        forecast_llama(more, world).stages[0].memory
        for more, world in ((hybrid_options, 16), (options, 8), (options, 16))
    )
    for field in ("weights", "gradients", "optimizer"):
        assert getattr(memory, field) == getattr(expected, field), field
    assert memory.optimizer > most_sharded.optimizer


def test_adapters_alone_have_gradients_and_an_optimizer() -> None:
    lora = "--peft-type lora --lora-dim 8 --lora-target-modules linear_qkv linear_fc2"
    stages = forecast_llama(f"{WHOLE} {lora} {TP2_PP2}", 4).stages
    weights_per_layer = 8 * (4096 + 6144 // 2 + 4096 + 14336 // 2)
    assert stages[0].memory.gradients == 4 * 16 * weights_per_layer
    assert stages[0].memory.optimizer == 12 * 16 * weights_per_layer


def test_the_8b_model_has_8_billion_weights() -> None:
    (stage,) = forecast_llama(WHOLE).stages
    assert stage.memory.weights / 2 == 8_030_261_248
    assert stage.memory.gradients == 4 * 8_030_261_248
    assert stage.memory.optimizer == 12 * 8_030_261_248


AWARE = "--use-precision-aware-optimizer"
FP8_MOMENTS = f"{AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
SCALE = 1 / 128


@pytest.mark.parametrize(
    ("options", "gradients", "device", "host"),
    [
        (AWARE, 4, 10, 0),
        (f"{AWARE} --no-store-param-remainders", 4, 12, 0),
        (f"{AWARE} --main-grads-dtype bf16 --main-params-dtype bf16", 2, 8, 0),
        (f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16", 4, 6 + SCALE, 0),
        (f"{FP8_MOMENTS} --main-params-dtype bf16", 4, 2 + 2 * SCALE, 0),
        ("--optimizer-cpu-offload", 4, 0, 12),
        (f"{FP8_MOMENTS} --optimizer-cpu-offload", 4, 0, 4 + 2 * SCALE),
        (f"{FP8_MOMENTS} --optimizer-cpu-offload --optimizer-offload-fraction 0.5", 4,
         2 + SCALE, 2 + SCALE),
    ],
)  # fmt: skip
def test_states_take_the_bytes_of_their_formats(
    options: str, gradients: float, device: float, host: float
) -> None:
    memory = forecast_llama(f"{WHOLE} {options}").stages[0].memory
    per_weight = (memory.gradients, memory.optimizer, memory.host)
    assert [value / 8_030_261_248 for value in per_weight] == pytest.approx(
        [gradients, device, host]
    )


def test_copies_of_the_embedding_keep_fp32_moments() -> None:
    tied = LLAMA.replace("--untie-embeddings-and-output-weights", "")
    arguments = f"{tied} {WHOLE} --pipeline-model-parallel-size 2 {FP8_MOMENTS}"
    stages = forecast_step(derive_arguments(parse_arguments(arguments.split()), 2), VOCABULARY)
    embedding = 128256 * 4096
    for stage in stages.stages:
        lean_bytes = (stage.weights - embedding) * (4 + 2 * SCALE)
        assert stage.memory.optimizer == pytest.approx(lean_bytes + embedding * 10)


def test_lean_states_take_less_time() -> None:
    device = [DevicePeaks(989e12, 3.35e12)]
    seconds = [
        forecast_llama(f"{COMPILED} {WHOLE} {options}").simulate(device).seconds
        for options in ("", AWARE, FP8_MOMENTS)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_pairs_are_two_sequences_a_sample() -> None:
    data = "--dpo --data-path pairs.jsonl --pretrained-checkpoint m --tokenizer-type"
    options = f"{LLAMA} {COMPILED} {WHOLE} {data} HuggingFaceTokenizer --tokenizer-path m"
    parsed = parse_arguments(options.replace("--mock-data", "").split())
    pairs = forecast_step(derive_arguments(parsed, 1), VOCABULARY)
    sequences = forecast_llama(f"{COMPILED} {WHOLE}")
    twice = forecast_llama(f"{COMPILED} {WHOLE} --micro-batch-size 2")
    assert pairs.stages[0].memory == twice.stages[0].memory
    assert pairs.flops_per_step == 2 * sequences.flops_per_step
    assert pairs.micro_batches == sequences.micro_batches


def test_flops_of_stages_add_up() -> None:
    forecast = forecast_llama(f"{WHOLE} {TP2_PP2}", 4)
    stage_flops = sum(sum(stage.flops) * stage.ranks for stage in forecast.stages)
    assert stage_flops * forecast.micro_batches == pytest.approx(forecast.flops_per_step)


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
def test_options_save_memory(less: str, of: str) -> None:
    default_memory = forecast_llama(f"{LOCAL} {WHOLE}", 4).stages[0].memory
    reduced_memory = forecast_llama(f"{LOCAL} {WHOLE} {less}", 4).stages[0].memory
    assert getattr(reduced_memory, of) < 0.6 * getattr(default_memory, of)


def test_recomputing_all_keeps_the_inputs_of_layers() -> None:
    more = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4"
    memory = forecast_llama(f"{WHOLE} {more}").stages[0].memory
    assert memory.activations == 8 * 4096 * 4096 * 2


SELECTIVE = "--recompute-granularity selective --recompute-modules"


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (20, ["8 layers"] * 4),
        (
            42,
            ["5 layers, layernorm+mlp of 3", "layernorm of 8", "",
             "layernorm+mlp of 7, layernorm of 1"],
        ),
        (46, ["layernorm+mlp of 7, layernorm of 1", "", "", ""]),
        (60, [""] * 4),
    ],
    ids=["too-little", "most", "first-stage", "enough"],
)  # fmt: skip
def test_the_cheapest_recomputation_that_fits_is_chosen(gib: int, expected: list[str]) -> None:
    pipeline = f"{COMPILED} {WHOLE} --pipeline-model-parallel-size 4 --device cuda"
    args = llama_arguments(f"{pipeline} --recompute-granularity auto", 4)
    stages = forecast_step(args, VOCABULARY, [gib * 2.0**30] * 4).stages
    assert [", ".join(stage.describe_recomputation()) for stage in stages] == expected
    whole = forecast_llama(
        f"{pipeline} --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 8",
        4,
    ).stages
    for stage, whole_stage in zip(stages, whole, strict=True):
        fits = stage.memory.total <= gib * 2**30
        assert fits or stage.memory.total == whole_stage.memory.total
        chip = DevicePeaks(989e12)
        recomputed, whole_recomputed = (s.passes[0].backward for s in (stage, whole_stage))
        assert recomputed.duration(chip) <= whole_recomputed.duration(chip)


def test_chosen_numbers_equal_those_of_the_same_arguments() -> None:
    auto = llama_arguments(f"{COMPILED} {WHOLE} --device cuda --recompute-granularity auto")
    options = f"{COMPILED} {WHOLE} --device cuda {SELECTIVE} layernorm mlp"
    (selective,) = forecast_llama(options).stages
    (stage,) = forecast_step(auto, VOCABULARY, [selective.memory.total]).stages
    assert (stage.memory, stage.passes) == (selective.memory, selective.passes)


QWEN_MOE = """--num-layers 2 --global-batch-size 16 --num-experts 8 --moe-router-topk 2
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 1024
--moe-shared-expert-intermediate-size 2048"""
LATENT = """--num-layers 2 --global-batch-size 16 --multi-latent-attention --q-lora-rank 1536
--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"""
TOKENS = 4096


@pytest.mark.parametrize(
    ("model", "modules", "elements"),
    [
        ("--num-layers 2 --global-batch-size 16", "layernorm", 2 * 4096),
        ("--num-layers 2 --global-batch-size 16", "mlp", 3 * 14336),
        ("--num-layers 2 --global-batch-size 16", "core_attn", 2 * 4096),
        ("--num-layers 2 --global-batch-size 16 --fp8 hybrid", "layernorm mlp", 2 * 14336),
        (QWEN_MOE, "moe_act", 2 * 1024),
        (QWEN_MOE, "shared_experts mlp", 3 * 2048),
        (QWEN_MOE, "moe", 2 * 4096 + 3 * (2 * 1024 + 2048)),
        (LATENT, "mla_up_proj", 32 * (2 * 192 + 128)),
        (LATENT, "mla_up_proj core_attn", 32 * (2 * 192 + 128)),
    ],
)
def test_recomputed_modules_keep_no_outputs(model: str, modules: str, elements: int) -> None:
    """Bytes and arithmetic per token and layer, by hand."""
    kept, recomputed = (
        forecast_llama(f"{COMPILED} --device cuda {model} {more}").stages[0]
        for more in ("", f"{SELECTIVE} {modules}")
    )
    saved_bytes = kept.memory.activations - recomputed.memory.activations
    assert saved_bytes == 2 * 2 * TOKENS * elements
    assert recomputed.passes[0].forward == kept.passes[0].forward
    chip = DevicePeaks(989e12, 3.35e12)
    added_seconds = recomputed.passes[0].backward.duration(chip) - kept.passes[0].backward.duration(
        chip
    )
    assert 0 < added_seconds < kept.passes[0].forward.duration(chip)


@pytest.mark.parametrize(
    ("method", "factor"),
    [("uniform --recompute-num-layers 4", 1), ("block --recompute-num-layers 8", 1 / 4)],
)
def test_recomputing_takes_time(method: str, factor: float) -> None:
    without_recompute = forecast_llama(WHOLE)
    forecast = forecast_llama(f"{WHOLE} --recompute-granularity full --recompute-method {method}")
    chip = DevicePeaks(1e15)
    layer = op_times.layer_load(llama_arguments(WHOLE), LayerKind(is_moe=False)).forward.duration(
        chip
    )
    more = forecast.simulate([chip]).seconds - without_recompute.simulate([chip]).seconds
    assert more == pytest.approx(16 * factor * 32 * layer)


def test_a_device_waits_for_a_host_unless_steps_are_captured() -> None:
    tiny = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --seq-length 64"
    tiny += " --num-attention-heads 2 --num-query-groups 2 --global-batch-size 16"
    captured = "--cuda-graph-impl local --cuda-graph-scope full_iteration"
    launched, captured_forecast = (forecast_llama(f"{tiny} {more}") for more in ("", captured))
    assert (
        captured_forecast.simulate([DevicePeaks(1e15)]).seconds
        < 0.3 * launched.simulate([DevicePeaks(1e15)]).seconds
    )
    # A device ten times as fast does not help if the host is slow.
    assert (
        launched.simulate([DevicePeaks(1e16)]).seconds
        == launched.simulate([DevicePeaks(1e15)]).seconds
    )
    assert (
        captured_forecast.simulate([DevicePeaks(1e16)]).seconds
        < captured_forecast.simulate([DevicePeaks(1e15)]).seconds
    )


def test_earlier_stages_hold_more_micro_batches() -> None:
    stages = forecast_llama(f"{WHOLE} --pipeline-model-parallel-size 4", 4).stages
    activations = [stage.memory.activations for stage in stages]
    assert activations == pytest.approx([activations[-1] * count for count in (4, 3, 2, 1)])


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
def test_layers_are_divided_among_stages(options: str, expected: list[tuple[int, ...]]) -> None:
    assert layers_of_stages(vars(llama_arguments(f"{WHOLE} {options}", 4))) == expected


def test_stages_that_recompute_by_rows() -> None:
    pipeline = f"{WHOLE} --pipeline-model-parallel-size 4 --recompute-granularity full"
    full = f"{pipeline} --recompute-method uniform --recompute-num-layers 1"
    rows = "--recompute-granularity-per-stage-micro-batch 1,16,1 1,8,1,8,0 2,16,0"
    without_recompute = forecast_llama(f"{WHOLE} --pipeline-model-parallel-size 4", 4).stages
    all_of_them = forecast_llama(full, 4).stages
    recomputing_stages = forecast_llama(f"{full} {rows}", 4).stages
    assert recomputing_stages[0].memory == all_of_them[0].memory
    assert [stage.memory for stage in recomputing_stages[1:]] == [
        stage.memory for stage in without_recompute[1:]
    ]


MIXTRAL = """--num-layers 32 --vocab-size 32000 --num-experts 8 --moe-router-topk 2
--global-batch-size 16"""


@pytest.mark.parametrize(
    ("options", "world", "vocabulary", "expected"),
    [
        pytest.param(WHOLE, 1, VOCABULARY, (8_030_261_248,) * 3, id="llama-3-8b"),
        pytest.param(f"{WHOLE} {TP2_PP2}", 4, VOCABULARY, (8_030_261_248,) * 3, id="in-any-layout"),
        pytest.param(
            f"{MIXTRAL} --expert-model-parallel-size 4",
            4,
            32000,
            (46_702_792_704, 12_879_925_248, 46_702_792_704),
            id="mixtral-8x7b",
        ),
        pytest.param(
            f"{WHOLE} --peft-type lora --lora-dim 8 --lora-target-modules linear_proj",
            1,
            VOCABULARY,
            (8_030_261_248 + 2 * 2**20, 8_030_261_248 + 2 * 2**20, 2 * 2**20),
            id="adapters",
        ),
        pytest.param(
            f"{MIXTRAL} --peft-type lora --lora-dim 8 --lora-target-modules linear_fc2 "
            "--expert-model-parallel-size 4",
            4,
            32000,
            tuple(
                size + experts * 32 * 8 * (4096 + 14336)
                for size, experts in ((46_702_792_704, 8), (12_879_925_248, 2), (0, 8))
            ),
            id="adapters-of-experts",
        ),
        pytest.param(
            f"{WHOLE} --trainable-parameters output_layer",
            1,
            VOCABULARY,
            (8_030_261_248, 8_030_261_248, VOCABULARY * 4096),
            id="frozen",
        ),
    ],
)
def test_parameters_of_the_whole_model(
    options: str, world: int, vocabulary: int, expected: tuple[int, int, int]
) -> None:
    args = llama_arguments(options, world)
    assert astuple(count_model_weights(args, vocabulary)) == expected
    stages = forecast_step(args, vocabulary).stages
    if world == 1:
        assert [stage.weights for stage in stages] == [8_030_261_248]


EIGHT_LAYERS = f"{COMPILED} --device cuda --num-layers 8 --global-batch-size 16"


@pytest.mark.parametrize(
    ("options", "elements", "layers"),
    [
        ("--cpu-offloading-num-layers 2", 4 * 4096 + 14336 + 3 * 14336, 2),
        (f"--cpu-offloading-num-layers 7 {SELECTIVE} layernorm mlp", 2 * 4096 + 14336, 7),
        ("--transformer-impl local --fine-grained-activation-offloading --offload-modules "
         "core_attn attn_proj mlp_norm", 14336 + 4096, 7),
    ],
    ids=["layers", "what-is-not-recomputed", "modules"],
)  # fmt: skip
def test_offloaded_activations_are_on_the_host(options: str, elements: int, layers: int) -> None:
    kept_options = " ".join(
        word for word in options.split() if not word.startswith("--cpu-off") and word not in "27"
    )
    kept_options = kept_options.partition("--fine")[0]
    kept = forecast_llama(f"{EIGHT_LAYERS} {kept_options}").stages[0]
    offloaded = forecast_llama(f"{EIGHT_LAYERS} {options}").stages[0]
    layer_bytes = 2 * TOKENS * elements
    assert kept.memory.activations - offloaded.memory.activations == layers * layer_bytes
    assert offloaded.memory.host == layers * layer_bytes
    assert offloaded.passes[0].forward.copied_bytes == layers * layer_bytes
    assert offloaded.passes[0].backward.copied_bytes == layers * layer_bytes


def test_copies_take_time_only_if_they_take_longer_than_the_passes() -> None:
    chip = DevicePeaks(989e12, 3.35e12)
    seconds = [
        forecast_llama(f"{EIGHT_LAYERS} --cpu-offloading-num-layers {count}")
        .simulate([chip])
        .seconds
        for count in (0, 2, 7)
    ]
    assert seconds[0] == seconds[1] < seconds[2]


MATRICES_8B = 32 * 4096 * (6144 + 4096 + 3 * 14336)


@pytest.mark.parametrize(
    ("options", "world", "saved"),
    [
        ("", 1, 4 * MATRICES_8B),
        ("", 8, 4 * MATRICES_8B / 8),
        ("--freeze-parameters decoder.layers.*.mlp", 1, 4 * 32 * 4096 * (6144 + 4096)),
    ],
    ids=["one-rank", "sharded", "frozen"],
)
def test_muon_has_one_state_per_weight_of_a_matrix(options: str, world: int, saved: float) -> None:
    adam, muon = (
        forecast_llama(f"{WHOLE} {options} --optimizer {name}", world).stages[0].memory
        for name in ("adam", "muon")
    )
    assert adam.optimizer - muon.optimizer == pytest.approx(saved)
    assert (adam.weights, adam.gradients) == (muon.weights, muon.gradients)


def test_lion_has_one_state_per_weight() -> None:
    adam, lion = (
        forecast_llama(f"{WHOLE} --optimizer {name}").stages[0].memory for name in ("adam", "lion")
    )
    assert lion.optimizer / adam.optimizer == pytest.approx(8 / 12)
    assert (adam.weights, adam.gradients) == (lion.weights, lion.gradients)


def test_an_orthogonalization_needs_memory_when_there_are_no_activations() -> None:
    short = f"{WHOLE} --optimizer muon --seq-length 16 --global-batch-size 1"
    memory = forecast_llama(short).stages[0].memory
    assert memory.activations + memory.transient == 12 * 4096 * 2 * 14336


def test_muon_takes_the_time_of_its_products() -> None:
    """Of a layer these are queries and output projection [4096, 4096], keys and values
    [1024, 4096], and two matrices [28672, 4096] and [4096, 14336].
    """
    loads = {
        options: forecast_llama(f"{WHOLE} --optimizer {options}").stages[0].optimizer_load
        for options in ("adam", "muon", "muon --muon-fp32-matmul-prec high")
    }
    square, small = 6 * 4096**3, 4 * 1024**2 * 4096 + 2 * 1024**3
    large = sum(4 * 4096**2 * width + 2 * 4096**3 for width in (28672, 14336))
    flops = 32 * 5 * (2 * square + 2 * small + large)
    assert loads["adam"].gemm_flops == 0
    assert loads["muon"].gemm_flops == pytest.approx(flops / 0.7)
    assert loads["muon --muon-fp32-matmul-prec high"].gemm_flops == pytest.approx(2 * flops / 0.7)


@pytest.mark.parametrize(
    ("mode", "factor"),
    [("duplicated", 1.0), ("distributed", 0.55), ("blockwise", 0.4)],
)
def test_tensor_parallel_ranks_share_products_of_muon(mode: str, factor: float) -> None:
    layout = "--tensor-model-parallel-size 2 --sequence-parallel"
    whole, split = (
        forecast_llama(f"{WHOLE} --optimizer muon --muon-tp-mode {mode} {flags}", world)
        .stages[0]
        .optimizer_load.gemm_flops
        for flags, world in (("", 1), (layout, 2))
    )
    assert split / whole == pytest.approx(factor, abs=0.1)
