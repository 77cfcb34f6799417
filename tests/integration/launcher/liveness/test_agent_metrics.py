"""The metrics of a run that its agents serve for Prometheus."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.liveness_lab import agent_hosts
from support.waiting import wait_for

from flagscale.free_port import free_port

pytestmark = pytest.mark.integration


def _read(port: int) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            text = reply.read().decode()
    except OSError:
        return {}
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_agents_serve_their_host_over_restarts_and_never_delay_the_end(tmp_path: Path) -> None:
    """The second host's port is taken, which its agent reports once."""
    port = free_port()
    with agent_hosts(tmp_path) as hosts:
        hosts.start({"metrics_port": port, "max_restarts": 1}, light=True, TOY_1_0="raise")
        wait_for(lambda: _read(port).get("flagscale_rank_step", 0) >= 2)
        wait_for(lambda: _read(port).get("flagscale_restarts_total") == 1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
        # A client that says nothing is still connected when the job ends.
        with socket.create_connection(("127.0.0.1", port), 5):
            hosts[0].agent.terminate()
            hosts.wait_for_exit_codes()
        reports = re.findall(r"metrics are not served at 127.0.0.1 port", hosts.read_outputs())
        assert len(reports) == 1
        assert not _read(port)
