"""Pipelined schedules measured by tools/comm/pipeline.py, on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "comm" / "pipeline.py"

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(TOOL), *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_every_combination_is_checked_measured_and_kept(built: None, tmp_path: Path) -> None:
    result, plot = tmp_path / "a result.json", tmp_path / "a plot.svg"
    done = run(
        *("-r", "3", "--sizes", "100K,200K", "-k", "0,2", "--nelem-per-send", "1000,5000"),
        *("--check-iters", "3", "-w", "1", "-n", "2", "--bw-unit", "GiB"),
        *("--json", result, "--plot", plot),
        FSCCL_DEBUG="INFO",
    )
    # Without a pipeline there is nothing to combine: three schedules an operation.
    for title in ("# Allgather #", "# ReduceScatter #", "# Allreduce #"):
        assert done.stdout.count(title) == 3
    assert done.stdout.count("k=2, nelem_per_send=5000, scratch_size=80000, dtype=fp32") == 3
    assert "check_iters=3, warmup_iters=1, iters=2" in done.stdout
    assert "all_reduce" in done.stderr
    assert "pipelined, k=2, 1000 elements a send" in done.stderr
    assert "two-shot in shared memory" in done.stderr
    kept = json.loads(result.read_text())
    assert (kept["ranks"], kept["device"], kept["type"], kept["iters"]) == (3, "cpu", "fp32", 2)
    rows = kept["results"]
    assert {(r["k"], r["nelem_per_send"]) for r in rows} == {(0, 1000), (2, 1000), (2, 5000)}
    assert {r["size"] for r in rows} == {102396, 204792}  # whole elements for three ranks
    assert all(0 < r["min_us"] <= r["avg_us"] and r["busbw"] > 0 for r in rows)
    assert "all_gather k=2 nelem=5000" in plot.read_text()


CHECKS = """
import os
import torch, torch.distributed as dist
from flagscale.bench.collectives.operations import data_type
from flagscale.bench.collectives.devices import choose
from flagscale.bench.collectives.devices import RankGroup
from flagscale.bench.pipeline.worker import Call
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for operation in ("all_gather", "reduce_scatter", "all_reduce"):
    group = RankGroup("gloo", (0,), 0, dist.group.WORLD)
    call = Call(operation, data_type("fp32"), 400, group, choose("cpu", 0))
    assert call.check(3), operation
    run = call.run
    def run_wrongly():
        run()
        call.part.output[77] += 1
    call.run = run_wrongly
    assert not call.check(4), operation
os._exit(0)  # now and then torch ends a process that has a gloo group with std::terminate
"""


def test_a_single_wrong_element_is_noticed() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", CHECKS], check=True, timeout=120, env=environment)
