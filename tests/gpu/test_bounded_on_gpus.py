"""all_reduce in bounded time of ranks on GPUs: their memory is summed by the core.

Run on a machine with GPUs: ``pytest -m gpu tests/gpu/test_bounded_on_gpus.py``. One is enough for
most.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.fsccl_ranks import Ranks
from support.gpu_groups import GPUS, GROUPS, Job, case
from support.gpu_programs import MODEL, train_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("key", ["gpu+gpu", "gpu+host", "2-gpus+2-hosts"])
def test_sums_in_bounded_time(gpu_ranks: Ranks, key: str) -> None:
    """Clusters are hosts here: what is between them goes by datagrams over the loopback."""
    kinds, clusters, gpus = {**GROUPS, "2-gpus+2-hosts": ("cchh", "2,2", 2)}[key]
    if gpus > GPUS:
        pytest.skip(f"needs {gpus} GPUs")
    bounded = {"FSCCL_TAIL": "bounded", "FSCCL_TAIL_RATE": "400", "FSCCL_TAIL_LIMIT": "100"}
    made = Job(gpu_ranks, f"bounded-{key}", kinds, FSCCL_CLUSTERS=clusters, **bounded)
    for dtype, red in (("float32", "sum"), ("bfloat16", "avg")):
        every = made.call("bounded", count=(1 << 19) + 3, rounds=6, dtype=dtype, red=red)
        assert all(one == every[0] for one in every), "ranks tell of unlike operations"
        learned = {algorithm for algorithm, _ in every[0][:4]}
        assert learned == {"exactly: learning what the network carries"}
        assert all(exact for _, exact in every[0][:4])
        assert {algorithm for algorithm, _ in every[0][4:]} == {"by datagrams, in bounded time"}
    made.call("check_many", cases=[case("all_reduce", "float32", n) for n in (5, 60_007)])
    made.leave()
    exact = {**bounded, "FSCCL_TAIL_LIMIT": "0"}  # what loses anything is repeated
    made = Job(gpu_ranks, f"works-{key}", kinds, FSCCL_CLUSTERS=clusters, **exact)
    for _ in range(2):
        made.call("bounded_works", count=600_000)
    for i, kind in enumerate(kinds):
        name = "works_on_side_streams" if kind == "c" else "one_all_reduce"
        gpu_ranks[i].ask(name, count=600_000)
    gpu_ranks.answers(made.members, 60)
    made.leave()


def test_bounded_sums_in_a_graph_are_refused(gpu_ranks: Ranks) -> None:
    tail = {"FSCCL_TAIL": "bounded", "FSCCL_TAIL_BYTES": "65536"}
    made = Job(gpu_ranks, "bounded-graph", "cc", FSCCL_CLUSTERS="1,1", **tail)
    for said in gpu_ranks.call(made.members, "capture"):
        assert "in bounded time cannot be captured in a CUDA graph" in said
    made.call("check_many", cases=[case("all_reduce", "float32", 60_007)])
    made.leave()


def test_a_killed_rank_is_named_by_bounded_sums(gpu_ranks: Ranks) -> None:
    tail = {"FSCCL_TAIL": "bounded", "FSCCL_TAIL_LIMIT": "100"}
    made = Job(gpu_ranks, "bounded-killed", "cc", FSCCL_CLUSTERS="1,1", **tail)
    made.call("bounded", count=1 << 18, rounds=5)
    gpu_ranks[0].ask("fails_when_a_rank_ends", count=1 << 18)
    gpu_ranks.kill(1)
    said = gpu_ranks.answers([0], 60)[0]
    assert re.search(r"rank 1 \[.*\] ended without leaving the group", said), said
    gpu_ranks.leave([0])


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("overlap", ["", "--overlap-grad-reduce"], ids=["after", "overlapped"])
def test_training_sums_gradients_in_bounded_time(tmp_path: Path, overlap: str) -> None:
    given = f"{MODEL} --bf16 --log-interval 1 {overlap}"
    apart = {"FSCCL_CLUSTERS": "1,1"}
    exact = train_ranks(tmp_path / "exact", ("cuda", "cuda"), given, **apart)
    bounded = {"FSCCL_TAIL": "bounded", "FSCCL_TAIL_RATE": "2000"}
    found = train_ranks(tmp_path / "bounded", ("cuda", "cuda"), given, **apart, **bounded)
    assert len(found) == len(exact) == 20
    for one, other in zip(found, exact, strict=True):
        assert one.get("loss") == pytest.approx(other.get("loss"), rel=2e-2), one.get("step")
    told = [e for e in found if e.get("tail_excluded") is not None]
    assert len(told) > 10, "few steps tell of sums in bounded time"
    assert all(e.get("tail_mib") > 1 for e in told)
