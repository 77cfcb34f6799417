"""Tests of actions on many hosts at once.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from bed.lab import Bed
from support.ssh_hosts import fan_out, run_on_all_hosts

from flagscale.errors import JobError
from flagscale.hosts import errors as e
from flagscale.hosts.connection import Endpoint, HostConnection
from flagscale.hosts.fan_out import Hosts
from flagscale.hosts.ssh.connection import SshConnection
from flagscale.hosts.ssh.dial import DialOptions
from flagscale.hosts.ssh.ssh_config import SshConfig

pytestmark = pytest.mark.integration


def hostname(connection: HostConnection) -> str:
    return connection.run(["hostname"]).text.strip()


@pytest.mark.bed(hosts=64)
def test_sixty_four_hosts(bed: Bed, config: SshConfig) -> None:
    bed["h07"].stop_sshd()
    targets = [config.target(name) for name in bed.names]
    # Stopping sshd closes its port; everything else is healthy and given time.
    outcomes = fan_out(
        targets,
        hostname,
        options=DialOptions(connect_seconds=30, handshake_seconds=60, login_seconds=60),
    )
    assert [outcome.number for outcome in outcomes] == list(range(64))
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert [type(outcome.error) for outcome in failed] == [e.ConnectionRefusedByHostError]
    assert bed.names[failed[0].number] == "h07"
    assert all(
        host_outcome.value == bed.names[host_outcome.number]
        for host_outcome in outcomes
        if host_outcome.ok
    )


@pytest.mark.bed(hosts=1)
def test_a_burst_on_a_strict_sshd_gets_through(bed: Bed, config: SshConfig) -> None:
    """sshd drops every second connection beyond two that have not logged in yet."""
    bed[0].restart_sshd(MaxStartups="2:50:10")
    log = bed[0].directory / "sshd.log"
    count = 40
    outcomes = fan_out(
        [config.target("h00")] * count,
        hostname,
        max_parallel_hosts=20,
        options=DialOptions(max_attempts=12),
    )
    assert [outcome.get() for outcome in outcomes] == ["h00"] * count
    assert "past MaxStartups" in log.read_text()


@pytest.mark.bed(hosts=3)
def test_an_action_runs_once_and_its_errors_are_outcomes(bed: Bed, config: SshConfig) -> None:
    calls: list[str] = []

    def action(connection: SshConnection) -> str:
        calls.append(connection.target.name)
        if connection.target.name == "h01":
            raise JobError("the job said no")
        return hostname(connection)

    targets = [config.target(name) for name in bed.names]
    outcomes = fan_out(targets, action)
    assert sorted(calls) == bed.names
    assert [outcome.value for outcome in outcomes] == ["h00", None, "h02"]
    with pytest.raises(JobError, match="the job said no"):
        outcomes[1].get()

    def broken(connection: SshConnection) -> str:
        raise KeyError(connection.target.name)

    with pytest.raises(KeyError):
        fan_out(targets, broken)
    assert fan_out([], hostname) == []


@pytest.mark.bed(hosts=3)
def test_hosts_keep_their_connections_and_mend_them(bed: Bed) -> None:
    def count_logins() -> list[int]:
        logs = [(host.directory / "sshd.log").read_text() for host in bed.hosts]
        return [log.count("Accepted publickey") for log in logs]

    def read_name(_: int, executor: HostConnection) -> str:
        return hostname(executor)

    settings = {"ssh": {"config": bed.ssh_config}}
    with Hosts([Endpoint(name) for name in bed.names], settings) as hosts:
        for _ in range(3):
            assert [outcome.get() for outcome in run_on_all_hosts(hosts, read_name, 3)] == bed.names
        assert count_logins() == [1, 1, 1]
        for session in bed[1].find_sessions():
            os.kill(session.pid, signal.SIGKILL)
        outcomes = run_on_all_hosts(hosts, read_name, 3)
        if not outcomes[1].ok:  # the break was not noticed before the command was sent
            assert isinstance(outcomes[1].error, e.HostError)
            outcomes = run_on_all_hosts(hosts, read_name, 3)
        assert [outcome.get() for outcome in outcomes] == bed.names
        assert count_logins() == [1, 2, 1]
        assert hosts.run_on_hosts(read_name, [2]) == ({2: "h02"}, {})


@pytest.mark.bed(hosts=4)
def test_interrupting_ends_at_once(bed: Bed, tmp_path: Path) -> None:
    """Some hosts run a command and one does not answer: Ctrl-C waits for none of them."""
    bed[3].drop_packets()
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "from flagscale.hosts.connection import Endpoint\n"
        "from flagscale.hosts.fan_out import Hosts\n"
        "from flagscale.hosts.ssh.dial import DialOptions, SshConnectionFactory\n"
        f"settings = {{'config': {str(bed.ssh_config)!r}}}\n"
        "factory = SshConnectionFactory(settings, DialOptions(connect_seconds=600))\n"
        f"endpoints = [Endpoint(name) for name in {bed.names!r}]\n"
        "hosts = Hosts(endpoints, {})\n"
        "hosts._factories['ssh'] = factory\n"
        "say = lambda _: os.write(1, b'running\\n')\n"  # a line whole, whatever other threads do
        "wait = ['sh', '-c', 'echo go; exec sleep 600']\n"
        "def action(n, c): c.run(wait, timeout=None, on_stdout=lambda data: data and say(data))\n"
        "try:\n"
        "    hosts.run_on_hosts(action)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["running\n"] * 3
    process.send_signal(signal.SIGINT)
    killer = threading.Timer(100, process.kill)
    killer.start()
    stdout, stderr = process.communicate()
    killer.cancel()
    assert (stdout, stderr, process.returncode) == ("interrupted\n", "", 0)
