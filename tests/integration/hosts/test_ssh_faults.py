"""Everything that goes wrong with a host has a name, a message and an end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from bed.host import Host, HostProcess
from bed.lab import Bed

from flagscale.errors import FlagscaleError
from flagscale.hosts import errors as e
from flagscale.hosts.ssh import Connection, DialOptions, SshConfig, connect, fan_out
from flagscale.hosts.ssh.files import RemoteFiles

pytestmark = pytest.mark.integration

IMPATIENT = DialOptions(connect=4, greeting=8, login=20, lost=6, attempts=2, pause=0.05)

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


def occupy(host: Host, held: ExitStack) -> None:
    """Fill sshd's only place for connections that have not logged in yet."""
    host.restart_sshd(MaxStartups="1:100:1")
    while True:
        place = held.enter_context(socket.create_connection((host.address, 22)))
        if place.recv(4) == b"SSH-":
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
    deadline = time.monotonic() + 20
    while "LISTEN" not in host.run(["ss", "-ltn", "sport = :22"]).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.bed(hosts=CONNECT_FAULTS, users=["trainer"])
def test_every_host_says_why_it_cannot_be_reached(bed: Bed, config: SshConfig) -> None:
    with ExitStack() as held:
        bed["unplugged"].link("down")
        bed["filtered"].drop()
        bed["no-listener"].stop_sshd()
        bed["stopped"].signal_sshd(signal.SIGSTOP)
        occupy(bed["busy"], held)
        forget_key(bed, "unknown-key")
        bed["changed-key"].change_host_key()
        bed["no-login"].restart_sshd(AllowUsers="nobody-at-all")
        serve_http(bed["no-ssh"])
        users = {"wrong-user": "nobody-at-all"}
        targets = [config.target(name, user=users.get(name)) for name in CONNECT_FAULTS]
        seen: list[str] = []
        outcomes = fan_out(
            targets,
            lambda connection: connection.run(["hostname"]).text,
            options=IMPATIENT,
            on_done=lambda outcome: seen.append(outcome.target.name),
        )
    assert [outcome.target.name for outcome in outcomes] == CONNECT_FAULTS
    assert sorted(seen) == sorted(CONNECT_FAULTS)
    assert outcomes[0].get() == "fine\n"
    errors = {outcome.target.name: outcome.error for outcome in outcomes[1:]}
    expected: dict[str, tuple[type[FlagscaleError] | tuple[type[FlagscaleError], ...], str]] = {
        "unplugged": ((e.NoRouteError, e.ConnectTimeoutError), "unplugged"),
        "filtered": (e.ConnectTimeoutError, "a firewall drops the packets"),
        "no-listener": (e.ConnectionRefusedByHostError, "nothing listens on no-listener port 22"),
        "stopped": (e.GreetingTimeoutError, "accepts connections and says nothing within 8 s"),
        "busy": (e.ConnectionDroppedError, "MaxStartups"),
        "unknown-key": (e.UnknownHostKeyError, "ssh-keyscan -t ed25519 unknown-key >> "),
        "changed-key": (e.ChangedHostKeyError, "known_hosts:"),
        "wrong-user": (e.LoginError, "accepts none of our keys for user nobody-at-all"),
        "no-login": (e.LoginError, "authorized_keys"),
        "no-ssh": (e.HandshakeError, "is not an SSH server"),
    }
    for name, (kind, words) in expected.items():
        error = errors[name]
        assert isinstance(error, kind), (name, error)
        assert error.exit_code == 3
        assert str(error).startswith(f"{name}: ")
        assert words in str(error)


Fault = Callable[[Host], object]

MID_COMMAND: dict[str, tuple[Fault, type[FlagscaleError] | int]] = {
    "cut": (lambda host: host.link("down"), e.ConnectionLostError),
    "power-off": (lambda host: host.cut_power(), e.ConnectionLostError),
    "session-killed": (
        lambda host: kill(host.sessions()),
        e.ConnectionLostError,
    ),
    "session-stopped": (
        lambda host: kill(host.sessions(), signal.SIGSTOP),
        e.ConnectionLostError,
    ),
    "shell-killed": (
        lambda host: kill(host.find("sh", "-c") + jobs(host)),
        e.ConnectionLostError,
    ),
    "job-killed": (
        lambda host: kill(jobs(host)),
        128 + signal.SIGKILL,
    ),
    "listener-gone": (lambda host: host.stop_sshd(), e.CommandTimeoutError),
}


