"""Two hosts of two ranks each, and what their link can do to them: be slow, or be cut."""

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
from bed.plugin import need_bed
from support.fsccl_hosts import FIRST_PORT, HostRanks
from support.fsccl_ranks import ROOT, replies

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

TIMEOUT = 3.0  # seconds, of operations
SLACK = 8.0  # for a busy machine; a hang is far longer
OPS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
)


def test_the_link_is_measured(built: None, tmp_path: Path) -> None:
    need_bed()
    tool, result = ROOT / "tools" / "comm" / "slow_link.py", tmp_path / "result.json"
    options = ["--rate", "300mbit", "--sizes", "256k", "--rounds", "1", "--output", str(result)]
    done = subprocess.run(
        [sys.executable, str(tool), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (row,) = json.loads(result.read_text())["rows"]
    assert row["bytes"] == 1 << 18
    assert min(row["fsccl_ms"], row["gloo_ms"], row["link_ms"]) > 0


@dataclass
class Hosts:
    """Ranks 0 and 1 on the first host, 2 and 3 on the second."""

    started: HostRanks
    said: Path
    jobs: Iterator[int] = field(default_factory=itertools.count)

    def join(self, timeout: float) -> None:
        """Make all of them a job, over a store that the first rank keeps."""
        port = FIRST_PORT + next(self.jobs)
        debug = {"FSCCL_DEBUG": "INFO", "FSCCL_CHUNK_BYTES": "262144"}
        self.started.join("job", timeout, port, **debug)


@pytest.fixture(scope="module")
def hosts(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    need_bed()
    said = tmp_path_factory.mktemp("links") / "said"
    with (
        Bed.open(tmp_path_factory.mktemp("bed"), 2) as bed,
        HostRanks.start(bed, [0, 0, 1, 1], limit=60, said=dict.fromkeys(range(4), said)) as started,
    ):
        yield Hosts(started, said)


def test_collectives_over_a_slow_link(hosts: Hosts) -> None:
    """Chunks in flight while others are summed and gathered: nothing may be lost or mixed up."""
    hosts.join(60)
    hosts.started.bed[1].shape("300mbit")
    try:
        for op in OPS:
            hosts.started.call(
                "check",
                op=op,
                dtype="float32",
                count=500_001,
                red="sum",
                root=3,
                seed=1,
                strided=False,
            )
        hosts.started.call("messages", count=100_001)
    finally:
        hosts.started.bed[1].heal()
    said = hosts.said.read_text()
    assert "all_reduce #1 of 2000004 bytes of float32, sum: exchange between clusters" in said
    assert "2+2 ranks" in said


@pytest.mark.parametrize("op", ["all_reduce", "barrier", "swap"])
def test_a_cut_link_is_told_by_every_rank(op: str, hosts: Hosts) -> None:
    hosts.join(TIMEOUT)
    hosts.started.call("call", op="all_reduce")
    hosts.started.ask("call", op=op, repeat=100_000)
    time.sleep(0.3)
    hosts.started.bed[1].link("down")
    try:
        found = replies(hosts.started.ranks, TIMEOUT + SLACK)
    finally:
        hosts.started.bed[1].heal()
    for i, reply in found.items():
        error = reply.get("error", "no error")
        others = "23" if i < 2 else "01"
        assert re.search(rf"rank [{others}] .*did not come within 3 s", error), f"{i}: {error}"
