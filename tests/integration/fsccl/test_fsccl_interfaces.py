"""Hosts with two networks between them: large messages take both."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from bed.lab import Bed
from bed.plugin import need_bed
from support.fsccl_hosts import HostRanks

pytestmark = [pytest.mark.integration, pytest.mark.torch]

COUNT = 1 << 22  # 16 MiB of float32


@pytest.fixture(scope="module")
def hosts(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostRanks]:
    """A rank on each of two hosts, which have ``eth0`` and ``fab0``."""
    need_bed()
    with (
        Bed.open(tmp_path_factory.mktemp("bed"), 2, fabric=True) as bed,
        HostRanks.start(bed, [0, 1], limit=60) as started,
    ):
        yield started


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
    hosts: HostRanks,
    request: pytest.FixtureRequest,
    environment: dict[str, str],
    shares: tuple[float, float],
) -> None:
    hosts.join(request.node.callspec.id, 60, **environment)
    case = {"op": "all_reduce", "dtype": "float32", "red": "sum", "root": 0}
    before = sent(hosts.bed)
    hosts.call("check", **case, count=COUNT, seed=1, strided=False)
    after = sent(hosts.bed)
    grown = [after[name] - before[name] for name in ("eth0", "fab0")]
    assert [one / sum(grown) for one in grown] == pytest.approx(shares, abs=0.1)
    hosts.call("leave")
