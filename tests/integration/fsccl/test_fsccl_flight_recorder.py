"""Tests of the flight recorder: its entries, torch's dumps with them, and torchfrtrace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.torch]


@pytest.fixture(params=["shared-memory", "nodes"])
def pair(request: pytest.FixtureRequest, ranks: Any) -> Any:
    ranks.join(2, FSCCL_CLUSTERS={"shared-memory": "2", "nodes": "1,1"}[request.param])
    yield ranks
    ranks.leave([0, 1])


def test_operations_are_recorded(pair: Any) -> None:
    for rank, record in enumerate(pair.call(range(2), "record_operations")):
        peer = 1 - rank
        reduced, gathered, sent, received = record["entries"]
        assert reduced["profiling_name"] == "fsccl:all_reduce"
        assert (reduced["input_sizes"], reduced["output_sizes"]) == ([[2, 3]], [[2, 3]])
        assert (reduced["input_dtypes"], reduced["collective_seq_id"]) == (["Float"], 1)
        assert gathered["profiling_name"] == "fsccl:all_gather"
        assert (gathered["input_sizes"], gathered["output_sizes"]) == ([[4]], [[4], [4]])
        assert (gathered["input_dtypes"], gathered["collective_seq_id"]) == (["Long"], 2)
        assert sent["profiling_name"] == f"fsccl:send {rank}->{peer}"
        assert received["profiling_name"] == f"fsccl:recv {rank}<-{peer}"
        assert (sent["is_p2p"], sent["p2p_seq_id"], received["p2p_seq_id"]) == (True, 1, 2)
        for entry in record["entries"]:
            assert entry["state"] == "completed"
            times = (
                "time_created_ns",
                "time_discovered_started_ns",
                "time_discovered_completed_ns",
            )
            assert [entry[t] for t in times] == sorted(entry[t] for t in times)
            name, description = entry["process_group"]
            assert description == "default_pg"
            assert record["pg_config"][name]["ranks"] == "[0, 1]"


def test_rank_that_did_not_call_is_found(ranks: Any, tmp_path: Path) -> None:
    """torchfrtrace finds the operation that rank 1 has not called."""
    for rank in range(2):
        ranks.kill(rank)  # the new processes have no entries of other tests
    ranks.join(2)
    ranks.call(range(2), "run_operation", op="barrier")
    ranks.set_operation_timeout(range(2), 2)
    ranks[0].start_case("run_operation", op="all_reduce")
    ranks.call([1], "sleep_for", seconds=0.3)
    (active,) = ranks.call([1], "list_active_operations")
    assert active == []
    assert "error" in ranks.wait_for_replies([0])[0]
    (active,) = ranks.call([0], "list_active_operations")
    assert [(e["profiling_name"], e["state"]) for e in active] == [("fsccl:all_reduce", "started")]
    ranks.call(range(2), "write_flight_record", directory=str(tmp_path))
    trace = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    result = subprocess.run(
        [*trace, str(tmp_path), "-p", "rank_"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    report = result.stdout + result.stderr
    assert result.returncode == 0, report
    assert "all_reduce" in report, report
    ranks.leave([0, 1])


@pytest.mark.compiler
def test_recorder_can_be_switched_off() -> None:
    program = """
import os, pickle, tempfile, torch, torch.distributed as dist
import flagscale.comm.fsccl
dist.init_process_group("fsccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
print(len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]))
dist.destroy_process_group()
"""
    counts = []
    for size in ("0", "5"):
        result = subprocess.run(
            ["env", f"TORCH_FR_BUFFER_SIZE={size}", sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        counts.append(result.stdout.strip())
    assert counts == ["0", "1"]
