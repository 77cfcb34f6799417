"""Tests of bounded all_reduce (csrc/datagram) on real ranks: results are identical on all ranks
despite packet loss.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

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
from bed.plugin import require_bed
from support.fsccl_hosts import HostRanks
from support.fsccl_ranks import ROOT, wait_for_replies
from support.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.integration, pytest.mark.torch]

ELEMENTS = 1 << 18  # a MiB of float32
EXACT_WHILE_LEARNING = "exactly: learning what the network carries"
BOUNDED = "by datagrams, in bounded time"
REPEATED_EXACTLY = "by datagrams, then exactly: too much was lost"
# A rate that a busy machine sustains, so that few packets are late.
TAIL_SETTINGS = {"FSCCL_TAIL": "bounded", "FSCCL_TAIL_RATE": "400"}


@pytest.mark.parametrize(
    ("clusters", "dtype", "red"),
    [("1,1,1,1", "float32", "sum"), ("2,2", "bfloat16", "avg"), ("1,1", "float16", "sum")],
)
def test_replicas_are_identical_on_real_sockets(
    ranks: Any, clusters: str, dtype: str, red: str
) -> None:
    members = range(sum(map(int, clusters.split(","))))
    ranks.join(len(members), **TAIL_SETTINGS, FSCCL_TAIL_LIMIT="100", FSCCL_CLUSTERS=clusters)
    results_by_rank = ranks.call(
        members, "run_all_reduces", count=2 * ELEMENTS + 3, rounds=8, dtype=dtype, red=red
    )
    (statistics, *_) = ranks.call(members, "get_tail_statistics")
    ranks.leave(members)
    assert all(results == results_by_rank[0] for results in results_by_rank), (
        "ranks report different operations"
    )
    assert [algorithm for algorithm, _ in results_by_rank[0]] == [EXACT_WHILE_LEARNING] * 4 + [
        BOUNDED
    ] * 4
    assert all(exact for _, exact in results_by_rank[0][:4])
    assert (statistics["operations"], statistics["exact"], statistics["repeated"]) == (4, 4, 0)
    assert statistics["forged"] == statistics["foreign"] == statistics["malformed"] == 0
    if statistics["excluded"] == statistics["scaled"] == 0:
        assert all(exact for _, exact in results_by_rank[0])


@pytest.mark.parametrize("clusters", ["4", "3,1"])
def test_unsupported_layouts_are_exact(ranks: Any, clusters: str) -> None:
    """A single node loses no packets, and nodes of different sizes form no rails."""
    ranks.join(4, **TAIL_SETTINGS, FSCCL_CLUSTERS=clusters)
    results_by_rank = ranks.call(range(4), "run_all_reduces", count=ELEMENTS, rounds=5)
    assert all(
        exact and "datagrams" not in algorithm
        for results in results_by_rank
        for algorithm, exact in results
    )
    assert ranks.call(range(4), "get_tail_statistics") == [{}] * 4
    ranks.leave(range(4))


@pytest.mark.parametrize("native", ["own", "gloo"])
def test_asynchronous_works_run_in_bounded_time(ranks: Any, native: str) -> None:
    """With gloo, the group's other operations use the device engine, and the core runs these."""
    environment = {**TAIL_SETTINGS, "FSCCL_TAIL_LIMIT": "0", "FSCCL_CLUSTERS": "2,2"}
    ranks.join(4, **environment, FSCCL_NATIVE=native)
    ranks.call(range(4), "check_works", count=ELEMENTS)
    (statistics, *_) = ranks.call(range(4), "get_tail_statistics")
    assert statistics["operations"] > 0
    (algorithms, *_) = ranks.call(range(4), "list_exact_algorithms")
    assert all("datagrams" not in algorithm for algorithm in algorithms), algorithms
    ranks.leave(range(4))


def test_other_operations_and_groups_are_exact(ranks: Any) -> None:
    ranks.join(2, **TAIL_SETTINGS, FSCCL_CLUSTERS="1,1")
    (algorithms, _) = ranks.call(range(2), "list_exact_algorithms")
    assert all(
        "datagrams" not in algorithm and algorithm != EXACT_WHILE_LEARNING
        for algorithm in algorithms
    ), algorithms
    ranks.leave(range(2))
    ranks.join(2, FSCCL_CLUSTERS="1,1", FSCCL_TAIL_RATE="400", FSCCL_TAIL_LIMIT="100")
    (algorithms, _) = ranks.call(range(2), "run_group_with_options", tail="bounded")
    assert algorithms == [EXACT_WHILE_LEARNING] * 4 + [BOUNDED] * 2
    ranks.leave(range(2))


def test_groups_are_selected_by_description(ranks: Any) -> None:
    group_settings = {"FSCCL_TAIL_GROUPS": "*DATA_PARALLEL*,mine", "FSCCL_TAIL_LIMIT": "100"}
    ranks.join(2, **TAIL_SETTINGS, **group_settings, FSCCL_CLUSTERS="1,1")
    names = ["EXPERT_DATA_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP", "mine", "not mine"]
    (algorithms, _) = ranks.call(range(2), "run_groups_by_description", descriptions=names)
    assert [algorithms[name] == BOUNDED for name in names] == [True, False, True, False]
    ranks.leave(range(2))


