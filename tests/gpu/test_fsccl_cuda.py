"""Tests of fsccl on GPUs: groups of CUDA and CPU ranks, clusters of GPUs, speed.

Run on a machine with GPUs: ``pytest -m gpu tests/gpu/test_fsccl_cuda.py``. Most tests need one
GPU: two ranks share it as clusters of one rank each, which need no NCCL. Tests that need more GPUs
than the machine has are skipped. ``FSCCL_CLUSTERS`` divides the ranks into clusters, between which
data goes through host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.fsccl_ranks import RankPool
from support.gpu_groups import GPUS, GROUPS, MixedGroup, case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALL_GPUS = "c" * min(GPUS, 8)
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
OPERATIONS = [
    *("all_reduce", "reduce", "reduce_scatter", "all_gather"),
    *("broadcast", "gather", "scatter", "all_to_all"),
]
# So small that the tests' sizes are below and above the limit of one kernel, and take many chunks.
SMALL_LIMITS = {"FSCCL_PIPE_BYTES": "65536", "FSCCL_KERNEL_BYTES": "16384"}


@pytest.fixture(scope="module", params=list(GROUPS))
def job(request: pytest.FixtureRequest, gpu_ranks: RankPool) -> Iterator[MixedGroup]:
    kinds, clusters, gpus = GROUPS[request.param]
    if gpus > GPUS:
        pytest.skip(f"needs {gpus} GPUs")
    group = MixedGroup(gpu_ranks, request.param, kinds, FSCCL_CLUSTERS=clusters, **SMALL_LIMITS)
    yield group
    group.leave()


def type_cases() -> list[dict[str, Any]]:
    arithmetic = ["sum", "avg", "min", "max", "product", "premul"]
    combinations = [
        *itertools.product(["float32", "float64", "bfloat16", "float16"], arithmetic),
        *itertools.product(["uint8", "int8", "int16", "int32", "int64"], arithmetic[:5]),
        *itertools.product(["int32", "int64", "bool"], ["band", "bor", "bxor"]),
        *itertools.product(["complex64"], ["sum", "avg"]),
    ]
    return [case("all_reduce", dtype, 20_011, red) for dtype, red in combinations]


def test_every_type_and_reduction(job: MixedGroup) -> None:
    job.call("check_operations", cases=type_cases())


def test_every_operation_and_size(job: MixedGroup) -> None:
    sizes = [0, 1, 17, 4096, 4099, 300_007]
    cases = [case(op, "float32", n, root=n % 3) for op in OPERATIONS for n in sizes]
    job.call("check_operations", cases=cases)
    job.call(
        "check_operations", cases=[case(op, "float32", 5003, strided=True) for op in OPERATIONS]
    )


@pytest.mark.parametrize(
    "name",
    [
        "check_nan_propagation",
        "check_identical_rounding",
        "check_unsigned_types",
        "check_many_in_flight",
    ],
)
@pytest.mark.parametrize("count", [65, 100_003], ids=["tiny", "chunks"])
def test_results_are_bitwise_as_specified(job: MixedGroup, name: str, count: int) -> None:
    job.call(name, count=count)


@pytest.mark.parametrize("name", ["check_coalesced_all_reduces", "check_messages_of_all_pairs"])
def test_messages_and_coalescing(job: MixedGroup, name: str) -> None:
    job.call(name, count=50_000)


def skip_mixed_groups(job: MixedGroup) -> None:
    if "h" in job.kinds:
        pytest.skip("of groups of GPUs alone")


@pytest.mark.parametrize(
    "name", ["check_calls_return_early", "check_side_streams", "check_input_lifetime"]
)
def test_stream_semantics(job: MixedGroup, name: str) -> None:
    skip_mixed_groups(job)
    job.pool.call(job.members, name, limit=120, count=200_000)


def test_host_tensors_of_gpu_ranks(job: MixedGroup) -> None:
    """Host tensors take the host path in a group of GPUs, and the GPU's path in a mixed group."""
    job.pool.call(
        job.members, "check_operations", cases=[case(op, "float32", 3001) for op in OPERATIONS]
    )


def test_graph_capture_is_rejected(gpu_ranks: RankPool) -> None:
    group = MixedGroup(gpu_ranks, "capture", "cc", FSCCL_CLUSTERS="1,1")
    for error in gpu_ranks.call(group.members, "capture_all_reduce"):
        assert "cannot be captured in a CUDA graph" in error
    group.leave()


@pytest.mark.parametrize("kinds", ["cc", "ch"])
def test_error_names_a_killed_rank(gpu_ranks: RankPool, kinds: str) -> None:
    group = MixedGroup(gpu_ranks, f"killed-{kinds}", kinds, FSCCL_CLUSTERS="1,1", **SMALL_LIMITS)
    group.call("check_operations", cases=[case("all_reduce", "float32", 100_003)])
    gpu_ranks[0].start_case("run_until_a_rank_exits", count=100_003)
    gpu_ranks.kill(1)
    assert "rank 1" in gpu_ranks.wait_for_results([0], 120)[0]
    gpu_ranks.leave([0])


