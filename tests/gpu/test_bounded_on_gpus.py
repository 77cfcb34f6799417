"""all_reduce in bounded time of ranks on GPUs: the core reduces their memory.

Run on a machine with GPUs: ``pytest -m gpu tests/gpu/test_bounded_on_gpus.py``. Most tests need
one GPU.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.fsccl_ranks import RankPool
from support.gpu_groups import GPUS, GROUPS, MixedGroup, case
from support.gpu_programs import MODEL, train_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("key", ["gpu+gpu", "gpu+host", "2-gpus+2-hosts"])
def test_bounded_all_reduce(gpu_ranks: RankPool, key: str) -> None:
    """Clusters stand for hosts: traffic between them is datagrams over the loopback."""
    kinds, clusters, gpus = {**GROUPS, "2-gpus+2-hosts": ("cchh", "2,2", 2)}[key]
    if gpus > GPUS:
        pytest.skip(f"needs {gpus} GPUs")
    bounded = {"FSCCL_TAIL": "bounded", "FSCCL_TAIL_RATE": "400", "FSCCL_TAIL_LIMIT": "100"}
    group = MixedGroup(gpu_ranks, f"bounded-{key}", kinds, FSCCL_CLUSTERS=clusters, **bounded)
    for dtype, red in (("float32", "sum"), ("bfloat16", "avg")):
        results = group.call("run_all_reduces", count=(1 << 19) + 3, rounds=6, dtype=dtype, red=red)
        assert all(of_rank == results[0] for of_rank in results), (
            "ranks report different operations"
        )
        first_algorithms = {algorithm for algorithm, _ in results[0][:4]}
        assert first_algorithms == {"exactly: learning what the network carries"}
        assert all(exact for _, exact in results[0][:4])
        assert {algorithm for algorithm, _ in results[0][4:]} == {"by datagrams, in bounded time"}
    group.call("check_operations", cases=[case("all_reduce", "float32", n) for n in (5, 60_007)])
    group.leave()
    exact = {**bounded, "FSCCL_TAIL_LIMIT": "0"}  # operations with any loss are repeated
    group = MixedGroup(gpu_ranks, f"works-{key}", kinds, FSCCL_CLUSTERS=clusters, **exact)
    for _ in range(2):
        group.call("check_works", count=600_000)
    for i, kind in enumerate(kinds):
        name = "check_side_streams" if kind == "c" else "check_all_reduce"
        gpu_ranks[i].start_case(name, count=600_000)
    gpu_ranks.wait_for_results(group.members, 60)
    group.leave()


def test_bounded_all_reduce_rejects_graph_capture(gpu_ranks: RankPool) -> None:
    tail = {"FSCCL_TAIL": "bounded", "FSCCL_TAIL_BYTES": "65536"}
    group = MixedGroup(gpu_ranks, "bounded-graph", "cc", FSCCL_CLUSTERS="1,1", **tail)
    for error in gpu_ranks.call(group.members, "capture_all_reduce"):
        assert "in bounded time cannot be captured in a CUDA graph" in error
    group.call("check_operations", cases=[case("all_reduce", "float32", 60_007)])
    group.leave()


def test_bounded_all_reduce_names_killed_rank(gpu_ranks: RankPool) -> None:
    tail = {"FSCCL_TAIL": "bounded", "FSCCL_TAIL_LIMIT": "100"}
    group = MixedGroup(gpu_ranks, "bounded-killed", "cc", FSCCL_CLUSTERS="1,1", **tail)
    group.call("run_all_reduces", count=1 << 18, rounds=5)
    gpu_ranks[0].start_case("run_until_a_rank_exits", count=1 << 18)
    gpu_ranks.kill(1)
    error = gpu_ranks.wait_for_results([0], 60)[0]
    assert re.search(r"rank 1 \[.*\] ended without leaving the group", error), error
    gpu_ranks.leave([0])


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("overlap", ["", "--overlap-grad-reduce"], ids=["after", "overlapped"])
def test_training_with_bounded_all_reduce(tmp_path: Path, overlap: str) -> None:
    arguments = f"{MODEL} --bf16 --log-interval 1 {overlap}"
    two_nodes = {"FSCCL_CLUSTERS": "1,1"}
    exact = train_ranks(tmp_path / "exact", ("cuda", "cuda"), arguments, **two_nodes)
    bounded = {"FSCCL_TAIL": "bounded", "FSCCL_TAIL_RATE": "2000"}
    events = train_ranks(tmp_path / "bounded", ("cuda", "cuda"), arguments, **two_nodes, **bounded)
    assert len(events) == len(exact) == 20
    for event, exact_event in zip(events, exact, strict=True):
        assert event.get("loss") == pytest.approx(exact_event.get("loss"), rel=2e-2), event.get(
            "step"
        )
    bounded_events = [e for e in events if e.get("tail_excluded") is not None]
    assert len(bounded_events) > 10, "few steps report a bounded all_reduce"
    assert all(e.get("tail_mib") > 1 for e in bounded_events)
