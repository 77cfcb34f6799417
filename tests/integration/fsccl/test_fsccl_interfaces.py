"""Hosts with two networks between them: large messages take both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from bed.lab import Bed
from bed.plugin import need_bed
from fsccl_ranks import Rank, replies, results

pytestmark = [pytest.mark.integration, pytest.mark.torch]

COUNT = 1 << 22  # 16 MiB of float32


@pytest.fixture(scope="module")
def hosts(
    built: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Bed, dict[int, Rank]]]:
    """A rank on each of two hosts, which have ``eth0`` and ``fab0``."""
    need_bed()
    with Bed.open(tmp_path_factory.mktemp("bed"), 2, fabric=True) as bed, ExitStack() as stack:
        ranks = {}
        for i in range(2):
            ranks[i] = Rank(prefix=("nsenter", "-t", str(bed[i].pid), "-a", "--"))
            stack.callback(ranks[i].end)
            stack.callback(ranks[i].process.kill)
        yield bed, ranks


def join(bed: Bed, ranks: dict[int, Rank], key: str, **environment: str) -> None:
    for i, rank in ranks.items():
        where = {"rank": i, "size": 2, "host": bed[0].address, "port": 29500, "key": key}
        rank.ask("join", **where, timeout=60, environment=environment)
    results(replies(ranks, 90))


def call(ranks: dict[int, Rank], case: str, **arguments: object) -> None:
    for rank in ranks.values():
        rank.ask(case, **arguments)
    results(replies(ranks, 60))


def sent(bed: Bed) -> dict[str, int]:
    """Bytes that the first host has sent, by interface."""
    links = json.loads(bed[0].run(["ip", "-json", "-statistics", "link"]).stdout)
    return {one["ifname"]: one["stats64"]["tx"]["bytes"] for one in links}


@pytest.mark.parametrize(
    ("environment", "shares"),
    [
        ({}, (1.0, 0.0)),
        ({"FSCCL_SOCKET_IFNAME": "fab"}, (0.0, 1.0)),
        ({"FSCCL_TCP_INTERFACES": "2"}, (0.5, 0.5)),
        (
            {
                "FSCCL_TCP_INTERFACES": "2",
                "FSCCL_TCP_CONNECTIONS": "3",
                "FSCCL_SOCKET_IFNAME": "fab,eth",
            },
            (0.5, 0.5),
        ),
    ],
    ids=["one", "the-other", "both", "both-by-name"],
)
def test_what_interfaces_carry(
    hosts: tuple[Bed, dict[int, Rank]],
    request: pytest.FixtureRequest,
    environment: dict[str, str],
    shares: tuple[float, float],
) -> None:
    bed, ranks = hosts
    join(bed, ranks, request.node.callspec.id, **environment)
    case = {"op": "all_reduce", "dtype": "float32", "red": "sum", "root": 0}
    before = sent(bed)
    call(ranks, "check", **case, count=COUNT, seed=1, strided=False)
    after = sent(bed)
    grown = [after[name] - before[name] for name in ("eth0", "fab0")]
    assert [one / sum(grown) for one in grown] == pytest.approx(shares, abs=0.1)
    call(ranks, "leave")
