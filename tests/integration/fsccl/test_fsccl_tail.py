"""all_reduce in bounded time on real ranks and links: replicas are alike, whatever is lost."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bed.lab import Bed
from bed.plugin import need_bed
from support.fsccl_hosts import HostRanks
from support.fsccl_ranks import ROOT, replies

pytestmark = [pytest.mark.integration, pytest.mark.torch]

COUNT = 1 << 18  # a MiB of float32
LEARNING = "exactly: learning what the network carries"
BOUNDED = "by datagrams, in bounded time"
REPEATED = "by datagrams, then exactly: too much was lost"
# A rate that a busy machine keeps up with, so that little is late.
TAIL = {"FSCCL_TAIL": "bounded", "FSCCL_TAIL_RATE": "400"}


@pytest.mark.parametrize(
    ("clusters", "dtype", "red"),
    [("1,1,1,1", "float32", "sum"), ("2,2", "bfloat16", "avg"), ("1,1", "float16", "sum")],
)
def test_replicas_are_alike_on_real_sockets(
    ranks: Any, clusters: str, dtype: str, red: str
) -> None:
    members = range(sum(map(int, clusters.split(","))))
    ranks.join(len(members), **TAIL, FSCCL_TAIL_LIMIT="100", FSCCL_CLUSTERS=clusters)
    every = ranks.call(members, "bounded", count=2 * COUNT + 3, rounds=8, dtype=dtype, red=red)
    (counted, *_) = ranks.call(members, "tail_statistics")
    ranks.leave(members)
    assert all(one == every[0] for one in every), "ranks tell of unlike operations"
    assert [algorithm for algorithm, _ in every[0]] == [LEARNING] * 4 + [BOUNDED] * 4
    assert all(exact for _, exact in every[0][:4])
    assert (counted["operations"], counted["exact"], counted["repeated"]) == (4, 4, 0)
    assert counted["forged"] == counted["foreign"] == counted["malformed"] == 0
    if counted["excluded"] == counted["scaled"] == 0:
        assert all(exact for _, exact in every[0])


@pytest.mark.parametrize("clusters", ["4", "3,1"])
def test_where_it_cannot_be_it_is_exact(ranks: Any, clusters: str) -> None:
    """On one host nothing is lost; unlike hosts have no circles."""
    ranks.join(4, **TAIL, FSCCL_CLUSTERS=clusters)
    every = ranks.call(range(4), "bounded", count=COUNT, rounds=5)
    assert all(exact and "datagrams" not in a for one in every for a, exact in one)
    assert ranks.call(range(4), "tail_statistics") == [{}] * 4
    ranks.leave(range(4))


@pytest.mark.parametrize("native", ["own", "gloo"])
def test_works(ranks: Any, native: str) -> None:
    """Also of groups whose other operations an engine does: the core sums for it."""
    environment = {**TAIL, "FSCCL_TAIL_LIMIT": "0", "FSCCL_CLUSTERS": "2,2"}
    ranks.join(4, **environment, FSCCL_NATIVE=native)
    ranks.call(range(4), "bounded_works", count=COUNT)
    (counted, *_) = ranks.call(range(4), "tail_statistics")
    assert counted["operations"] > 0
    (said, *_) = ranks.call(range(4), "exact_beside")
    assert all("datagrams" not in one for one in said), said
    ranks.leave(range(4))


def test_what_is_no_gradient_is_exact(ranks: Any) -> None:
    ranks.join(2, **TAIL, FSCCL_CLUSTERS="1,1")
    (said, _) = ranks.call(range(2), "exact_beside")
    assert all("datagrams" not in one and one != LEARNING for one in said), said
    ranks.leave(range(2))
    ranks.join(2, FSCCL_CLUSTERS="1,1", FSCCL_TAIL_RATE="400", FSCCL_TAIL_LIMIT="100")
    (said, _) = ranks.call(range(2), "bounded_of_a_group", tail="bounded")
    assert said == [LEARNING] * 4 + [BOUNDED] * 2
    ranks.leave(range(2))


def test_groups_are_told_by_their_descriptions(ranks: Any) -> None:
    meant = {"FSCCL_TAIL_GROUPS": "*DATA_PARALLEL*,mine", "FSCCL_TAIL_LIMIT": "100"}
    ranks.join(2, **TAIL, **meant, FSCCL_CLUSTERS="1,1")
    names = ["EXPERT_DATA_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP", "mine", "not mine"]
    (said, _) = ranks.call(range(2), "bounded_of_descriptions", descriptions=names)
    assert [said[name] == BOUNDED for name in names] == [True, False, True, False]
    ranks.leave(range(2))


def test_a_killed_rank_is_named(ranks: Any) -> None:
    ranks.join(4, **TAIL, FSCCL_TAIL_LIMIT="100", FSCCL_CLUSTERS="1,1,1,1")
    ranks.call(range(4), "bounded", count=COUNT, rounds=5)
    for i in range(3):
        ranks[i].ask("call", op="all_reduce", repeat=3)
    time.sleep(0.1)
    ranks.kill(3)
    for i, reply in ranks.replies([0, 1, 2]).items():
        sentence = rf", rank {i}: rank 3 \[.*\] ended without leaving the group$"
        assert re.search(sentence, reply["error"]), reply["error"]


def test_unlike_operations_are_told_apart(ranks: Any) -> None:
    ranks.join(2, timeout=20, **TAIL, FSCCL_TAIL_LIMIT="100", FSCCL_CLUSTERS="1,1")
    for i in range(2):
        ranks[i].ask("unlike_sizes", warm=4)
    for reply in ranks.replies(range(2)).values():
        assert "called another all_reduce" in reply["error"]


@pytest.fixture(scope="module")
def four_hosts(
    built: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HostRanks, Path]]:
    """Ranks on four hosts, each behind a gigabit with room for 64 KB on the switch's side."""
    need_bed()
    said = tmp_path_factory.mktemp("tail") / "said"
    with (
        Bed.open(tmp_path_factory.mktemp("bed"), 4) as bed,
        HostRanks.start(bed, range(4), limit=120, said={0: said}) as started,
    ):
        for host in bed.hosts:
            bucket = ["tbf", "rate", "1gbit", "burst", "96kb", "limit", "64kb"]
            subprocess.run(
                ["tc", "qdisc", "replace", "dev", host.veth, "root", *bucket], check=True
            )
        yield started, said


