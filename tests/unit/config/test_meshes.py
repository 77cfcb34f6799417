"""Meshes of heterogeneous training: how they are read, laid out, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.config.arguments.layout import place_of
from flagscale.config.arguments.meshes import Mesh, Meshes, as_words
from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import of_rank, resolve
from flagscale.config.arguments.vocabulary import padded_vocabulary
from flagscale.errors import ConfigError

MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2
--ffn-hidden-size 128 --seq-length 32 --lr 1e-3 --train-iters 6 --mock-data --micro-batch-size 2
--global-batch-size 8"""
MESHES = "--enable-hetero --hetero-process-meshes"
REPLICAS = "--enable-hetero --hetero-mode dp"
VPP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
TWO = f"{MESHES} 2 1 1 1 1 1 1 1 2 1"  # tp2, dp2: 4 ranks


def meshes_of(argv: str, world: int) -> Meshes:
    found: Meshes = resolve(parse_arguments(f"{MODEL} {argv}".split()), world).meshes
    return found


REFUSED = {
    "not-asked-for": ("--hetero-process-meshes 1 1 1 1 1", 4, "needs enable_hetero: true"),
    "split-not-asked-for": ("--hetero-pipeline-layer-split 4", 4, "needs enable_hetero: true"),
    "no-meshes": ("--enable-hetero", 4, "needs hetero_process_meshes"),
    "not-five": (f"{MESHES} 2 1 1 1", 4, "4 numbers are not five"),
    "no-number": (f"{MESHES} 2 1 1 1 x", 4, "'x' is no whole number"),
    "a-size-of-0": (f"{MESHES} 0 1 1 1 1", 4, "0"),
    "said-twice": (
        f"{MESHES} tp=2 dp=2 --hetero-device-types A B",
        4,
        "is said by hetero_process_meshes already",
    ),
    "words-some-layers": (
        f"{MESHES} tp=2,layers=2 dp=2",
        4,
        "dp2: say the layers of each of its 1 stages",
    ),
    "words-few-layers": (
        f"{MESHES} tp=2,layers=2 pp=2,layers=2",
        4,
        "pp2: say the layers of each of its 2 stages",
    ),
    "types": (f"{TWO} --hetero-device-types A", 4, "1 for 2 meshes: give one for each"),
    "expert-tp": (
        f"{TWO} --num-experts 4 --expert-tensor-parallel-size-per-process-mesh 1 1 1",
        4,
        "3 for 2 meshes",
    ),
    "words-unknown": (f"{MESHES} tp=2,zp=3 dp=2", 4, "'zp' is none of tp"),
    "words-no-number": (f"{MESHES} tp=two dp=2", 4, "mesh 0: tp: expected"),
    "words-zero": (f"{MESHES} dp=0 dp=2", 4, "at least 1, found '0'"),
    "words-layers": (f"{MESHES} layers=a dp=2", 4, "layers: expected"),
    "words-twice": (f"{MESHES} tp=1,tp=2 dp=2", 4, "given twice"),
    "words-no-type": (f"{MESHES} device_type=,tp=2 dp=2", 4, "is empty"),
    "world": (TWO, 8, "the meshes take 2 + 2 = 4 ranks, and the job has 8"),
    "one-stage": (f"{MESHES} 2 1 1 1 1", 2, "no pipeline"),
    "split-count": (f"{TWO} --hetero-pipeline-layer-split 2 1 1", 4, "3 numbers for 2 stages"),
    "split-sum": (f"{TWO} --hetero-pipeline-layer-split 2 1", 4, "are 3, num_layers is 4"),
    "no-even-split": (
        f"{MESHES} 1 1 1 1 2 1 1 1 1 1",
        3,
        "4 layers over 3 stages do not divide evenly; say how many each has",
    ),
    "no-layers": (f"{TWO} --hetero-pipeline-layer-split 4 0", 4, "stage 1 has no layers"),
    "embedding-stage": (
        f"{TWO} --standalone-embedding-stage --hetero-pipeline-layer-split 1 3",
        4,
        "has 1 layers; write 0",
    ),
    "layers-by-layout": (
        f"{TWO} --pipeline-model-parallel-layout Ett|ttL",
        4,
        "said by hetero_pipeline_layer_split",
    ),
    "layers-of-first": (
        f"{TWO} --num-layers-in-first-pipeline-stage 1",
        4,
        "said by hetero_pipeline_layer_split",
    ),
    "virtual-layers": (
        f"{TWO} --num-virtual-stages-per-pipeline-rank 2 --hetero-pipeline-layer-split 3 1",
        4,
        "3 layers do not divide into 2",
    ),
    "virtual-batch": (
        f"{TWO} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2",
        4,
        "gives 1 micro-batches, which the 2 stages",
    ),
    "pipeline": (f"{TWO} --pipeline-model-parallel-size 3", 4, "but the meshes have 2 stages"),
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
    "sequence": (f"{TWO} --seq-length 33", 4, "33 is not divisible by 2, as mesh 0 (tp2) needs"),
    "context-sequence": (
        f"{MESHES} 1 3 1 1 1 1 1 1 2 1",
        5,
        "32 is not divisible by 6, as mesh 0 (cp3) needs",
    ),
    "context-attention": (
        f"{MESHES} 1 2 1 1 1 1 1 1 2 1 --attention-backend local",
        4,
        "cannot split a sequence",
    ),
    "few-sequences": (f"{TWO} --micro-batch-size 1", 4, "has fewer than dp 2"),
    "last-uneven": (
        f"{MESHES} 1 1 1 2 1 1 1 1 3 1",
        5,
        "4 sequences of a micro-batch do not divide into dp 3",
    ),
    "batch": (f"{TWO} --global-batch-size 7", 4, "not divisible by micro_batch_size 2 x dp 1"),
    "experts": (f"{MESHES} 1 1 2 2 1 1 1 1 2 1", 4, "mesh 0 (ep2 dp2): 2 needs num_moe_experts"),
    "experts-ranks": (
        f"--num-experts 4 {MESHES} 1 1 4 2 1 1 1 1 2 1",
        4,
        "ep 4 x expert tensor parallel 1 does not divide the 2 ranks of a stage",
    ),
    "experts-count": (
        f"--num-experts 3 {MESHES} 1 1 2 2 1 1 1 1 2 1",
        4,
        "mesh 0 (ep2 dp2): 3 is not divisible",
    ),
    "experts-sequence": (
        f"--num-experts 4 {TWO}",
        4,
        "sequence_parallel: mesh 0 (tp2): is needed by experts beside tensor_model_parallel_size 2",
    ),
    "experts-tp": (
        f"{TWO} --expert-tensor-parallel-size-per-process-mesh 1 1",
        4,
        "tensor parallel size of experts needs num_moe_experts",
    ),
    "experts-uneven": (
        "--num-experts 4 --enable-hetero --micro-batch-size 3 --global-batch-size 6 "
        "--hetero-process-meshes 1 1 1 1 1 1 1 2 2 1 --calculate-per-token-loss",
        3,
        "need dp to divide 3 sequences",
    ),
    "replicas-not-asked-for": ("--hetero-micro-batch-sizes 1 1", 4, "needs enable_hetero: true"),
    "replicas-of-meshes": (f"{TWO} --hetero-micro-batch-sizes 2 1", 4, "is for hetero_mode: dp"),
    "replicas-no-sizes": (REPLICAS, 2, "is needed by hetero_mode: dp"),
    "replicas-no-pairs": (f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1", 2, "expected pairs"),
    "replicas-of-none": (f"{REPLICAS} --hetero-micro-batch-sizes 0 1 2 1", 2, "at least 1"),
    "replicas-count": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 2 2",
        2,
        "speaks of 3 replicas, and there are 2",
    ),
    "replicas-batch": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 2",
        2,
        "its 8 sequences do not divide into the replicas' 3",
    ),
    "replicas-counts": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 2 --hetero-num-microbatches 1 3 1 2",
        2,
        "its 8 sequences are not the replicas' 7",
    ),
    "replicas-meshes": (
        f"{MESHES} 1 1 1 2 1 --hetero-mode dp --hetero-micro-batch-sizes 1 1 1 3",
        2,
        "is for hetero_mode: pp",
    ),
    "replicas-counts-words": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 --hetero-num-microbatches 1 many",
        2,
        "all at least 1, or auto",
    ),
    "replicas-auto-of-what": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 --hetero-num-microbatches auto "
        "--global-batch-size 1",
        2,
        "1 sequences cannot be made up of micro-batches of 1 sequences, at least one for each of",
    ),
    "replicas-auto-odd": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 2 --hetero-num-microbatches auto "
        "--global-batch-size 7",
        2,
        "7 sequences cannot be made up of micro-batches of 2 sequences",
    ),
    "replicas-auto-virtual": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 --hetero-num-microbatches auto {VPP2} "
        "--global-batch-size 5",
        4,
        "5 sequences cannot be made up of rounds of 2 micro-batches of 1 sequences",
    ),
    "replicas-virtual": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 --hetero-num-microbatches 1 3 1 5 {VPP2}",
        4,
        "gives a replica 3 micro-batches, which pipeline_model_parallel_size 2 with virtual",
    ),
    "replicas-virtual-even": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 {VPP2} --global-batch-size 6",
        4,
        "global_batch_size: gives a replica 3 micro-batches",
    ),
    "replicas-pipeline-ranks": (
        f"{REPLICAS} --hetero-micro-batch-sizes 2 1 --pipeline-model-parallel-size 2",
        2,
        "speaks of 2 replicas, and there are 1",
    ),
    "replicas-pipeline-context-experts": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 3 --num-experts 4 "
        "--pipeline-model-parallel-size 2 --context-parallel-size 2",
        8,
        "replicas with experts have either this or a pipeline",
    ),
    "replicas-pipeline-experts-tp": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 3 --num-experts 4 "
        "--pipeline-model-parallel-size 2 --expert-tensor-parallel-size 2",
        4,
        "2: in replicas with a pipeline it is tensor_model_parallel_size 1",
    ),
    "replicas-experts": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 3 --num-experts 4 "
        "--expert-model-parallel-size 2",
        2,
        "which unlike replicas do not",
    ),
    "replicas-global-balance": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 3 --num-experts 4 "
        "--moe-router-load-balancing-type global_aux_loss",
        2,
        "take aux_loss or seq_aux_loss",
    ),
    "replicas-types": (
        f"{REPLICAS} --hetero-micro-batch-sizes 1 1 1 3 --hetero-device-types A",
        2,
        "1 for the 2 pairs",
    ),
}


