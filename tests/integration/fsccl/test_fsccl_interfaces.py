"""Tests of hosts connected by two networks: large messages use both.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from bed.lab import Bed
from bed.plugin import require_bed
from support.fsccl_hosts import HostRanks
from support.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.integration, pytest.mark.torch]

ELEMENTS = 1 << 22  # 16 MiB of float32


@pytest.fixture(scope="module")
def hosts(built_extension: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostRanks]:
    """Ranks on two hosts with the interfaces ``eth0`` and ``fab0``."""
    require_bed()
    with (
        Bed.open(tmp_path_factory.mktemp("bed"), 2, fabric=True) as bed,
        HostRanks.start(bed, [0, 1], timeout_seconds=PATIENCE_SECONDS) as host_ranks,
    ):
        yield host_ranks


def read_sent_bytes(bed: Bed) -> dict[str, int]:
    """Return the bytes that the first host has sent, by interface."""
    links = json.loads(bed[0].run(["ip", "-json", "-statistics", "link"]).stdout)
    return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in links}


@pytest.mark.parametrize(
    ("environment", "expected_shares"),
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
def test_traffic_is_shared_between_interfaces(
    hosts: HostRanks,
    request: pytest.FixtureRequest,
    environment: dict[str, str],
    expected_shares: tuple[float, float],
) -> None:
    hosts.join(request.node.callspec.id, 60, **environment)
    case = {"op": "all_reduce", "dtype": "float32", "red": "sum", "root": 0}
    before = read_sent_bytes(hosts.bed)
    hosts.call("check_operation", **case, count=ELEMENTS, seed=1, strided=False)
    after = read_sent_bytes(hosts.bed)
    increments = [after[name] - before[name] for name in ("eth0", "fab0")]
    assert [increment / sum(increments) for increment in increments] == pytest.approx(
        expected_shares, abs=0.1
    )
    hosts.call("leave")