def test_cuda_can_be_switched_off(gpu_ranks: RankPool) -> None:
    gpu_ranks.join(1, FSCCL_DEVICE="", FSCCL_CUDA="0")
    gpu_ranks[0].start_case(
        "run_on_cuda", name="check_operations", cases=[case("all_reduce", "float32", 3)]
    )
    error = gpu_ranks.wait_for_replies([0])[0]["error"]
    assert "FSCCL_CUDA=0" in error
    gpu_ranks.leave([0])


def test_gpu_is_used_by_default(gpu_ranks: RankPool) -> None:
    gpu_ranks.join(1, FSCCL_DEVICE="")
    gpu_ranks[0].start_case(
        "run_on_cuda", name="check_operations", cases=[case("all_reduce", "float32", 3)]
    )
    gpu_ranks.wait_for_results([0], 60)
    gpu_ranks.leave([0])


@needs_two
def test_error_names_a_late_rank(gpu_ranks: RankPool) -> None:
    """The kernel that waits reports the late rank before the group does."""
    group = MixedGroup(gpu_ranks, "late", "cc", FSCCL_CLUSTERS="1,1", timeout=4)
    group.call("check_operations", cases=[case("all_reduce", "float32", 5)])
    gpu_ranks[0].start_case("run_until_a_rank_exits", count=5)
    assert "rank 1" in gpu_ranks.wait_for_results([0], 60)[0]
    assert gpu_ranks.call([0], "is_barrier_failing")[0]
    gpu_ranks.leave(group.members)


@needs_two
def test_single_cluster_uses_nccl(gpu_ranks: RankPool) -> None:
    group = MixedGroup(gpu_ranks, "whole", ALL_GPUS, FSCCL_NVLINK="0")
    for path in gpu_ranks.call(group.members, "get_cuda_path"):
        assert path.startswith("nccl")
        assert "nvlink" not in path
    group.call("check_operations", cases=[case(op, "float32", 4099) for op in OPERATIONS])
    for op in ("all_reduce", "reduce", "reduce_scatter"):  # torch's NCCL multiplies bf16 by zero
        group.call("check_operations", cases=[case(op, "bfloat16", 4099, "premul")])
    group.call("check_messages_of_all_pairs", count=50_000)
    gpu_ranks.call(group.members, "check_graph_replay")
    group.leave()


PATH_LAYOUTS = {
    "nccl": (ALL_GPUS, {"FSCCL_NVLINK": "0"}),
    "nvlink": (ALL_GPUS, {}),
    "engine": ("cc", {"FSCCL_CLUSTERS": "1,1"}),
}


@pytest.fixture(params=list(PATH_LAYOUTS))
def layout(request: pytest.FixtureRequest, gpu_ranks: RankPool) -> Iterator[MixedGroup]:
    kinds, variables = PATH_LAYOUTS[request.param]
    if len(kinds) < 2:
        pytest.skip("needs 2 GPUs")
    group = MixedGroup(gpu_ranks, request.node.name, kinds, **variables)
    yield group
    group.leave()


@pytest.mark.parametrize("name", ["train_ddp", "train_fsdp"])
def test_training_matches_one_process(layout: MixedGroup, name: str) -> None:
    layout.call(name, steps=3)


@pytest.mark.parametrize(
    "name", ["check_functional_collectives", "check_overlapping_groups", "check_objects"]
)
def test_features_on_collectives(layout: MixedGroup, name: str) -> None:
    layout.call(name)


@needs_two
def test_kernels_over_host_memory(gpu_ranks: RankPool) -> None:
    """Small operations among GPUs that are each a cluster run as one kernel, in host memory."""
    size = min(GPUS, 8)
    clusters = ",".join("1" * size)
    group = MixedGroup(gpu_ranks, "host-kernels", "c" * size, FSCCL_CLUSTERS=clusters)
    before, small, large, _ = group.call("list_algorithms")[0]
    assert before == "none yet"
    assert small == large == "slots in host memory"
    types = [{**base, "count": n} for base in type_cases() for n in (5, 1001, 20_011)]
    group.call("check_operations", cases=types)
    sizes = (1, 17, 500, 4099, 300_007, 2_000_003)
    group.call(
        "check_operations",
        cases=[case(op, "float32", n, root=1) for op in OPERATIONS for n in sizes],
    )
    for count in (65, 100_003):
        for name in (
            "check_nan_propagation",
            "check_identical_rounding",
            "check_unsigned_types",
            "check_many_in_flight",
        ):
            group.call(name, count=count)
    group.call("check_coalesced_all_reduces", count=64)
    gpu_ranks[0].start_case("run_until_a_rank_exits", count=100_003)
    gpu_ranks.kill(size - 1)
    assert f"rank {size - 1}" in gpu_ranks.wait_for_results([0], 120)[0]
    gpu_ranks.leave(range(size - 1))