def kill(processes: list[HostProcess], number: signal.Signals = signal.SIGKILL) -> None:
    for process in processes:
        os.kill(process.pid, number)


def jobs(host: Host) -> list[HostProcess]:
    return [process for process in host.processes() if process.argv[:1] == ("sleep",)]


@pytest.mark.bed(hosts=list(MID_COMMAND))
def test_a_command_in_progress_ends_with_its_host(bed: Bed, config: SshConfig) -> None:
    started = threading.Barrier(len(MID_COMMAND) + 1, timeout=60)

    def action(connection: Connection) -> int:
        first = threading.Event()

        def on_stdout(_: bytes) -> None:
            if not first.is_set():
                first.set()
                started.wait()

        # The host whose listener goes away keeps its session, and its command, until the end.
        limit = 8 if connection.target.name == "listener-gone" else None
        command = ["sh", "-c", "echo started; sleep 300; exit $?"]
        return connection.run(command, timeout=limit, on_stdout=on_stdout).exit_status

    def break_things() -> None:
        started.wait()
        for name, (fault, _) in MID_COMMAND.items():
            fault(bed[name])

    breaker = threading.Thread(target=break_things)
    breaker.start()
    targets = [config.target(name) for name in MID_COMMAND]
    outcomes = fan_out(targets, action, options=IMPATIENT)
    breaker.join()
    for outcome, (_, expected) in zip(outcomes, MID_COMMAND.values(), strict=True):
        if isinstance(expected, int):
            assert outcome.get() == expected
        else:
            assert isinstance(outcome.error, expected), (outcome.target.name, outcome.error)
            assert outcome.error.exit_code == 3
            assert str(outcome.error).startswith(f"{outcome.target.name}: ")
    # Nobody ended what was started there: without a terminal a command outlives its connection.
    assert len(jobs(bed["session-killed"])) == 1
    assert len(jobs(bed["listener-gone"])) == 1


@pytest.mark.bed(hosts=1)
def test_a_full_disk_is_called_that(bed: Bed, config: SshConfig, tmp_path: Path) -> None:
    host = bed[0]
    host.small_disk("/scratch", 1)
    with connect(config.target("h00")) as connection, RemoteFiles(connection) as files:
        files.write("/scratch/deep er/$HOME'\n/file", b"text", mode=0o600)
        assert files.read("/scratch/deep er/$HOME'\n/file") == b"text"
        host.fill_disk("/scratch")
        with pytest.raises(e.RemoteFileError) as caught:
            files.write("/scratch/big", b"x" * 2_000_000)
        assert "cannot write /scratch/big on h00" in str(caught.value)
        assert "0 KiB are free" in str(caught.value)
        assert caught.value.exit_code == 3
        assert [name for name in files.names("/scratch") if name.endswith(".part")] == []
        with pytest.raises(e.RemoteFileError, match="No such file"):
            files.get("/scratch/none", tmp_path / "none")
        assert list(tmp_path.iterdir()) == []
        # The connection is as good as before.
        assert connection.run(["echo", "still here"]).text == "still here\n"


@pytest.mark.bed(hosts=1)
def test_a_transfer_over_a_cut_link_ends(bed: Bed, config: SshConfig) -> None:
    with connect(config.target("h00"), IMPATIENT) as connection:
        with RemoteFiles(connection) as files:
            files.write("/tmp/small", b"x")
            bed[0].link("down")
            with pytest.raises(e.ConnectionLostError):
                files.write("/tmp/other", b"y" * 100_000)
        assert not connection.alive
        with pytest.raises(e.HostError):
            connection.run(["true"])


@pytest.mark.parametrize(
    "subsystem", ["other internal-sftp", "sftp /nowhere/sftp-server"], ids=["absent", "broken"]
)
@pytest.mark.bed(hosts=1)
def test_a_host_without_file_transfers_says_what_it_needs(
    bed: Bed, config: SshConfig, subsystem: str
) -> None:
    bed[0].restart_sshd(Subsystem=subsystem)
    with connect(config.target("h00"), IMPATIENT) as connection:
        with pytest.raises(e.ChannelRefusedError, match="refuses to start a file transfer") as said:
            RemoteFiles(connection)
        assert "Subsystem sftp internal-sftp" in (said.value.hint or "")
        assert connection.run(["echo", "still here"]).text == "still here\n"


@pytest.mark.bed(hosts=1)
def test_a_connection_that_breaks_during_the_login(bed: Bed, config: SshConfig) -> None:
    """Whichever way the client learns of it: it is said, and nothing but that."""
    command = bed[0].path("/run/end-the-session")
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
