"""Tests of all failures of hosts: error class, message, and time limit.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
from bed.host import Host, HostProcess
from bed.lab import Bed
from support.ssh_hosts import connect, fan_out
from support.waiting import wait_for

from flagscale.errors import FlagscaleError
from flagscale.hosts import errors as e
from flagscale.hosts.ssh.connection import SshConnection
from flagscale.hosts.ssh.dial import DialOptions
from flagscale.hosts.ssh.ssh_config import SshConfig

pytestmark = pytest.mark.integration

IMPATIENT = DialOptions(
    connect_seconds=4,
    handshake_seconds=8,
    login_seconds=20,
    idle_limit_seconds=6,
    max_attempts=2,
    first_pause_seconds=0.05,
)

CONNECT_FAULTS = [
    "fine",
    "unplugged",
    "filtered",
    "no-listener",
    "stopped",
    "busy",
    "unknown-key",
    "changed-key",
    "wrong-user",
    "no-login",
    "no-ssh",
]


def occupy_login_slot(host: Host, exit_stack: ExitStack) -> None:
    """Fill sshd's only slot for connections that have not logged in yet."""
    host.restart_sshd(MaxStartups="1:100:1")
    while True:
        connection = exit_stack.enter_context(socket.create_connection((host.address, 22)))
        if connection.recv(4) == b"SSH-":
            return  # and not dropped, as while the connection before it was still being ended
        time.sleep(0.02)


def forget_key(bed: Bed, name: str) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-R", name, "-f", bed.known_hosts], check=True, capture_output=True
    )
    subprocess.run(
        ["ssh-keygen", "-q", "-R", bed[name].address, "-f", bed.known_hosts],
        check=True,
        capture_output=True,
    )


def serve_http(host: Host) -> None:
    host.stop_sshd()
    server = (
        "import socket as s; l=s.create_server(('', 22)); c=l.accept()[0]; c.send(b'HTTP\\n'*200)"
    )
    subprocess.Popen(["nsenter", "-t", str(host.pid), "-a", "python3", "-c", server])
    wait_for(lambda: "LISTEN" in host.run(["ss", "-ltn", "sport = :22"]).stdout)


@pytest.mark.bed(hosts=CONNECT_FAULTS, users=["trainer"])
def test_reasons_of_unreachable_hosts(bed: Bed, config: SshConfig) -> None:
    with ExitStack() as open_connections:
        bed["unplugged"].set_link("down")
        bed["filtered"].drop_packets()
        bed["no-listener"].stop_sshd()
        bed["stopped"].signal_sshd(signal.SIGSTOP)
        occupy_login_slot(bed["busy"], open_connections)
        forget_key(bed, "unknown-key")
        bed["changed-key"].change_host_key()
        bed["no-login"].restart_sshd(AllowUsers="nobody-at-all")
        serve_http(bed["no-ssh"])
        users = {"wrong-user": "nobody-at-all"}
        targets = [config.target(name, user=users.get(name)) for name in CONNECT_FAULTS]
        outcomes = fan_out(
            targets,
            lambda connection: connection.run(["hostname"]).text,
            options=IMPATIENT,
        )
    assert [outcome.number for outcome in outcomes] == list(range(len(CONNECT_FAULTS)))
    assert outcomes[0].get() == "fine\n"
    errors = {CONNECT_FAULTS[outcome.number]: outcome.error for outcome in outcomes[1:]}
    expected: dict[str, tuple[type[FlagscaleError] | tuple[type[FlagscaleError], ...], str]] = {
        "unplugged": ((e.NoRouteError, e.ConnectTimeoutError), "unplugged"),
        "filtered": (e.ConnectTimeoutError, "a firewall drops the packets"),
        "no-listener": (e.ConnectionRefusedByHostError, "nothing listens on no-listener port 22"),
        "stopped": (e.SshTimeoutError, "accepts connections but sends nothing within 8 s"),
        "busy": (e.ConnectionDroppedError, "MaxStartups"),
        "unknown-key": (e.UnknownHostKeyError, "ssh-keyscan -t ed25519 unknown-key >> "),
        "changed-key": (e.ChangedHostKeyError, "known_hosts:"),
        "wrong-user": (e.LoginError, "accepts none of our keys for user nobody-at-all"),
        "no-login": (e.LoginError, "authorized_keys"),
        "no-ssh": (e.HandshakeError, "is not an SSH server"),
    }
    for name, (kind, error_text) in expected.items():
        error = errors[name]
        assert isinstance(error, kind), (name, error)
        assert error.exit_code == 3
        assert str(error).startswith(f"{name}: ")
        assert error_text in str(error)


