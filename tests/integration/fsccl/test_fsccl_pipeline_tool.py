"""Tests of ``flagscale bench pipeline`` with real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-m", "flagscale.cli", "bench", "pipeline")

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def run_benchmark(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process


def test_all_combinations_are_checked_and_measured(built_extension: None, tmp_path: Path) -> None:
    result, plot = tmp_path / "a result.json", tmp_path / "a plot.svg"
    process = run_benchmark(
        "-r",
        "3",
        "--sizes",
        "100K,200K",
        "-k",
        "0,2",
        "--nelem-per-send",
        "1000,5000",
        "--check-iters",
        "3",
        "-w",
        "1",
        "-n",
        "2",
        "--bw-unit",
        "GiB",
        "--json",
        result,
        "--plot",
        plot,
        FSCCL_DEBUG="INFO",
    )
    # Settings without a pipeline are not combined: three schedules per operation.
    for title in ("# Allgather #", "# ReduceScatter #", "# Allreduce #"):
        assert process.stdout.count(title) == 3
    assert process.stdout.count("k=2, nelem_per_send=5000, scratch_size=80000, dtype=fp32") == 3
    assert "check_iters=3, warmup_iters=1, iters=2" in process.stdout
    assert "all_reduce" in process.stderr
    assert "pipelined, k=2, 1000 elements a send" in process.stderr
    assert "two-shot in shared memory" in process.stderr
    record = json.loads(result.read_text())
    assert (record["ranks"], record["device"], record["type"], record["iters"]) == (
        3,
        "cpu",
        "fp32",
        2,
    )
    rows = record["results"]
    assert {(r["k"], r["nelem_per_send"]) for r in rows} == {(0, 1000), (2, 1000), (2, 5000)}
    assert {r["size"] for r in rows} == {
        102396,
        204792,
    }  # multiples of the element size for three ranks
    assert all(0 < r["min_us"] <= r["avg_us"] and r["busbw"] > 0 for r in rows)
    assert "all_gather k=2 nelem=5000" in plot.read_text()


CHECKS = """
import os
import torch, torch.distributed as dist
from flagscale.bench.collectives.operations import find_data_type
from flagscale.bench.collectives.devices import select_rank_device
from flagscale.bench.collectives.devices import RankGroup
from flagscale.bench.pipeline.worker import CheckedCall
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for operation in ("all_gather", "reduce_scatter", "all_reduce"):
    group = RankGroup("gloo", (0,), 0, dist.group.WORLD)
    call = CheckedCall(operation, find_data_type("fp32"), 400, group, select_rank_device("cpu", 0))
    assert call.check(3), operation
    run = call.run
    def run_with_error():
        run()
        call.part.output[77] += 1
    call.run = run_with_error
    assert not call.check(4), operation
os._exit(0)  # torch sometimes ends a process with a gloo group by std::terminate
"""


def test_check_detects_a_single_wrong_element() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", CHECKS], check=True, timeout=120, env=environment)