@pytest.mark.parametrize(("argv", "world", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_plan_of_meshes(argv: str, world: int, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        meshes_of(argv, world)
    assert message in str(raised.value)


def test_ranks_are_numbered_mesh_by_mesh() -> None:
    found = meshes_of(f"{MESHES} 2 1 1 1 1 1 1 1 2 2 "
                      "--hetero-pipeline-layer-split 2 1 1", 6)  # fmt: skip
    assert [list(stage.ranks) for stage in found.stages] == [[0, 1], [2, 3], [4, 5]]
    assert [stage.mesh_index for stage in found.stages] == [0, 1, 1]
    assert found.stages[2].place(5) == (1, 0, 0)
    assert found.describe() == "tp2 (2 layers) + dp2 pp2 (1+1 layers)"


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
def test_what_ranks_hold_is_said(argv: str, world: int, places: list[str | None]) -> None:
    args = resolve(parse_arguments(f"{MODEL} {argv}".split()), world)
    held = [range(world * 2 // 3), range(world // 2, world)]
    assert [place_of(vars(args), ranks, world) for ranks in held] == places


def test_tensor_parallel_ranks_are_numbered_first_then_context_then_data() -> None:
    stage = Meshes((Mesh(tp=2, cp=2, dp=2, layers=(4,)),), 2).stages[0]
    assert [stage.place(rank) for rank in (1, 2, 4)] == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert all(stage.rank(*stage.place(rank)) == rank for rank in stage.ranks)


def test_a_rank_has_the_sizes_of_its_mesh() -> None:
    args = resolve(parse_arguments(f"{MODEL} {TWO} --sequence-parallel".split()), 4)
    first, last = of_rank(args, 1), of_rank(args, 3)
    assert (args.data_parallel_size, args.num_microbatches) == (1, 4)
    assert [a.tensor_model_parallel_size for a in (first, last)] == [2, 1]
    assert [a.data_parallel_size for a in (first, last)] == [1, 2]
    assert [a.micro_batch_size for a in (first, last)] == [2, 1]
    assert [a.sequence_parallel for a in (first, last)] == [True, False]
    assert {a.pipeline_model_parallel_size for a in (first, last)} == {2}
    assert first.pipeline_model_parallel_layout == "Ett|ttL"


def test_the_readable_form_says_the_same() -> None:
    words = as_words([{"device_type": "A800", "tp": 2, "dp": 1, "layers": [3]},
                      {"device_type": "A100", "dp": 2, "layers": 1, "ep": None}])  # fmt: skip
    assert words == ["device_type=A800,tp=2,dp=1,layers=3", "device_type=A100,dp=2,layers=1"]
    readable = meshes_of(f"--enable-hetero --hetero-process-meshes {' '.join(words)}", 4)
    plain = f"{TWO} --hetero-pipeline-layer-split 3 1 --hetero-device-types A800 A100"
    assert readable == meshes_of(plain, 4)


def test_what_flagscales_yamls_say_beside_the_meshes_is_taken() -> None:
    found = meshes_of(f"{TWO} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
                      "--hetero-current-device-type A800 --hetero-use-cpu-communication "
                      "--use-partial-reduce-for-shared-embedding", 4)  # fmt: skip
    assert [stage.layers for stage in found.stages] == [2, 2]
    beside = "--tensor-model-parallel-size 4 --context-parallel-size 2 --log-num-zeros-in-grad"
    args = resolve(parse_arguments(f"{MODEL} {TWO} {beside}".split()), 4)
    assert (args.tensor_model_parallel_size, args.context_parallel_size) == (1, 1)
    assert not args.log_num_zeros_in_grad
    assert sum("is taken in place of" in remark for remark in args.remarks) == 3


def test_a_step_is_cut_at_the_replicas_shares() -> None:
    shares = "--hetero-micro-batch-sizes 1 2 2 1 --hetero-num-microbatches 1 3 2 1"
    args = resolve(parse_arguments(f"{MODEL} {REPLICAS} {shares}".split()), 3)
    assert args.calculate_per_token_loss
    own = [of_rank(args, rank) for rank in range(3)]
    assert [(a.micro_batch_size, a.num_microbatches) for a in own] == [(2, 3), (1, 1), (1, 1)]
    places = [place for a in own for part in a.share.micro_batches for place in part]
    assert places == list(range(8))


@given(st.integers(1, 10**6), st.sampled_from([1, 64, 128]), st.sampled_from([1, 2, 8]))
def test_padded_vocabulary(size: int, divisible_by: int, tensor_parallel: int) -> None:
    values = {
        "make_vocab_size_divisible_by": divisible_by,
        "tensor_model_parallel_size": tensor_parallel,
        "meshes": None,
    }
    padded = padded_vocabulary(size, values)
    assert padded % (divisible_by * tensor_parallel) == 0
    assert size <= padded < size + divisible_by * tensor_parallel


def test_the_ranks_of_a_replica_are_numbered_one_after_another() -> None:
    shares = "--hetero-micro-batch-sizes 1 2 1 1 --hetero-num-microbatches 1 2 1 4"
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    args = resolve(parse_arguments(f"{MODEL} {REPLICAS} {shares} {sizes}".split()), 8)
    own = [of_rank(args, rank) for rank in range(8)]
    assert [a.micro_batch_size for a in own] == [2] * 4 + [1] * 4
    assert [a.num_microbatches for a in own] == [2] * 4 + [4] * 4


@pytest.mark.parametrize(
    ("more", "counts"),
    [("", [1, 1, 2]), (f"{VPP2} --global-batch-size 12", [4, 2, 2])],
    ids=["as-even-as-can-be", "in-rounds"],
)
def test_until_they_are_measured_counts_are_as_even_as_the_batch_allows(
    more: str, counts: list[int]
) -> None:
    shares = "--hetero-micro-batch-sizes 1 1 1 1 1 3 --hetero-num-microbatches auto"
    world = 6 if more else 3
    args = resolve(parse_arguments(f"{MODEL} {REPLICAS} {shares} {more}".split()), world)
    assert [share.count for share in args.shares] == counts
    assert args.shares[-1].stop == args.global_batch_size
