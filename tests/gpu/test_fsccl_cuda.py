"""fsccl on GPUs: CUDA ranks with ranks of the host in one group, clusters of GPUs, speed.

Run on a machine with GPUs: ``pytest -m gpu tests/gpu/test_fsccl_cuda.py``. One GPU is enough for
most: two ranks share it as clusters of one rank each, which need no NCCL. Tests that need more GPUs
than there are skip themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.fsccl_ranks import Ranks
from support.gpu_groups import GPUS, GROUPS, Job, case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALL = "c" * min(GPUS, 8)
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
OPS = [
    *("all_reduce", "reduce", "reduce_scatter", "all_gather"),
    *("broadcast", "gather", "scatter", "all_to_all"),
]
# So that sizes of every test are below and above what one kernel moves, and take many chunks.
SMALL = {"FSCCL_PIPE_BYTES": "65536", "FSCCL_KERNEL_BYTES": "16384"}


@pytest.fixture(scope="module", params=list(GROUPS))
def job(request: pytest.FixtureRequest, gpu_ranks: Ranks) -> Iterator[Job]:
    kinds, clusters, gpus = GROUPS[request.param]
    if gpus > GPUS:
        pytest.skip(f"needs {gpus} GPUs")
    made = Job(gpu_ranks, request.param, kinds, FSCCL_CLUSTERS=clusters, **SMALL)
    yield made
    made.leave()


def cases_of_types() -> list[dict[str, Any]]:
    arithmetic = ["sum", "avg", "min", "max", "product", "premul"]
    combinations = [
        *itertools.product(["float32", "float64", "bfloat16", "float16"], arithmetic),
        *itertools.product(["uint8", "int8", "int16", "int32", "int64"], arithmetic[:5]),
        *itertools.product(["int32", "int64", "bool"], ["band", "bor", "bxor"]),
        *itertools.product(["complex64"], ["sum", "avg"]),
    ]
    return [case("all_reduce", dtype, 20_011, red) for dtype, red in combinations]


def test_every_type_and_reduction(job: Job) -> None:
    job.call("check_many", cases=cases_of_types())


def test_every_operation_and_size(job: Job) -> None:
    sizes = [0, 1, 17, 4096, 4099, 300_007]
    cases = [case(op, "float32", n, root=n % 3) for op in OPS for n in sizes]
    job.call("check_many", cases=cases)
    job.call("check_many", cases=[case(op, "float32", 5003, strided=True) for op in OPS])


@pytest.mark.parametrize("name", ["nan_wins", "rounding_is_alike", "unsigned", "many_in_flight"])
@pytest.mark.parametrize("count", [65, 100_003], ids=["tiny", "chunks"])
def test_bits_and_works(job: Job, name: str, count: int) -> None:
    job.call(name, count=count)


@pytest.mark.parametrize("name", ["coalesced_alike", "messages_alike"])
def test_messages_and_coalescing(job: Job, name: str) -> None:
    job.call(name, count=50_000)


def only_gpus(job: Job) -> None:
    if "h" in job.kinds:
        pytest.skip("of groups of GPUs alone")


@pytest.mark.parametrize("name", ["calls_return_early", "works_on_side_streams", "memory_is_kept"])
def test_streams(job: Job, name: str) -> None:
    only_gpus(job)
    job.pool.call(job.members, name, limit=120, count=200_000)


def test_host_tensors_of_gpu_ranks(job: Job) -> None:
    """In a group of GPUs they move as those of host ranks do; else by way of the GPU."""
    job.pool.call(job.members, "check_many", cases=[case(op, "float32", 3001) for op in OPS])


def test_capturing_is_refused_with_a_reason(gpu_ranks: Ranks) -> None:
    made = Job(gpu_ranks, "capture", "cc", FSCCL_CLUSTERS="1,1")
    for said in gpu_ranks.call(made.members, "capture"):
        assert "cannot be captured in a CUDA graph" in said
    made.leave()


@pytest.mark.parametrize("kinds", ["cc", "ch"])
def test_a_killed_rank_is_named(gpu_ranks: Ranks, kinds: str) -> None:
    made = Job(gpu_ranks, f"killed-{kinds}", kinds, FSCCL_CLUSTERS="1,1", **SMALL)
    made.call("check_many", cases=[case("all_reduce", "float32", 100_003)])
    gpu_ranks[0].ask("fails_when_a_rank_ends", count=100_003)
    gpu_ranks.kill(1)
    assert "rank 1" in gpu_ranks.answers([0], 120)[0]
    gpu_ranks.leave([0])


def test_cuda_can_be_switched_off(gpu_ranks: Ranks) -> None:
    gpu_ranks.join(1, FSCCL_DEVICE="", FSCCL_CUDA="0")
    gpu_ranks[0].ask("on_cuda", name="check_many", cases=[case("all_reduce", "float32", 3)])
    said = gpu_ranks.replies([0])[0]["error"]
    assert "FSCCL_CUDA=0" in said
    gpu_ranks.leave([0])


def test_a_gpu_is_taken_by_default(gpu_ranks: Ranks) -> None:
    gpu_ranks.join(1, FSCCL_DEVICE="")
    gpu_ranks[0].ask("on_cuda", name="check_many", cases=[case("all_reduce", "float32", 3)])
    gpu_ranks.answers([0], 60)
    gpu_ranks.leave([0])


@needs_two
def test_a_rank_that_is_late_is_named(gpu_ranks: Ranks) -> None:
    """By the kernel that waited for it, and before the group does anything else."""
    made = Job(gpu_ranks, "late", "cc", FSCCL_CLUSTERS="1,1", timeout=4)
    made.call("check_many", cases=[case("all_reduce", "float32", 5)])
    gpu_ranks[0].ask("fails_when_a_rank_ends", count=5)
    assert "rank 1" in gpu_ranks.answers([0], 60)[0]
    assert gpu_ranks.call([0], "says_that_it_failed")[0]
    gpu_ranks.leave(made.members)


@needs_two
def test_one_cluster_is_left_to_nccl(gpu_ranks: Ranks) -> None:
    made = Job(gpu_ranks, "whole", ALL, FSCCL_NVLINK="0")
    for path in gpu_ranks.call(made.members, "cuda_path"):
        assert path.startswith("nccl")
        assert "nvlink" not in path
    made.call("check_many", cases=[case(op, "float32", 4099) for op in OPS])
    for op in ("all_reduce", "reduce", "reduce_scatter"):  # torch's NCCL multiplies bf16 by zero
        made.call("check_many", cases=[case(op, "bfloat16", 4099, "premul")])
    made.call("messages_alike", count=50_000)
    gpu_ranks.call(made.members, "captured_graph_replays")
    made.leave()


LAYOUTS = {
    "nccl": (ALL, {"FSCCL_NVLINK": "0"}),
    "nvlink": (ALL, {}),
    "engine": ("cc", {"FSCCL_CLUSTERS": "1,1"}),
}


@pytest.fixture(params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest, gpu_ranks: Ranks) -> Iterator[Job]:
    kinds, variables = LAYOUTS[request.param]
    if len(kinds) < 2:
        pytest.skip("needs 2 GPUs")
    made = Job(gpu_ranks, request.node.name, kinds, **variables)
    yield made
    made.leave()


@pytest.mark.parametrize("name", ["train_ddp", "train_fsdp"])
def test_training(layout: Job, name: str) -> None:
    layout.call(name, steps=3)


@pytest.mark.parametrize("name", ["functional", "subgroups", "objects"])
def test_what_builds_on_collectives(layout: Job, name: str) -> None:
    layout.call(name)


@needs_two
def test_kernels_over_host_memory(gpu_ranks: Ranks) -> None:
    """Of GPUs that are clusters of their own."""
    size = min(GPUS, 8)
    apart = ",".join("1" * size)
    made = Job(gpu_ranks, "host-kernels", "c" * size, FSCCL_CLUSTERS=apart)
    before, small, large, _ = made.call("algorithms")[0]
    assert before == "none yet"
    assert small == large == "slots in host memory"
    types = [{**one, "count": n} for one in cases_of_types() for n in (5, 1001, 20_011)]
    made.call("check_many", cases=types)
    sizes = (1, 17, 500, 4099, 300_007, 2_000_003)
    made.call("check_many", cases=[case(op, "float32", n, root=1) for op in OPS for n in sizes])
    for count in (65, 100_003):
        for name in ("nan_wins", "rounding_is_alike", "unsigned", "many_in_flight"):
            made.call(name, count=count)
    made.call("coalesced_alike", count=64)
    gpu_ranks[0].ask("fails_when_a_rank_ends", count=100_003)
    gpu_ranks.kill(size - 1)
    assert f"rank {size - 1}" in gpu_ranks.answers([0], 120)[0]
    gpu_ranks.leave(range(size - 1))


@needs_two
def test_the_nvlink_engine_does_what_nccl_would(gpu_ranks: Ranks) -> None:
    made = Job(gpu_ranks, "nvlink", ALL)
    for path in gpu_ranks.call(made.members, "cuda_path"):
        assert path.endswith("+nvlink")
    made.call("check_many", cases=cases_of_types())
    sizes = [0, 1, 17, 4099, 300_007, 3_000_000]
    made.call("check_many", cases=[case(op, "float32", n, root=n % 2) for op in OPS for n in sizes])
    for count in (65, 100_003):
        for name in ("nan_wins", "rounding_is_alike", "unsigned", "many_in_flight"):
            made.call(name, count=count)
    for name in ("coalesced_alike", "messages_alike"):
        made.call(name, count=50_000)
    for name in ("calls_return_early", "works_on_side_streams", "memory_is_kept"):
        gpu_ranks.call(made.members, name, limit=120, count=200_000)
    gpu_ranks.call(made.members, "captured_graph_replays")
    made.leave()


@needs_two
@pytest.mark.parametrize("count", [100, 300_000], ids=["flagged", "staged"])
def test_the_nvlink_engine_names_who_is_late(gpu_ranks: Ranks, count: int) -> None:
    made = Job(gpu_ranks, f"nvlink-late-{count}", ALL, timeout=4)
    made.call("check_many", cases=[case("all_reduce", "float32", 5)])
    gpu_ranks[0].ask("waits_in_vain", count=count)
    assert "rank 1" in gpu_ranks.answers([0], 60)[0]
    assert gpu_ranks.call(made.members[1:], "says_that_it_failed") == [True] * (len(ALL) - 1)
    gpu_ranks.leave(made.members)


@needs_two
def test_the_nvlink_engine_sees_a_killed_rank(gpu_ranks: Ranks) -> None:
    """Long before its time is over."""
    made = Job(gpu_ranks, "nvlink-killed", ALL, timeout=600)
    made.call("check_many", cases=[case("all_reduce", "float32", 5)])
    gpu_ranks[0].ask("waits_in_vain", count=300_000)
    gpu_ranks.kill(len(ALL) - 1)
    said = gpu_ranks.answers([0], 60)[0]
    assert f"rank {len(ALL) - 1}" in said
    assert "ended without leaving" in said
    gpu_ranks.leave(made.members[:-1])


@needs_two
def test_a_group_ends_though_a_kernel_waits(gpu_ranks: Ranks) -> None:
    made = Job(gpu_ranks, "nvlink-left", ALL, timeout=600)
    made.call("check_many", cases=[case("all_reduce", "float32", 5)])
    gpu_ranks[0].ask("leaves_while_it_waits", count=300_000)
    gpu_ranks.leave(made.members[1:])
    assert gpu_ranks.answers([0], 60)[0]
    # And so does the next one, on what the first has left.
    made = Job(gpu_ranks, "nvlink-next", ALL)
    made.call("check_many", cases=[case("all_reduce", "float32", n) for n in (5, 300_000)])
    made.leave()


@needs_two
def test_works_and_parts_of_the_nvlink_engine(gpu_ranks: Ranks) -> None:
    made = Job(gpu_ranks, "nvlink-works", ALL)
    gpu_ranks.call(made.members, "earlier_works_are_waited_for_alone", count=2_000_000)
    gpu_ranks.call(made.members, "parts_that_do_not_fit_are_refused")
    made.leave()


def seconds(pool: Ranks, key: str, size: int, repeats: int, **variables: str) -> float:
    made = Job(pool, key, "c" * 8, FSCCL_CLUSTERS="4,4", **variables)
    times: Sequence[float] = pool.call(
        made.members, "all_reduce_seconds", limit=240, size=size, repeats=repeats
    )
    made.leave()
    return max(times)


@pytest.mark.skipif(
    GPUS < 8 or "H200" not in torch.cuda.get_device_name(), reason="needs 8 H200 GPUs"
)
@pytest.mark.parametrize(
    ("key", "variables", "bar"),
    [("by-memory", {}, 40e9), ("by-tcp", {"FSCCL_SHM": "0"}, 15e9)],
    ids=["shared-memory", "tcp"],
)
def test_bandwidth_between_clusters(
    gpu_ranks: Ranks, key: str, variables: dict[str, str], bar: float
) -> None:
    size = 1 << 30
    busbw = 2 * 7 / 8 * size / seconds(gpu_ranks, key, size, 10, **variables)
    print(f"busbw {busbw / 1e9:.1f} GB/s")
    assert busbw >= bar


@pytest.mark.skipif(
    GPUS < 8 or "H200" not in torch.cuda.get_device_name(), reason="needs 8 H200 GPUs"
)
def test_latency_between_clusters(gpu_ranks: Ranks) -> None:
    taken = seconds(gpu_ranks, "latency", 1 << 10, 200)
    print(f"{taken * 1e6:.0f} us")
    assert taken <= 100e-6
