"""Meshes of heterogeneous training: parsing, rank layout, and rejected arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.config.arguments.derive import derive_arguments, rank_arguments
from flagscale.config.arguments.hetero.meshes import Mesh, Meshes
from flagscale.config.arguments.layout import describe_ranks, pad_vocabulary
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.config.arguments.spec.train_arguments import mesh_words
from flagscale.errors import ConfigError

MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2
--ffn-hidden-size 128 --seq-length 32 --lr 1e-3 --train-iters 6 --mock-data --micro-batch-size 2
--global-batch-size 8"""
MESHES = "--enable-hetero --hetero-process-meshes"
REPLICAS = "--enable-hetero --hetero-mode dp"
VPP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
TP2_DP2 = f"{MESHES} 2 1 1 1 1 1 1 1 2 1"  # tp2 and dp2: 4 ranks


def derive_meshes(argv: str, world: int) -> Meshes:
    meshes: Meshes = derive_arguments(parse_arguments(f"{MODEL} {argv}".split()), world).meshes
    return meshes


REFUSED = {
    "not-asked-for": ("--hetero-process-meshes 1 1 1 1 1", 4, "requires enable_hetero: true"),
    "split-not-asked-for": ("--hetero-pipeline-layer-split 4", 4, "requires enable_hetero: true"),
    "no-meshes": ("--enable-hetero", 4, "requires hetero_process_meshes"),
    "not-five": (f"{MESHES} 2 1 1 1", 4, "dp, pp), found 4 numbers"),
    "no-number": (f"{MESHES} 2 1 1 1 x", 4, "hetero_process_meshes: expected"),
    "a-size-of-0": (f"{MESHES} 0 1 1 1 1", 4, "0"),
    "said-twice": (
        f"{MESHES} tp=2 dp=2 --hetero-device-types A B",
        4,
        "hetero_process_meshes, which have a key for",
    ),
    "words-some-layers": (
        f"{MESHES} tp=2,layers=2 dp=2",
        4,
        "dp2: expected layers for each of its 1 stages",
    ),
    "words-few-layers": (
        f"{MESHES} tp=2,layers=2 pp=2,layers=2",
        4,
        "pp2: expected layers for each of its 2 stages",
    ),
    "types": (f"{TP2_DP2} --hetero-device-types A", 4, "expected one item per mesh (2), found 1"),
    "expert-tp": (
        f"{TP2_DP2} --num-experts 4 --expert-tensor-parallel-size-per-process-mesh 1 1 1",
        4,
        "item per mesh (2), found 3",
    ),
    "words-unknown": (f"{MESHES} tp=2,zp=3 dp=2", 4, "hetero_process_meshes: mesh"),
    "words-no-number": (f"{MESHES} tp=two dp=2", 4, "mesh 0: tp: expected"),
    "words-zero": (f"{MESHES} dp=0 dp=2", 4, "at least 1, found '0'"),
    "words-layers": (f"{MESHES} layers=a dp=2", 4, "layers: expected"),
    "words-twice": (f"{MESHES} tp=1,tp=2 dp=2", 4, "given twice"),
    "words-no-type": (f"{MESHES} device_type=,tp=2 dp=2", 4, "device_type must not be empty"),
    "world": (TP2_DP2, 8, "the meshes have 2 + 2 = 4 ranks, but the job has 8"),
    "one-stage": (f"{MESHES} 2 1 1 1 1", 2, "pipeline stages, found one"),
    "split-count": (
        f"{TP2_DP2} --hetero-pipeline-layer-split 2 1 1",
        4,
        "number per stage (2), found 3",
    ),
    "split-sum": (
        f"{TP2_DP2} --hetero-pipeline-layer-split 2 1",
        4,
        "3 layers, but num_layers is 4",
    ),
    "no-even-split": (
        f"{MESHES} 1 1 1 1 2 1 1 1 1 1",
        3,
        "4 layers are not divisible by 3 stages; give the layers of each",
    ),
    "no-layers": (f"{TP2_DP2} --hetero-pipeline-layer-split 4 0", 4, "stage 1 has no layers"),
    "embedding-stage": (
        f"{TP2_DP2} --standalone-embedding-stage --hetero-pipeline-layer-split 1 3",
        4,
        "0 layers in the first stage, found 1",
    ),
    "layers-by-layout": (
        f"{TP2_DP2} --pipeline-model-parallel-layout Ett|ttL",
        4,
        "enable_hetero; use hetero_pipeline_layer_split",
    ),
    "layers-of-first": (
        f"{TP2_DP2} --num-layers-in-first-pipeline-stage 1",
        4,
        "enable_hetero; use hetero_pipeline_layer_split",
    ),
    "virtual-layers": (
        f"{TP2_DP2} --num-virtual-stages-per-pipeline-rank 2 --hetero-pipeline-layer-split 3 1",
        4,
        "3 layers are not divisible by 2",
    ),
    "virtual-batch": (
        f"{TP2_DP2} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2",
        4,
        "2 has 1 micro-batches, which is not divisible",
    ),
    "pipeline": (
        f"{TP2_DP2} --pipeline-model-parallel-size 3",
        4,
        "stages of all meshes, 2, found 3",
    ),
    "heads": (
        f"{MESHES} 3 1 1 1 1 1 1 1 2 1 --seq-length 36 --hidden-size 96",
        5,
        "mesh 0 (tp3): 4 is not divisible by tensor",
    ),
    "query-groups": (
        f"{MESHES} 4 1 1 1 1 1 1 1 2 1",
        6,
        "mesh 0 (tp4): 2 is not divisible by tensor",
    ),
    "sequence": (
        f"{TP2_DP2} --seq-length 33",
        4,
        "33 is not divisible by 2, as mesh 0 (tp2) requires",
    ),
    "context-sequence": (
        f"{MESHES} 1 3 1 1 1 1 1 1 2 1",
        5,
        "32 is not divisible by 6, as mesh 0 (cp3) requires",
    ),
    "context-attention": (
        f"{MESHES} 1 2 1 1 1 1 1 1 2 1 --attention-backend local",
        4,
        "context_parallel_size: mesh",
    ),
    "few-sequences": (f"{TP2_DP2} --micro-batch-size 1", 4, "2 of mesh 1 (dp2); increase"),
    "last-uneven": (
        f"{MESHES} 1 1 1 2 1 1 1 1 3 1",
        5,
        "4 sequences is not divisible by dp 3 of mesh 1 (dp3)",
    ),
    "batch": (
        f"{TP2_DP2} --global-batch-size 7",
        4,
        "not divisible by micro_batch_size 2 x dp 1",
    ),
    "experts": (f"{MESHES} 1 1 2 2 1 1 1 1 2 1", 4, "mesh 0 (ep2 dp2): 2 requires num_moe_experts"),
    "experts-ranks": (
        f"--num-experts 4 {MESHES} 1 1 4 2 1 1 1 1 2 1",
        4,
        "dp2): the 2 ranks of a stage are not divisible by ep 4 x etp 1",
    ),
    "experts-count": (
        f"--num-experts 3 {MESHES} 1 1 2 2 1 1 1 1 2 1",
        4,
        "mesh 0 (ep2 dp2): 3 is not divisible",
    ),
    "experts-sequence": (
        f"--num-experts 4 {TP2_DP2}",
        4,
        "sequence_parallel: mesh 0 (tp2): must be true with num_moe_experts and tensor_model_par",
    ),
    "experts-tp": (
        f"{TP2_DP2} --expert-tensor-parallel-size-per-process-mesh 1 1",
        4,
        "etp requires num_moe_experts",
    ),
    "experts-uneven": (
        "--num-experts 4 --enable-hetero --micro-batch-size 3 --global-batch-size 6 "
        "--hetero-process-meshes 1 1 1 1 1 1 1 2 2 1 --calculate-per-token-loss",
        3,
        "3 sequences of a micro-batch must",
    ),
    "replicas-not-asked-for": ("--hetero-micro-batch-sizes 1 1", 4, "requires enable_hetero: true"),
    "replicas-of-meshes": (
        f"{TP2_DP2} --hetero-micro-batch-sizes 2 1",
        4,
        "requires hetero_mode: dp",
    ),
    "replicas-no-sizes": (REPLICAS, 2, "is required by hetero_mode: dp"),
    "replicas-no-pairs": (f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1", 2, "expected pairs"),
    "replicas-of-none": (f"{REPLICAS} --hetero-micro-batch-sizes 0 1 2 1", 2, "at least 1"),
    "replicas-count": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 2 2",
        2,
        "hetero_micro_batch_sizes: expected 2 replicas, found 3",
    ),
    "replicas-batch": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 2",
        2,
        "8 is not divisible by the micro-batches of all replicas, 3",
    ),
    "replicas-counts": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 2 --hetero-num-microbatches 1 3 1 2",
        2,
        "sum of the replicas' sequences, 7, found 8",
    ),
    "replicas-meshes": (
        f"{MESHES} 1 1 1 2 1 --hetero-mode dp --hetero-micro-batch-sizes 1 1 1 3",
        2,
        "is not supported with hetero_mode: dp",
    ),
    "replicas-counts-words": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 --hetero-num-microbatches 1 many",
        2,
        "1, or auto, found ['1', 'many",
    ),
    "replicas-auto-of-what": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 --hetero-num-microbatches auto "
        "--global-batch-size 1",
        2,
        "1 sequences cannot be divided into micro-batches of 1 sequences",
    ),
    "replicas-auto-odd": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 2 --hetero-num-microbatches auto "
        "--global-batch-size 7",
        2,
        "7 sequences cannot be divided into micro-batches of 2 sequences",
    ),
    "replicas-auto-virtual": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 --hetero-num-microbatches auto {VPP2} "
        "--global-batch-size 5",
        4,
        "5 sequences cannot be divided into rounds of 2 micro-batches of 1",
    ),
    "replicas-virtual": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 --hetero-num-microbatches 1 3 1 5 {VPP2}",
        4,
        "3 micro-batches, which is not divisible by pipeline_model_parallel_size 2",
    ),
    "replicas-virtual-even": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 {VPP2} --global-batch-size 6",
        4,
        "global_batch_size: a replica has 3 micro-batches, which",
    ),
    "replicas-pipeline-ranks": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 --pipeline-model-parallel-size 2",
        2,
        "hetero_micro_batch_sizes: expected 1 replicas, found 2",
    ),
    "replicas-pipeline-context-experts": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 3 --num-experts 4 "
        "--pipeline-model-parallel-size 2 --context-parallel-size 2",
        8,
        "context_parallel_size: with hetero_mode: dp and num_moe_experts",
    ),
    "replicas-pipeline-experts-tp": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 3 --num-experts 4 "
        "--pipeline-model-parallel-size 2 --expert-tensor-parallel-size 2",
        4,
        "a pipeline, must equal tensor_model_parallel_size 1, found 2",
    ),
    "replicas-experts": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 3 --num-experts 4 "
        "--expert-model-parallel-size 2",
        2,
        "replicas have different numbers of micro-batches",
    ),
    "replicas-global-balance": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 3 --num-experts 4 "
        "--moe-router-load-balancing-type global_aux_loss",
        2,
        "use aux_loss or seq_aux_loss",
    ),
    "replicas-types": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 3 --hetero-device-types A",
        2,
        "hetero_micro_batch_sizes (2), found 1",
    ),
}