Fault = Callable[[Host], object]

MID_COMMAND: dict[str, tuple[Fault, type[FlagscaleError] | int]] = {
    "cut": (lambda host: host.set_link("down"), e.ConnectionLostError),
    "power-off": (lambda host: host.cut_power(), e.ConnectionLostError),
    "session-killed": (
        lambda host: kill(host.find_sessions()),
        e.ConnectionLostError,
    ),
    "session-stopped": (
        lambda host: kill(host.find_sessions(), signal.SIGSTOP),
        e.ConnectionLostError,
    ),
    "shell-killed": (
        lambda host: kill(host.find("sh", "-c") + find_sleepers(host)),
        e.ConnectionLostError,
    ),
    "job-killed": (
        lambda host: kill(wait_for(lambda: find_sleepers(host))),
        128 + signal.SIGKILL,
    ),
    "listener-gone": (lambda host: host.stop_sshd(), e.CommandTimeoutError),
}


def kill(processes: list[HostProcess], number: signal.Signals = signal.SIGKILL) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # the end of another one has ended it
            os.kill(process.pid, number)


def find_sleepers(host: Host) -> list[HostProcess]:
    return [process for process in host.processes() if process.argv[:1] == ("sleep",)]


@pytest.mark.bed(hosts=list(MID_COMMAND))
def test_a_command_in_progress_ends_with_its_host(bed: Bed, config: SshConfig) -> None:
    started_barrier = threading.Barrier(len(MID_COMMAND) + 1, timeout=60)

    def action(connection: SshConnection) -> int:
        first_output = threading.Event()

        def on_stdout(_: bytes) -> None:
            if not first_output.is_set():
                first_output.set()
                started_barrier.wait()

        # The host whose listener goes away keeps its session, and its command, until the end.
        limit = 8 if connection.target.name == "listener-gone" else None
        command = ["sh", "-c", "echo started; sleep 300; exit $?"]
        return connection.run(command, timeout=limit, on_stdout=on_stdout).exit_status

    def break_hosts() -> None:
        started_barrier.wait()
        for name, (fault, _) in MID_COMMAND.items():
            fault(bed[name])

    breaker = threading.Thread(target=break_hosts)
    breaker.start()
    targets = [config.target(name) for name in MID_COMMAND]
    outcomes = fan_out(targets, action, options=IMPATIENT)
    breaker.join()
    for outcome, (name, (_, expected)) in zip(outcomes, MID_COMMAND.items(), strict=True):
        if isinstance(expected, int):
            assert outcome.get() == expected
        else:
            assert isinstance(outcome.error, expected), (name, outcome.error)
            assert outcome.error.exit_code == 3
            assert str(outcome.error).startswith(f"{name}: ")
    # Without a terminal a command outlives its connection, so these are still running.
    for name in ("session-killed", "listener-gone"):
        # The command may not have started yet.
        wait_for(lambda host=bed[name]: len(find_sleepers(host)) == 1)


@pytest.mark.bed(hosts=1)
def test_much_input_over_a_cut_link_ends(bed: Bed, config: SshConfig) -> None:
    with connect(config.target("h00"), IMPATIENT) as connection:
        script = "head -c 1 >/dev/null; echo begun; exec cat >/dev/null"
        with pytest.raises(e.ConnectionLostError):
            connection.run(
                ["sh", "-c", script],
                stdin=b"y" * 50_000_000,
                on_stdout=lambda data: data and bed[0].set_link("down"),
            )
        assert not connection.alive
        with pytest.raises(e.HostError):
            connection.run(["true"])


@pytest.mark.bed(hosts=1)
def test_a_connection_that_breaks_during_the_login(bed: Bed, config: SshConfig) -> None:
    """The error is the same in whichever way the client detects it."""
    command = bed[0].local_path("/run/end-the-session")
    command.write_text("#!/bin/sh\nkill -KILL $PPID\n")
    command.chmod(0o755)
    bed[0].restart_sshd(
        AuthorizedKeysCommand="/run/end-the-session",
        AuthorizedKeysCommandUser="root",
        AuthorizedKeysFile="none",
    )
    outcomes = fan_out([config.target("h00")] * 8, lambda c: c.run(["true"]), options=IMPATIENT)
    for outcome in outcomes:
        assert isinstance(outcome.error, e.HostError), outcome.error
        assert outcome.error.exit_code == 3
        assert "closed the connection during the login" in str(outcome.error)
