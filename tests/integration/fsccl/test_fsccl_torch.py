"""Tests of fsccl with torch's features: works, groups, messages, DDP, FSDP2, DTensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.integration, pytest.mark.torch]

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "case",
    [
        "check_asynchronous",
        "check_futures_beside_ended_works",
        "check_overlapping_groups",
        "check_crossed_groups",
        "check_coalesced",
        "check_objects",
    ],
)
def test_groups_and_works(run_on_four_ranks: Any, case: str) -> None:
    run_on_four_ranks(case)


@pytest.mark.parametrize("count", [0, 5, 20_000, 1_000_000], ids=lambda n: f"{n}-elements")
def test_messages(run_on_four_ranks: Any, count: int) -> None:
    run_on_four_ranks("check_messages", count=count)


@pytest.mark.parametrize("case", ["train_ddp", "train_fsdp"])
def test_training(run_on_four_ranks: Any, case: str) -> None:
    run_on_four_ranks(case, steps=3)


@pytest.mark.parametrize("case", ["check_dtensors", "check_functional_collectives"])
def test_features_on_collectives(run_on_four_ranks: Any, case: str) -> None:
    run_on_four_ranks(case)


def test_as_many_groups_as_megatron_makes(run_on_four_ranks: Any) -> None:
    run_on_four_ranks("check_many_groups", count=33)


def test_splitting_is_rejected(run_on_four_ranks: Any) -> None:
    for error in run_on_four_ranks("get_split_error"):
        assert "its backend does not support splitting" in error


def test_memory_registration_needs_gpus(run_on_four_ranks: Any) -> None:
    for default_error, symmetric_error in run_on_four_ranks("get_registration_errors"):
        assert "pass symm=True to confirm that" in default_error
        assert "GPUs of one host with NVLink between them" in symmetric_error


def test_errors_of_wrong_calls(run_on_four_ranks: Any) -> None:
    for errors in run_on_four_ranks("collect_usage_errors"):
        band, sparse, uneven_parts, sizes, types, output_size = errors
        assert "ValueError: fsccl: reduction band is not defined for float32" in band
        assert "all_reduce of sparse tensors supports only SUM" in sparse
        assert "5 elements for 5 are not equal parts of 4 ranks" in uneven_parts
        assert "4 elements of Float are not 4 times 2 of Float" in sizes
        assert "8 elements of Double are not 4 times 2 of Float" in types
        assert "the output for this rank has 2 elements and its input 9" in output_size


def run_script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    setup = (
        "import torch, torch.distributed as dist, flagscale.comm.fsccl\n"
        "dist.init_process_group('fsccl', store=dist.HashStore(), rank=0, world_size=1)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", setup + text],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@pytest.mark.compiler
def test_program_without_destroy_exits_cleanly() -> None:
    process = run_script("dist.all_reduce(torch.ones(3), async_op=True).wait(); print('end')")
    assert (process.returncode, process.stdout) == (0, "end\n"), process.stderr


@pytest.mark.compiler
def test_debug_logs_the_algorithm() -> None:
    text = "dist.all_reduce(torch.ones(3)); dist.all_reduce(torch.ones(100000)); dist.barrier()"
    log = run_script(text, FSCCL_DEBUG="INFO").stderr
    assert "all_reduce #1 of 12 bytes of float32, sum: one-shot in shared memory" in log
    assert "all_reduce #2 of 400000 bytes of float32, sum: two-shot in shared memory" in log
    assert "barrier #3" in log


@pytest.mark.slow
def test_features_tool_measures_all(built_extension: None, tmp_path: Path) -> None:
    tool, result = ROOT / "tools" / "comm" / "features.py", tmp_path / "result.json"
    process = subprocess.run(
        [sys.executable, str(tool), "--rounds", "2", "--warm", "1", "--json", str(result)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == len({row["feature"] for row in rows}) == 8
    assert all(row["gloo_ms"] > 0 < row["fsccl_ms"] for row in rows)
