"""Tests of two hosts with two ranks each over a slow or broken link."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bed.lab import Bed
from bed.plugin import require_bed
from support.fsccl_hosts import FIRST_PORT, HostRanks
from support.fsccl_ranks import ROOT, wait_for_replies

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

OPERATION_TIMEOUT_SECONDS = 3.0
MAX_DELAY_SECONDS = 8.0  # allowed on a busy machine; a hang takes far longer
OPERATIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
)


def test_slow_link_tool_measures_fsccl_and_gloo(built_extension: None, tmp_path: Path) -> None:
    require_bed()
    tool, result = ROOT / "tools" / "comm" / "slow_link.py", tmp_path / "result.json"
    options = ["--rate", "300mbit", "--sizes", "256k", "--rounds", "1", "--output", str(result)]
    process = subprocess.run(
        [sys.executable, str(tool), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    (row,) = json.loads(result.read_text())["rows"]
    assert row["bytes"] == 1 << 18
    assert min(row["fsccl_ms"], row["gloo_ms"], row["link_ms"]) > 0


@dataclass
class TwoHosts:
    """Ranks 0 and 1 on the first host, 2 and 3 on the second."""

    ranks: HostRanks
    log: Path
    job_numbers: Iterator[int] = field(default_factory=itertools.count)

    def join(self, operation_timeout: float) -> None:
        """Initialize a new job on all ranks. The first rank hosts its store."""
        port = FIRST_PORT + next(self.job_numbers)
        debug = {"FSCCL_DEBUG": "INFO", "FSCCL_CHUNK_BYTES": "262144"}
        self.ranks.join("job", operation_timeout, port, **debug)


@pytest.fixture(scope="module")
def hosts(built_extension: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    require_bed()
    log = tmp_path_factory.mktemp("links") / "stderr"
    with (
        Bed.open(tmp_path_factory.mktemp("bed"), 2) as bed,
        HostRanks.start(
            bed, [0, 0, 1, 1], timeout_seconds=60, stderr_files=dict.fromkeys(range(4), log)
        ) as host_ranks,
    ):
        yield TwoHosts(host_ranks, log)


def test_collectives_over_a_slow_link(hosts: TwoHosts) -> None:
    """Chunks in flight while others are reduced must not be lost or reordered."""
    hosts.join(60)
    hosts.ranks.bed[1].limit_rate("300mbit")
    try:
        for op in OPERATIONS:
            hosts.ranks.call(
                "check_operation",
                op=op,
                dtype="float32",
                count=500_001,
                red="sum",
                root=3,
                seed=1,
                strided=False,
            )
        hosts.ranks.call("check_messages", count=100_001)
    finally:
        hosts.ranks.bed[1].heal()
    log = hosts.log.read_text()
    assert "all_reduce #1 of 2000004 bytes of float32, sum: exchange between nodes" in log
    assert "2+2 ranks" in log


@pytest.mark.parametrize("op", ["all_reduce", "barrier", "swap"])
def test_every_rank_reports_a_broken_link(op: str, hosts: TwoHosts) -> None:
    hosts.join(OPERATION_TIMEOUT_SECONDS)
    hosts.ranks.call("run_operation", op="all_reduce")
    hosts.ranks.start_case("run_operation", op=op, repeat=100_000)
    time.sleep(0.3)
    hosts.ranks.bed[1].set_link("down")
    try:
        replies = wait_for_replies(hosts.ranks.ranks, OPERATION_TIMEOUT_SECONDS + MAX_DELAY_SECONDS)
    finally:
        hosts.ranks.bed[1].heal()
    for i, reply in replies.items():
        error = reply.get("error", "no error")
        remote_ranks = "23" if i < 2 else "01"
        assert re.search(
            rf"rank [{remote_ranks}] .*did not come within the timeout of 3 s", error
        ), f"{i}: {error}"
