"""Two hosts of two ranks each, and what their link can do to them: be slow, or be cut."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from bed.lab import Bed
from bed.plugin import need_bed
from fsccl_ranks import ROOT, Rank, replies, results

pytestmark = [pytest.mark.integration, pytest.mark.torch]

PORT = 29500  # of the store, which the first host's first rank keeps
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


@dataclass
class Job:
    """Ranks 0 and 1 on the first host, 2 and 3 on the second."""

    bed: Bed
    ranks: dict[int, Rank]
    said: Path

    def ask(self, case: str, **arguments: object) -> None:
        for rank in self.ranks.values():
            rank.ask(case, **arguments)

    def call(self, case: str, **arguments: object) -> None:
        self.ask(case, **arguments)
        results(replies(self.ranks, 60))


@contextmanager
def job_on(bed: Bed, said: Path, timeout: float) -> Iterator[Job]:
    places = [bed[i // 2].pid for i in range(RANKS)]
    ranks = {
        i: Rank(prefix=("nsenter", "-t", str(pid), "-a", "--"), stderr=said)
        for i, pid in enumerate(places)
    }
    try:
        for i, rank in ranks.items():
            rank.ask(
                "join",
                rank=i,
                size=RANKS,
                host=bed[0].address,
                port=PORT,
                key="job",
                timeout=timeout,
                environment={"FSCCL_DEBUG": "INFO", "FSCCL_CHUNK_BYTES": "262144"},
            )
        results(replies(ranks, 90))
        yield Job(bed, ranks, said)
    finally:
        for rank in ranks.values():
            rank.process.kill()
            rank.end()


@pytest.mark.bed(hosts=2)
def test_collectives_over_a_slow_link(built: None, bed: Bed, tmp_path: Path) -> None:
    """Chunks in flight while others are summed and gathered: nothing may be lost or mixed up."""
    with job_on(bed, tmp_path / "said", 60) as job:
        bed[1].shape("300mbit")
        for op in OPS:
            job.call(
                "check",
                op=op,
                dtype="float32",
                count=500_001,
                red="sum",
                root=3,
                seed=1,
                strided=False,
            )
        job.call("messages", count=100_001)
        said = job.said.read_text()
    assert "all_reduce #1 of 2000004 bytes of float32, sum: reduce-scatter inside, exchange" in said
    assert "2+2 ranks" in said


@pytest.mark.bed(hosts=2)
@pytest.mark.parametrize("op", ["all_reduce", "swap"])
def test_a_cut_link_is_told_by_every_rank(op: str, built: None, bed: Bed, tmp_path: Path) -> None:
    with job_on(bed, tmp_path / "said", TIMEOUT) as job:
        job.call("call", op="all_reduce")
        job.ask("call", op=op, repeat=100_000)
        time.sleep(0.3)
        started = time.monotonic()
        bed[1].link("down")
        found = replies(job.ranks, TIMEOUT + SLACK)
        assert time.monotonic() - started < TIMEOUT + SLACK
        for i, reply in found.items():
            error = reply.get("error", "no error")
            others = "23" if i < 2 else "01"
            assert re.search(rf"rank [{others}] .*did not come within 3 s", error), f"{i}: {error}"


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