@pytest.mark.parametrize(("argv", "world", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_meshes_are_rejected(argv: str, world: int, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        derive_meshes(argv, world)
    assert message in str(raised.value)


def test_ranks_are_numbered_mesh_by_mesh() -> None:
    meshes = derive_meshes(
        f"{MESHES} 2 1 1 1 1 1 1 1 2 2 --hetero-pipeline-layer-split 2 1 1",
        6,
    )
    assert [list(stage.ranks) for stage in meshes.stages] == [[0, 1], [2, 3], [4, 5]]
    assert [stage.mesh_index for stage in meshes.stages] == [0, 1, 1]
    assert meshes.stages[2].position_of(5) == (1, 0, 0)
    assert meshes.describe() == "tp2 (2 layers) + dp2 pp2 (1+1 layers)"


@pytest.mark.parametrize(
    ("argv", "world", "places"),
    [
        ("", 2, [None, None]),
        (
            f"{MESHES} 2 1 1 1 2 1 1 1 2 1 --hetero-pipeline-layer-split 1 1 2",
            6,
            [
                "stages 0-1 of 3, mesh 0 (tp2 pp2)",
                "stage 1 of 3, mesh 0 (tp2 pp2) and stage 2 of 3, mesh 1 (dp2)",
            ],
        ),
        (
            f"{REPLICAS} --hetero-micro-batch-sizes 1 1 2 3 --hetero-num-microbatches 1 2 2 1 "
            "--pipeline-model-parallel-size 2 --hetero-device-types A B",
            6,
            ["replica 0 of 3 (A) and replica 1 of 3 (B)", "replicas 1-2 of 3 (B)"],
        ),
    ],
    ids=["alike", "meshes", "replicas"],
)
def test_ranges_of_ranks_are_described(argv: str, world: int, places: list[str | None]) -> None:
    args = derive_arguments(parse_arguments(f"{MODEL} {argv}".split()), world)
    rank_ranges = [range(world * 2 // 3), range(world // 2, world)]
    assert [describe_ranks(vars(args), ranks, world) for ranks in rank_ranges] == places


def test_rank_order_is_tensor_context_data() -> None:
    stage = Meshes((Mesh(tp=2, cp=2, dp=2, layers=(4,)),), 2).stages[0]
    assert [stage.position_of(rank) for rank in (1, 2, 4)] == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert all(stage.rank_at(*stage.position_of(rank)) == rank for rank in stage.ranks)


def test_rank_arguments_have_sizes_of_their_mesh() -> None:
    args = derive_arguments(parse_arguments(f"{MODEL} {TP2_DP2} --sequence-parallel".split()), 4)
    first, last = rank_arguments(args, 1), rank_arguments(args, 3)
    assert (args.data_parallel_size, args.num_microbatches) == (1, 4)
    assert [a.tensor_model_parallel_size for a in (first, last)] == [2, 1]
    assert [a.data_parallel_size for a in (first, last)] == [1, 2]
    assert [a.micro_batch_size for a in (first, last)] == [2, 1]
    assert [a.sequence_parallel for a in (first, last)] == [True, False]
    assert {a.pipeline_model_parallel_size for a in (first, last)} == {2}
    assert first.pipeline_model_parallel_layout == "Ett|ttL"


def test_named_form_equals_numeric_form() -> None:
    words = mesh_words([{"device_type": "A800", "tp": 2, "dp": 1, "layers": [3]},
                      {"device_type": "A100", "dp": 2, "layers": 1, "ep": None}])  # fmt: skip
    assert words == ["device_type=A800,tp=2,dp=1,layers=3", "device_type=A100,dp=2,layers=1"]
    named = derive_meshes(f"--enable-hetero --hetero-process-meshes {' '.join(words)}", 4)
    numeric = f"{TP2_DP2} --hetero-pipeline-layer-split 3 1 --hetero-device-types A800 A100"
    assert named == derive_meshes(numeric, 4)


def test_flagscale_arguments_in_addition_to_meshes_are_accepted() -> None:
    meshes = derive_meshes(
        f"{TP2_DP2} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--hetero-current-device-type A800 --hetero-use-cpu-communication "
        "--use-partial-reduce-for-shared-embedding",
        4,
    )
    assert [stage.layers for stage in meshes.stages] == [2, 2]
    ignored = "--tensor-model-parallel-size 4 --context-parallel-size 2 --log-num-zeros-in-grad"
    args = derive_arguments(parse_arguments(f"{MODEL} {TP2_DP2} {ignored}".split()), 4)
    assert (args.tensor_model_parallel_size, args.context_parallel_size) == (1, 1)
    assert not args.log_num_zeros_in_grad
    assert sum("is used instead of" in remark for remark in args.remarks) == 3


def test_step_is_split_by_microbatch_counts() -> None:
    shares = "--hetero-micro-batch-sizes 1 2 2 1 --hetero-num-microbatches 1 3 2 1"
    args = derive_arguments(parse_arguments(f"{MODEL} {REPLICAS} {shares}".split()), 3)
    assert args.calculate_per_token_loss
    per_rank = [rank_arguments(args, rank) for rank in range(3)]
    assert [(a.micro_batch_size, a.num_microbatches) for a in per_rank] == [(2, 3), (1, 1), (1, 1)]
    samples = [place for a in per_rank for part in a.share.micro_batches for place in part]
    assert samples == list(range(8))


@given(st.integers(1, 10**6), st.sampled_from([1, 64, 128]), st.sampled_from([1, 2, 8]))
def test_vocabulary_is_padded(size: int, divisible_by: int, tensor_parallel: int) -> None:
    values = {
        "make_vocab_size_divisible_by": divisible_by,
        "tensor_model_parallel_size": tensor_parallel,
        "meshes": None,
    }
    padded = pad_vocabulary(size, values)
    assert padded % (divisible_by * tensor_parallel) == 0
    assert size <= padded < size + divisible_by * tensor_parallel


def test_ranks_of_replica_are_consecutive() -> None:
    shares = "--hetero-micro-batch-sizes 1 2 1 1 --hetero-num-microbatches 1 2 1 4"
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    args = derive_arguments(parse_arguments(f"{MODEL} {REPLICAS} {shares} {sizes}".split()), 8)
    per_rank = [rank_arguments(args, rank) for rank in range(8)]
    assert [a.micro_batch_size for a in per_rank] == [2] * 4 + [1] * 4
    assert [a.num_microbatches for a in per_rank] == [2] * 4 + [4] * 4


@pytest.mark.parametrize(
    ("parallelism", "counts"),
    [("", [1, 1, 2]), (f"{VPP2} --global-batch-size 12", [4, 2, 2])],
    ids=["as-even-as-can-be", "in-rounds"],
)
def test_automatic_counts_are_even_before_measurement(parallelism: str, counts: list[int]) -> None:
    shares = "--hetero-micro-batch-sizes 1 1 1 1 1 3 --hetero-num-microbatches auto"
    world = 6 if parallelism else 3
    args = derive_arguments(
        parse_arguments(f"{MODEL} {REPLICAS} {shares} {parallelism}".split()), world
    )
    assert [share.count for share in args.shares] == counts
    assert args.shares[-1].stop == args.global_batch_size