def test_survivors_name_a_killed_rank(ranks: Any) -> None:
    ranks.join(4, **TAIL_SETTINGS, FSCCL_TAIL_LIMIT="100", FSCCL_CLUSTERS="1,1,1,1")
    ranks.call(range(4), "run_all_reduces", count=ELEMENTS, rounds=5)
    for i in range(3):
        ranks[i].start_case("run_operation", op="all_reduce", repeat=3)
    time.sleep(0.1)
    ranks.kill(3)
    for i, reply in ranks.wait_for_replies([0, 1, 2]).items():
        pattern = rf", rank {i}: rank 3 \[.*\] ended without leaving the group$"
        assert re.search(pattern, reply["error"]), reply["error"]


def test_mismatched_sizes_are_reported(ranks: Any) -> None:
    ranks.join(2, **TAIL_SETTINGS, FSCCL_TAIL_LIMIT="100", FSCCL_CLUSTERS="1,1")
    for i in range(2):
        ranks[i].start_case("all_reduce_mismatched_sizes", warm_up=4)
    for reply in ranks.wait_for_replies(range(2)).values():
        assert "called another all_reduce" in reply["error"]


@pytest.fixture(scope="module")
def four_hosts(
    built_extension: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HostRanks, Path]]:
    """Ranks on four hosts, each behind 1 Gbit/s with a 64 KB queue on the switch's side."""
    require_bed()
    log = tmp_path_factory.mktemp("bounded") / "stderr"
    with (
        Bed.open(tmp_path_factory.mktemp("bed"), 4) as bed,
        HostRanks.start(bed, range(4), PATIENCE_SECONDS, stderr_files={0: log}) as host_ranks,
    ):
        for host in bed.hosts:
            bucket = ["tbf", "rate", "1gbit", "burst", "96kb", "limit", "64kb"]
            subprocess.run(
                ["tc", "qdisc", "replace", "dev", host.veth, "root", *bucket], check=True
            )
        yield host_ranks, log


def test_replicas_stay_identical_under_background_traffic_and_total_loss(
    four_hosts: tuple[HostRanks, Path],
) -> None:
    hosts, log = four_hosts
    bed = hosts.bed
    environment = {**TAIL_SETTINGS, "FSCCL_TAIL_LIMIT": "60", "FSCCL_TAIL_FEEDBACK": "1"}
    hosts.join("tail", 60, **environment)
    traffic = _start_background_traffic(bed, seconds=PATIENCE_SECONDS)
    try:
        _all_reduce_until(hosts, BOUNDED)
    finally:
        traffic.kill()
        traffic.wait()
    bed[1].run(
        ["nft", "add table inet t; add chain inet t in { type filter hook input priority 0; }"]
    )
    bed[1].run(["nft", "add rule inet t in meta l4proto udp drop"])
    try:
        results = _all_reduce_until(hosts, REPEATED_EXACTLY)
    finally:
        bed[1].heal()
    assert all(exact for algorithm, exact in results if algorithm != BOUNDED)
    assert re.search(r"lost too much .*: it is repeated exactly, and the next \d+", log.read_text())


def _all_reduce_until(hosts: HostRanks, algorithm: str) -> list[list[Any]]:
    """Run all_reduces until one has an algorithm; return those of the last round.

    Operations after a repeated one are exact at once, and a busy machine may repeat any.
    """
    for _ in range(20):
        results: list[list[Any]]
        results, *others = hosts.call("run_all_reduces", count=ELEMENTS // 4, rounds=8)
        assert all(other == results for other in others), "ranks report different operations"
        if algorithm in [name for name, _ in results]:
            return results
    raise AssertionError(f"no operation ran {algorithm}")


def test_broken_link_names_the_unreachable_rank(four_hosts: tuple[HostRanks, Path]) -> None:
    """Other ranks wait for an unreachable rank until the group's timeout."""
    hosts, _ = four_hosts
    bed = hosts.bed
    hosts.call("leave")
    hosts.join("cut", 60, **TAIL_SETTINGS, FSCCL_TAIL_LIMIT="100")
    (results, *_) = hosts.call("run_all_reduces", count=ELEMENTS // 4, rounds=5)
    assert results[-1][0] == BOUNDED
    # A rank that a busy machine delays for longer would be named instead.
    hosts.call("set_operation_timeout", seconds=12)
    hosts.start_case("run_operation", op="all_reduce", count=ELEMENTS // 4, repeat=100_000)
    time.sleep(0.2)
    bed[1].set_link("down")
    try:
        replies = wait_for_replies(hosts.ranks, PATIENCE_SECONDS)
    finally:
        bed[1].heal()
    for i, reply in replies.items():
        remote_ranks = "023" if i == 1 else "1"
        pattern = rf"rank {i}: .*rank [{remote_ranks}] \[.*\] did not come within the timeout"
        assert re.search(pattern, reply.get("error", "none")), f"{i}: {reply}"


def _start_background_traffic(bed: Bed, seconds: float) -> subprocess.Popen[bytes]:
    """Send from the second host to all others at nearly half of their links' bandwidth."""
    addresses = [bed[i].address for i in (0, 2, 3)]
    call = f"send_background_traffic({addresses!r}, 9, 450, {seconds})"
    program = f"from fsccl_bounded_cases import send_background_traffic; {call}"
    return subprocess.Popen(
        ["nsenter", "-t", str(bed[1].pid), "-a", "--", sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
