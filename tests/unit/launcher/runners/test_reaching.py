"""Tests that a run's handle leads to the same endpoints again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flagscale.config.schema import Experiment, Runner
from flagscale.hosts.connection import Endpoint
from flagscale.hosts.hostfile import Host
from flagscale.launcher.runners import endpoints


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        pytest.param([Host("h0"), Host("h1")], [Endpoint("h0", port=7), Endpoint("h1", port=7)]),
        pytest.param(
            [Host("h0", user="me", port=9), Host("h1", proxy="j")],
            [Endpoint("h0", user="me", port=9), Endpoint("h1", port=7, proxy="j")],
            id="over-the-configuration",
        ),
        # The port is that of SSH servers.
        pytest.param(
            [Host("h0", via="box"), Host("h1")],
            [Endpoint("h0", via="box"), Endpoint("h1", port=7)],
            id="two-ways",
        ),
        pytest.param([Host("localhost", via="box")], [Endpoint("localhost", "box")], id="not-here"),
    ],
)
def test_hosts_are_reached_again_as_they_were(
    make_experiment: Callable[..., Experiment], hosts: list[Host], expected: list[Endpoint]
) -> None:
    experiment = make_experiment(runner=Runner(ssh_port=7, hostfile=Path("hosts")))
    handle = endpoints.make_handle(experiment.runner, hosts)
    assert not endpoints.is_local(handle)
    reached = endpoints.open_hosts(handle, [host.name for host in hosts])
    assert list(reached.endpoints) == expected