@needs_two
def test_nvlink_engine_matches_nccl(gpu_ranks: RankPool) -> None:
    group = MixedGroup(gpu_ranks, "nvlink", ALL_GPUS)
    for path in gpu_ranks.call(group.members, "get_cuda_path"):
        assert path.endswith("+nvlink")
    group.call("check_operations", cases=type_cases())
    sizes = [0, 1, 17, 4099, 300_007, 3_000_000]
    group.call(
        "check_operations",
        cases=[case(op, "float32", n, root=n % 2) for op in OPERATIONS for n in sizes],
    )
    for count in (65, 100_003):
        for name in (
            "check_nan_propagation",
            "check_identical_rounding",
            "check_unsigned_types",
            "check_many_in_flight",
        ):
            group.call(name, count=count)
    for name in ("check_coalesced_all_reduces", "check_messages_of_all_pairs"):
        group.call(name, count=50_000)
    for name in ("check_calls_return_early", "check_side_streams", "check_input_lifetime"):
        gpu_ranks.call(group.members, name, limit=120, count=200_000)
    gpu_ranks.call(group.members, "check_graph_replay")
    group.leave()


@needs_two
@pytest.mark.parametrize("count", [100, 300_000], ids=["flagged", "staged"])
def test_nvlink_engine_names_late_rank(gpu_ranks: RankPool, count: int) -> None:
    group = MixedGroup(gpu_ranks, f"nvlink-late-{count}", ALL_GPUS, timeout=4)
    group.call("check_operations", cases=[case("all_reduce", "float32", 5)])
    gpu_ranks[0].start_case("wait_for_absent_ranks", count=count)
    assert "rank 1" in gpu_ranks.wait_for_results([0], 60)[0]
    assert gpu_ranks.call(group.members[1:], "is_barrier_failing") == [True] * (len(ALL_GPUS) - 1)
    gpu_ranks.leave(group.members)


@needs_two
def test_nvlink_engine_detects_killed_rank(gpu_ranks: RankPool) -> None:
    """The error comes long before the timeout."""
    group = MixedGroup(gpu_ranks, "nvlink-killed", ALL_GPUS, timeout=600)
    group.call("check_operations", cases=[case("all_reduce", "float32", 5)])
    gpu_ranks[0].start_case("wait_for_absent_ranks", count=300_000)
    gpu_ranks.kill(len(ALL_GPUS) - 1)
    error = gpu_ranks.wait_for_results([0], 60)[0]
    assert f"rank {len(ALL_GPUS) - 1}" in error
    assert "ended without leaving" in error
    gpu_ranks.leave(group.members[:-1])


@needs_two
def test_group_shuts_down_while_a_kernel_waits(gpu_ranks: RankPool) -> None:
    group = MixedGroup(gpu_ranks, "nvlink-left", ALL_GPUS, timeout=600)
    group.call("check_operations", cases=[case("all_reduce", "float32", 5)])
    gpu_ranks[0].start_case("destroy_group_while_waiting", count=300_000)
    gpu_ranks.leave(group.members[1:])
    assert gpu_ranks.wait_for_results([0], 60)[0]
    # The next group works, although it may reuse memory of the first one.
    group = MixedGroup(gpu_ranks, "nvlink-next", ALL_GPUS)
    group.call("check_operations", cases=[case("all_reduce", "float32", n) for n in (5, 300_000)])
    group.leave()


@needs_two
def test_nvlink_engine_works_and_split_checks(gpu_ranks: RankPool) -> None:
    group = MixedGroup(gpu_ranks, "nvlink-works", ALL_GPUS)
    gpu_ranks.call(group.members, "check_wait_ignores_later_works", count=2_000_000)
    gpu_ranks.call(group.members, "check_invalid_splits_rejected")
    group.leave()


def time_all_reduce(pool: RankPool, key: str, size: int, repeats: int, **variables: str) -> float:
    group = MixedGroup(pool, key, "c" * 8, FSCCL_CLUSTERS="4,4", **variables)
    times: Sequence[float] = pool.call(
        group.members, "measure_all_reduce", limit=240, size=size, repeats=repeats
    )
    group.leave()
    return max(times)


@pytest.mark.skipif(
    GPUS < 8 or "H200" not in torch.cuda.get_device_name(), reason="needs 8 H200 GPUs"
)
@pytest.mark.parametrize(
    ("key", "variables", "minimum"),
    [("by-memory", {}, 40e9), ("by-tcp", {"FSCCL_SHM": "0"}, 15e9)],
    ids=["shared-memory", "tcp"],
)
def test_bandwidth_between_clusters(
    gpu_ranks: RankPool, key: str, variables: dict[str, str], minimum: float
) -> None:
    size = 1 << 30
    busbw = 2 * 7 / 8 * size / time_all_reduce(gpu_ranks, key, size, 10, **variables)
    print(f"busbw {busbw / 1e9:.1f} GB/s")
    assert busbw >= minimum


@pytest.mark.skipif(
    GPUS < 8 or "H200" not in torch.cuda.get_device_name(), reason="needs 8 H200 GPUs"
)
def test_latency_between_clusters(gpu_ranks: RankPool) -> None:
    latency = time_all_reduce(gpu_ranks, "latency", 1 << 10, 200)
    print(f"{latency * 1e6:.0f} us")
    assert latency <= 100e-6
