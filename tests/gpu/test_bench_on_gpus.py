"""Benchmarks on CUDA, on all GPUs, up to 8.

Every operation checked, graphs, events, registered memory, NCCL options, and a comparison with
nccl-tests.

    pytest -m gpu tests/gpu/test_bench_on_gpus.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "flagscale.cli", "bench")
RANKS = min(torch.cuda.device_count(), 8)
several = pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")


def run_benchmark(directory: Path, benchmark: str, *words: str, **environment: str) -> Any:
    """Run a benchmark on all GPUs and return its output."""
    process = subprocess.run(
        [*COMMAND, benchmark, "-r", str(RANKS), *words],
        cwd=directory,
        env={**os.environ, "NCCL_NVLS_ENABLE": "0", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    return process


def run_checked_benchmark(directory: Path, line: str, **environment: str) -> list[dict[str, Any]]:
    """Run a benchmark with checks, and return its rows, which must all be correct."""
    run_benchmark(
        directory, "collectives", *line.split(), "-c", "--json", "out.json", **environment
    )
    rows: list[dict[str, Any]] = json.loads((directory / "out.json").read_text())["results"]
    for row in rows:
        assert row["failure"] is None, row
        assert row["wrong"] in (0, None), row
        assert row["time:avg(us)"] > 0, row
    return rows


def test_every_operation_is_right_for_every_type(tmp_path: Path) -> None:
    rows = run_checked_benchmark(tmp_path, "all -d all -b 64K -e 64K -n 3 -w 1 --both-places")
    assert {row["backend"] for row in rows} == {"nccl"}
    assert {"all_reduce", "all_to_all_v", "permute", "gather"} <= {r["operation"] for r in rows}


def test_every_reduction_and_root(tmp_path: Path) -> None:
    line = "allr,redsct,red,bcast -d fp32,bf16,int32 -o all --root -1 -b 4K -e 4K -n 2 -w 1"
    assert len(run_checked_benchmark(tmp_path, line)) > 20


@pytest.mark.parametrize(
    ("line", "samples"),
    [
        ("-I 6 -W 2 -n 4", 6),
        ("-I 6 -n 4 -m 3", 6),
        ("--timing events -n 12", 12),
        ("--timing events -I 5 -n 4 --unique-buff", 5),
        ("-z 1 -n 7", 7),
        ("-C 1 -n 7", 7),
    ],
    ids=["graph", "aggregated", "events", "events-graph-unique", "blocking", "issue"],
)
def test_ways_to_time(tmp_path: Path, line: str, samples: int) -> None:
    operations = "allr,allg,redsct,alltoall -d bf16 -b 64K -e 1M -f 16 -w 2 --stats avg,min,p50,max"
    for row in run_checked_benchmark(tmp_path, f"{operations} {line}"):
        assert row["samples"] == samples
        statistics = [row[f"time:{name}(us)"] for name in ("min", "p50", "max")]
        assert statistics == sorted(statistics)
        assert statistics[0] > 0


@pytest.mark.parametrize(
    "line",
    [
        *("-R 1", "-R 1 -I 4 -n 4"),
        *("--unique-buff", "--unique-buff --shared-output-buff"),
        *("--coalesced-cc-size-ratio [1,2,1]", "--coalesced-cc-size-ratio [1,3] -I 3 -n 4"),
    ],
)
def test_ways_to_hold_the_data(tmp_path: Path, line: str) -> None:
    run_checked_benchmark(
        tmp_path, f"allr,allg,redsct -d bf16 -b 256K -e 4M -f 16 -n 5 -w 1 {line}"
    )


@pytest.mark.parametrize("line", ["-R 2", "-R 2 -I 4 -n 4"], ids=["eager", "graph"])
def test_symmetric_windows_or_why_not(tmp_path: Path, line: str) -> None:
    words = f"allr,allg,redsct -d bf16 -b 256K -e 4M -f 16 -n 5 -w 1 {line}"
    try:
        run_checked_benchmark(tmp_path, words)
    except AssertionError as error:
        if "symmetric windows need memory of NCCL's own allocator" not in str(error):
            raise
        assert os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1"


def test_options_reach_nccl(tmp_path: Path) -> None:
    line = "allr -b 1M -e 1M -n 2 -w 1 --debug --comm max_ctas=4 is_high_priority_stream=true"
    process = run_benchmark(tmp_path, "collectives", *line.split())
    assert "(max_ctas=4, is_high_priority_stream=True)" in process.stdout
    assert "NCCL_MAX_CTAS set by environment to 4" in process.stdout + process.stderr
    program = """
import torch, torch.distributed as dist
from flagscale.bench.collectives.devices import create_group, select_rank_device
from flagscale.comm import registry
device = select_rank_device("cuda", 0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
values = registry.parse_backend_options("nccl", ["max_ctas=4", "is_high_priority_stream=true"])
group = create_group(registry.get_backend("nccl"), ((0,),), 0, device, 60, values)
options = group.backend_for(device).options
assert options.config.max_ctas == 4, options.config.max_ctas
assert options.is_high_priority_stream
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


@several
def test_gloo_on_gpu_memory_except_messages(tmp_path: Path) -> None:
    rows = run_checked_benchmark(tmp_path, "all --backend gloo -d fp32 -b 64K -e 64K -n 2 -w 1")
    operations = {row["operation"] for row in rows}
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"} <= operations
    assert not operations & {"sendrecv", "permute"}


@several
def test_fsccl_on_registered_memory(tmp_path: Path) -> None:
    line = "allr,allg,redsct --backend fsccl -d bf16 -b 256K -e 4M -f 16 -n 5 -w 1 -R 2"
    for more in ("", "-I 4 --show-algorithm"):
        rows = run_checked_benchmark(tmp_path, f"{line} {more}")
        assert len(rows) == 6
    assert "NVLink, direct" in {row["algorithm"] for row in rows}


@several
def test_the_limit_is_measured(tmp_path: Path) -> None:
    (row,) = run_checked_benchmark(tmp_path, "allr -d bf16 -b 256M -e 256M -n 5 -w 2 --probe")
    assert row["probe_share"] > 0


@several
def test_groups_in_every_arm(tmp_path: Path) -> None:
    run_benchmark(tmp_path, "groups", "--groups", "1,3", "--repeats", "2", "--json", "groups.json")
    rows = json.loads((tmp_path / "groups.json").read_text())["results"]
    assert {row["arm"] for row in rows} == {"bound", "cold", "warm", "split"}
    for row in rows:
        assert all(sample["memory"] > 0 for sample in row["samples"])
        if row["arm"] == "split":
            assert all(sample["splits"] >= row["groups"] for sample in row["samples"])


@several
def test_figures_agree_with_nccl_tests(tmp_path: Path) -> None:
    # Times are compared by running the tool by hand, on a quiet machine.
    line = "-b 64K -e 4M -f 64 -n 5 -w 2 -I 4 --rounds 3 --limit 1e9 --json agreement.json"
    run_benchmark(tmp_path, "agreement", *line.split())
    report = json.loads((tmp_path / "agreement.json").read_text())
    assert report["library"].startswith("NCCL ")
    assert len(report["rows"]) == 9 * 2
    assert all(row["definition"] == pytest.approx(1) for row in report["rows"])


def test_the_examples_assertions_hold() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    process = subprocess.run(
        [sys.executable, *launcher, "examples/comm/torch_api.py", "--distributed-backend", "nccl"],
        cwd=ROOT,
        env={**os.environ, "NCCL_NVLS_ENABLE": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr[-4000:]
    assert process.stdout.count("ok: ") == 13
