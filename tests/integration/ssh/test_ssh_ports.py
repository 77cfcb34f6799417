"""Tests of the two rendezvous ports: in use, or blocked by a firewall.

``lab`` (support/ssh_lab.py) has an experiment on the hosts of the test bed ``lab.bed`` (tests/bed),
which are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import subprocess

import pytest
from support.ssh_lab import SshLab
from support.waiting import wait_for

pytestmark = pytest.mark.integration

WAITING = "import time\ntime.sleep(600)\n"
REPORTING = """\
import sys, time
sys.path.insert(0, {project!r})
from flagscale.status import StatusWriter
StatusWriter.from_environment(0).write("started", rank=0)
time.sleep(600)
"""


def test_agents_port_in_use_is_reported_with_its_key(lab: SshLab) -> None:
    lab.configure(runner={"liveness_port": 23457})
    host = lab.bed["h00"]
    program = "import socket, time; s = socket.create_server(('', 23457)); time.sleep(1000)"
    listener = subprocess.Popen(
        ["nsenter", "-t", str(host.pid), "-a", "--", "python3", "-c", program]
    )
    try:
        wait_for(lambda: "23457" in host.run(["ss", "-ltn"]).stdout)
        result = lab.run_action("run")
        assert result.returncode == 2
        assert "runner.liveness_port: port 23457 of h00 is in use by process" in result.stderr
    finally:
        listener.kill()
        listener.wait()


def test_blocked_port_is_reported_when_a_host_does_not_join(lab: SshLab) -> None:
    # The launcher does not wait, because its own timeout would expire at the same moment.
    waits = {"liveness_port": 23457, "start_timeout": 4, "wait_for": "none"}
    lab.configure(WAITING, runner=waits)
    lab.bed["h00"].drop_packets("tcp dport 23457")
    assert lab.run_action("run").returncode == 0
    record = wait_for(lambda: (r := lab.query())["state"] == "failed" and r)
    assert "port 23457 of the first host (experiment.runner.liveness_port)" in str(record)
    wait_for(lambda: not lab.remaining_processes())


def test_ranks_that_never_join_are_reported_with_both_ports(lab: SshLab) -> None:
    ports = {"master_port": 23450, "liveness_port": 23457}
    lab.configure(REPORTING, runner={**ports, "start_timeout": 12})
    result = lab.run_action("run")
    assert result.returncode == 1
    assert "not every rank joined within 12 s" in result.stderr
    assert (
        "h00 at ports 23450 (runner.master_port) and 23457 (runner.liveness_port)" in result.stderr
    )
    assert lab.remaining_processes() == {}
