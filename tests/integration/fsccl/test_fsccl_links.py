"""Two hosts of two ranks each, and what their link can do to them: be slow, or be cut."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bed.lab import Bed
from bed.plugin import need_bed
from fsccl_ranks import ROOT, Rank, replies, results

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

FIRST_PORT = 29500  # of stores, which the first host's first rank keeps
RANKS = 4
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

    bed: Bed
    ranks: dict[int, Rank]
    said: Path
    jobs: Iterator[int] = field(default_factory=itertools.count)

    def join(self, timeout: float) -> None:
        """Make all of them a job, over a store that the first rank keeps."""
        number = next(self.jobs)
        for i, rank in self.ranks.items():
            rank.ask(
                "join",
                rank=i,
                size=RANKS,
                host=self.bed[0].address,
                port=FIRST_PORT + number,
                key="job",
                timeout=timeout,
                environment={"FSCCL_DEBUG": "INFO", "FSCCL_CHUNK_BYTES": "262144"},
            )
        results(replies(self.ranks, 90))

    def ask(self, case: str, **arguments: object) -> None:
        for rank in self.ranks.values():
            rank.ask(case, **arguments)

    def call(self, case: str, **arguments: object) -> None:
        self.ask(case, **arguments)
        results(replies(self.ranks, 60))


@pytest.fixture(scope="module")
def hosts(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    need_bed()
    said = tmp_path_factory.mktemp("links") / "said"
    with Bed.open(tmp_path_factory.mktemp("bed"), RANKS // 2) as bed, ExitStack() as stack:
        ranks = {}
        for i in range(RANKS):
            enter = ("nsenter", "-t", str(bed[i // 2].pid), "-a", "--")
            ranks[i] = Rank(prefix=enter, stderr=said)
            stack.callback(ranks[i].end)
            stack.callback(ranks[i].process.kill)
        yield Hosts(bed, ranks, said)


def test_collectives_over_a_slow_link(hosts: Hosts) -> None:
    """Chunks in flight while others are summed and gathered: nothing may be lost or mixed up."""
    hosts.join(60)
    hosts.bed[1].shape("300mbit")
    try:
        for op in OPS:
            hosts.call(
                "check",
                op=op,
                dtype="float32",
                count=500_001,
                red="sum",
                root=3,
                seed=1,
                strided=False,
            )
        hosts.call("messages", count=100_001)
    finally:
        hosts.bed[1].heal()
    said = hosts.said.read_text()
    assert "all_reduce #1 of 2000004 bytes of float32, sum: exchange between clusters" in said
    assert "2+2 ranks" in said


@pytest.mark.parametrize("op", ["all_reduce", "barrier", "swap"])
def test_a_cut_link_is_told_by_every_rank(op: str, hosts: Hosts) -> None:
    hosts.join(TIMEOUT)
    hosts.call("call", op="all_reduce")
    hosts.ask("call", op=op, repeat=100_000)
    time.sleep(0.3)
    hosts.bed[1].link("down")
    try:
        found = replies(hosts.ranks, TIMEOUT + SLACK)
    finally:
        hosts.bed[1].heal()
    for i, reply in found.items():
        error = reply.get("error", "no error")
        others = "23" if i < 2 else "01"
        assert re.search(rf"rank [{others}] .*did not come within 3 s", error), f"{i}: {error}"