def test_under_traffic_and_without_any_datagram(four_hosts: tuple[HostRanks, Path]) -> None:
    hosts, said = four_hosts
    bed = hosts.bed
    environment = {**TAIL, "FSCCL_TAIL_LIMIT": "60", "FSCCL_TAIL_FEEDBACK": "1"}
    hosts.join("tail", 60, **environment)
    traffic = _traffic(bed, seconds=60)
    try:
        every = hosts.call("bounded", count=COUNT // 4, rounds=7)
    finally:
        traffic.kill()
        traffic.wait()
    assert all(one == every[0] for one in every)
    assert any(algorithm == BOUNDED for algorithm, _ in every[0])
    bed[1].run(
        ["nft", "add table inet t; add chain inet t in { type filter hook input priority 0; }"]
    )
    bed[1].run(["nft", "add rule inet t in meta l4proto udp drop"])
    try:
        # Those after a repeated one go the exact way at once: up to there it may have been so.
        every = hosts.call("bounded", count=COUNT // 4, rounds=16)
    finally:
        bed[1].heal()
    assert all(one == every[0] for one in every)
    assert REPEATED in [algorithm for algorithm, _ in every[0]]
    assert all(exact for algorithm, exact in every[0] if algorithm != BOUNDED)
    assert re.search(
        r"lost too much .*: it is repeated exactly, and the next \d+", said.read_text()
    )


def test_a_cut_link_ends_the_job_with_a_sentence(four_hosts: tuple[HostRanks, Path]) -> None:
    """Whoever cannot be reached by any way is waited for as long as the group may wait."""
    hosts, _ = four_hosts
    bed = hosts.bed
    hosts.call("leave")
    hosts.join("cut", 4, **TAIL, FSCCL_TAIL_LIMIT="100")
    (said, *_) = hosts.call("bounded", count=COUNT // 4, rounds=5)
    assert said[-1][0] == BOUNDED
    hosts.ask("call", op="all_reduce", count=COUNT // 4, repeat=100_000)
    time.sleep(0.2)
    bed[1].link("down")
    try:
        found = replies(hosts.ranks, 30)
    finally:
        bed[1].heal()
    for i, reply in found.items():
        others = "023" if i == 1 else "1"
        sentence = rf"rank {i}: .*rank [{others}] \[.*\] did not come within 4 s"
        assert re.search(sentence, reply.get("error", "none")), f"{i}: {reply}"


def _traffic(bed: Bed, seconds: float) -> subprocess.Popen[bytes]:
    """From the second host to the others, nearly half of what their links carry."""
    to = [bed[i].address for i in (0, 2, 3)]
    program = f"import fsccl_tail_cases as c; c.blow({to!r}, 9, 450, {seconds})"
    return subprocess.Popen(
        ["nsenter", "-t", str(bed[1].pid), "-a", "--", sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
