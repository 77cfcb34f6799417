"""Tests of reaching hosts as the user's SSH configuration specifies.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from bed.host import Host
from bed.keys import write_key
from bed.lab import HUB_ADDRESS, Bed
from paramiko.common import MSG_CHANNEL_DATA
from support.ssh_hosts import connect, fan_out
from support.waiting import wait_for

from flagscale.hosts import errors as e
from flagscale.hosts.ssh.dial import Dialer, DialOptions
from flagscale.hosts.ssh.ssh_config import SshConfig

pytestmark = pytest.mark.integration

QUICK = DialOptions(connect_seconds=6, max_attempts=2, first_pause_seconds=0.05)


def configure(bed: Bed, text: str) -> SshConfig:
    """Write the test bed's configuration with further lines in front of it."""
    path = bed.home / "more_config"
    path.write_text(text + "\n" + bed.ssh_config.read_text())
    return SshConfig.load(path)


def hide_from_hub(host: Host) -> None:
    """Make a host unreachable from the hub, but reachable from other hosts."""
    host.drop_packets(f"ip saddr {HUB_ADDRESS}")


def count_logins(host: Host) -> int:
    log = (host.directory / "sshd.log").read_text()
    return log.count("Accepted publickey")


@pytest.mark.bed(hosts=["gate", "inner", "n1", "n2", "n3", "n4"], users=["trainer"])
def test_jump_hosts_in_a_chain_serve_many_hosts_over_one_connection(bed: Bed) -> None:
    for host in bed.hosts[1:]:
        hide_from_hub(host)
    config = configure(
        bed,
        "Host front\n  HostName gate\n  User trainer\n"
        "Host inner\n  ProxyJump front\n"
        "Host n1 n2\n  ProxyJump inner\n"
        "Host n3\n  ProxyJump trainer@gate:22,inner\n",
    )
    targets = [config.target(name) for name in ("n1", "n2", "n3")]
    targets.append(config.target("n4", proxy="gate"))
    outcomes = fan_out(targets, lambda c: c.run(["hostname"]).text.strip())
    assert [outcome.get() for outcome in outcomes] == ["n1", "n2", "n3", "n4"]
    # front for n1 and n2, trainer@gate for n3, root@gate for n4: one connection each.
    assert count_logins(bed["gate"]) == 3
    assert count_logins(bed["n1"]) == 1
    with connect(config.target("n1")) as connection:
        assert "through inner" in connection.target.route


@pytest.mark.bed(hosts=["gate", "n1", "n2"])
def test_late_packets_do_not_end_other_connections(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread decides to send through the jump host, and sends after another thread closed the
    channel.
    """
    for host in bed.hosts[1:]:
        hide_from_hub(host)
    config = configure(bed, "Host n1 n2\n  ProxyJump gate\n")
    send = paramiko.Transport._send_user_message  # type: ignore[attr-defined]
    decided, closed = threading.Event(), threading.Event()

    def send_late(through: paramiko.Transport, message: Any) -> None:
        if threading.current_thread() is late and message.asbytes()[0] == MSG_CHANNEL_DATA:
            decided.set()
            closed.wait(60)
        send(through, message)

    with Dialer() as dialer:
        first_connection, second_connection = (
            dialer.connect(config.target(name)) for name in ("n1", "n2")
        )
        monkeypatch.setattr(paramiko.Transport, "_send_user_message", send_late)
        late = threading.Thread(target=second_connection.transport.send_ignore)
        late.start()
        assert decided.wait(60)
        through_gate: Any = second_connection.transport.sock
        gate, number = through_gate.get_transport(), through_gate.get_id()
        second_connection.close()
        # Once gate has answered, and then anything else, it knows nothing of the channel any more.
        wait_for(lambda: gate._channels.get(number) is None)
        assert first_connection.run(["hostname"]).text == "n1\n"
        closed.set()
        late.join()
        assert first_connection.run(["hostname"]).text == "n1\n"


@pytest.mark.bed(hosts=["gate", "inner"])
def test_errors_behind_a_jump_host(bed: Bed) -> None:
    hide_from_hub(bed["inner"])
    config = configure(bed, "Host inner\n  ProxyJump gate\n")
    with connect(config.target("inner"), QUICK) as connection:
        assert connection.run(["hostname"]).text == "inner\n"
    bed["inner"].stop_sshd()
    with pytest.raises(e.ChannelRefusedError, match=r"inner: gate cannot reach inner for us"):
        connect(config.target("inner"), QUICK)
    bed["gate"].restart_sshd(AllowTcpForwarding="no")
    with pytest.raises(e.ChannelRefusedError, match=r"gate cannot reach inner for us: .*prohibit"):
        connect(config.target("inner"), QUICK)
    bed["gate"].stop_sshd()
    with pytest.raises(e.ConnectionRefusedByHostError, match=r"^gate: nothing listens"):
        connect(config.target("inner"), QUICK)


@pytest.mark.bed(hosts=["gate", "inner"])
def test_a_proxy_command_carries_a_connection(bed: Bed) -> None:
    hide_from_hub(bed["inner"])
    ssh = f"ssh -F {bed.ssh_config} -W %h:%p gate"
    broken = "echo 'no way out' >&2; exit 9"
    config = configure(
        bed, f"Host inner\n  ProxyCommand {ssh}\nHost far\n  ProxyCommand {broken}\n"
    )
    with connect(config.target("inner"), QUICK) as connection:
        assert connection.run(["hostname"]).text == "inner\n"
        assert connection.run(["cat"], stdin=b"x" * 300_000).stdout == b"x" * 300_000
        bed["gate"].cut_power()
        with pytest.raises(e.ConnectionLostError):
            connection.run(["sleep", "60"], timeout=None)
    with pytest.raises(e.ProxyCommandError, match=r"^far: .* status 9: no way out") as caught:
        connect(config.target("far"), QUICK)
    assert caught.value.exit_code == 3
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    names = [Path(f"/proc/{child}/comm").read_text().strip() for child in children]
    assert not {"ssh", "sh"} & set(names)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    """A real SSH agent without keys; returns its socket."""
    path = str(tmp_path / "agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield path
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.bed(hosts=2)
def test_keys_come_from_files_and_from_the_agent(
    bed: Bed, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(bed.home))
    encrypted_key, agent_key = bed.home / "locked", bed.home / "stray"
    public = write_key(encrypted_key, passphrase="open sesame")
    write_key(agent_key)
    for host in bed.hosts:
        host.local_path("/run/authorized_keys").write_text(public + "\n")
    trust = f"Host *\n  User root\n  UserKnownHostsFile {bed.known_hosts}\n"
    bed.ssh_config.write_text(
        f"{trust}  IdentityFile {agent_key}\n  IdentityFile {encrypted_key}\n"
    )
    with pytest.raises(e.LoginError) as error:
        connect(SshConfig.load().target("h00"), QUICK)
    assert f"accepts none of our keys for user root: {agent_key}" in str(error.value)
    assert f"run `ssh-add {encrypted_key}`" in str(error.value)

    askpass = bed.home / "askpass"
    askpass.write_text("#!/bin/sh\necho 'open sesame'\n")
    askpass.chmod(0o700)
    secrets = {"SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"}
    environment = {**os.environ, "SSH_AUTH_SOCK": agent, **secrets}
    subprocess.run(["ssh-add", encrypted_key], env=environment, check=True, capture_output=True)
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    for extra_option in ("", "  IdentitiesOnly yes\n"):
        bed.ssh_config.write_text(
            f"{trust}{extra_option}  IdentityFile {agent_key}\n  IdentityFile {encrypted_key}\n"
        )
        targets = [SshConfig.load().target(name) for name in bed.names]
        outcomes = fan_out(
            targets, lambda c: c.run(["hostname"]).text.strip(), max_parallel_hosts=1
        )
        assert [outcome.get() for outcome in outcomes] == ["h00", "h01"]
    # The key that opened the first host is the first that the second one is offered.
    assert "Failed publickey" not in (bed["h01"].directory / "sshd.log").read_text()
    # An agent at another socket, such as a password manager's, and no agent.
    monkeypatch.delenv("SSH_AUTH_SOCK")
    bed.ssh_config.write_text(f"{trust}  IdentityAgent {agent}\n")
    connect(SshConfig.load().target("h00"), QUICK).close()
    bed.ssh_config.write_text(f"{trust}  IdentityAgent none\n")
    with pytest.raises(e.LoginError, match="there is no key to log in to h00 as root with"):
        connect(SshConfig.load().target("h00"), QUICK)


@pytest.mark.bed(hosts=["plain", "odd-port"])
def test_the_advice_about_host_keys_works(bed: Bed) -> None:
    bed["odd-port"].restart_sshd(Port="2222\nListenAddress 0.0.0.0:2222\nListenAddress 0.0.0.0:22")
    config = configure(bed, "Host odd\n  HostName odd-port\n  Port 2222\n")

    def follow_advice(error: e.HostError) -> None:
        advice = (error.hint or "").replace("\n  then: ", "\n").partition("run: ")[2]
        for line in advice.splitlines():
            subprocess.run(["sh", "-c", line], check=True, capture_output=True)

    bed.known_hosts.write_text("# empty\n")
    for name in ("plain", "odd"):
        with pytest.raises(e.UnknownHostKeyError) as unknown:
            connect(config.target(name), QUICK)
        follow_advice(unknown.value)
        connect(config.target(name), QUICK).close()
    assert "[odd-port]:2222 ssh-ed25519" in bed.known_hosts.read_text()
    old = fingerprint(bed["plain"])
    bed["plain"].change_host_key()
    with pytest.raises(e.ChangedHostKeyError) as changed_error:
        connect(config.target("plain"), QUICK)
    assert old in str(changed_error.value)
    assert fingerprint(bed["plain"]) in str(changed_error.value)
    assert f"{bed.known_hosts}:" in str(changed_error.value)
    follow_advice(changed_error.value)
    connect(config.target("plain"), QUICK).close()


def fingerprint(host: Host) -> str:
    key = str(host.directory / "hostkey.pub")
    result = subprocess.run(["ssh-keygen", "-lf", key], check=True, capture_output=True, text=True)
    return result.stdout.split()[1]


@pytest.mark.bed(hosts=3)
def test_known_hosts_hashed_aliased_and_learnt(bed: Bed) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-H", "-f", bed.known_hosts], check=True, capture_output=True
    )
    bed.known_hosts.with_suffix(".old").unlink()
    assert "h00" not in bed.known_hosts.read_text()
    connect(SshConfig.load(bed.ssh_config).target("h00"), QUICK).close()
    learnt = bed.home / "learnt"
    config = configure(
        bed,
        f"Host h01\n  UserKnownHostsFile {learnt}\n  StrictHostKeyChecking accept-new\n"
        "Host renamed\n  HostName h02\n  HostKeyAlias h02\n"
        f"Host {bed[2].address}\n  HostKeyAlias nobody\n",
    )
    connect(config.target("renamed"), QUICK).close()
    with pytest.raises(e.UnknownHostKeyError, match=shlex.quote("nobody ssh-ed25519 ")[1:-1]):
        connect(config.target(bed[2].address), QUICK)
    connect(config.target("h01"), QUICK).close()
    assert learnt.read_text().startswith("h01 ssh-ed25519 ")
    bed["h01"].change_host_key()
    with pytest.raises(e.ChangedHostKeyError):
        connect(config.target("h01"), QUICK)


@pytest.mark.bed(hosts=1)
def test_revoked_keys_and_certificates_of_hosts(bed: Bed, tmp_path: Path) -> None:
    host, known_hosts = bed[0], bed.known_hosts
    trusted = known_hosts.read_text()
    public = " ".join((host.directory / "hostkey.pub").read_text().split()[:2])
    config = SshConfig.load(bed.ssh_config)

    known_hosts.write_text(f"{trusted}@revoked * {public}\n")
    with pytest.raises(e.RevokedHostKeyError, match=rf"is revoked by {known_hosts}:2") as revoked:
        connect(config.target("h00"), QUICK)
    assert revoked.value.exit_code == 3
    known_hosts.write_text(trusted)
    revoked_list = tmp_path / "revoked"
    listing = configure(bed, f"Host *\n  RevokedHostKeys {revoked_list}\n")
    with pytest.raises(e.HostKeyError, match=rf"{revoked_list}: No such file"):
        connect(listing.target("h00"), QUICK)
    revoked_list.write_text(f"# stolen\n{public} root@h00\n")
    with pytest.raises(e.RevokedHostKeyError, match=rf"is revoked by {revoked_list}:2"):
        connect(listing.target("h00"), QUICK)
    revoke = ["ssh-keygen", "-q", "-k", "-f", revoked_list, host.directory / "hostkey.pub"]
    subprocess.run(revoke, check=True, capture_output=True)
    with pytest.raises(e.HostKeyError, match="binary list"):
        connect(listing.target("h00"), QUICK)

    authority = write_key(tmp_path / "authority")
    sign = ["-s", tmp_path / "authority", "-I", "h00", "-h", "-n", "h00"]
    key = host.directory / "hostkey.pub"
    subprocess.run(["ssh-keygen", "-q", *sign, key], check=True, capture_output=True)
    host.restart_sshd(HostCertificate=str(host.directory / "hostkey-cert.pub"))
    known_hosts.write_text(f"# ours\n@cert-authority * {authority}\n")
    ssh = ["ssh", "-F", bed.ssh_config, "h00", "hostname"]
    assert subprocess.run(ssh, check=True, capture_output=True, text=True).stdout == "h00\n"
    with pytest.raises(e.UnknownHostKeyError) as unknown:
        connect(config.target("h00"), QUICK)
    assert f"{known_hosts}:2 trusts a certificate authority" in str(unknown.value)
    assert "ssh-keyscan -t ed25519 h00 >> " in str(unknown.value)
    # The advice works: the same server also has a plain key.
    known_hosts.write_text(f"@cert-authority * {authority}\n{trusted}")
    connect(config.target("h00"), QUICK).close()


def test_a_name_that_does_not_resolve() -> None:
    config = SshConfig.from_lines([], "none")
    with pytest.raises(e.NameResolutionError, match=r"no-such-host\.invalid") as caught:
        connect(config.target("no-such-host.invalid"), QUICK)
    assert caught.value.exit_code == 3


@pytest.mark.bed(hosts=1)
def test_a_refused_connection_leaves_nothing_behind(bed: Bed, tmp_path: Path) -> None:
    """A launcher that only reports the error must not print tracebacks or hang at its exit."""
    bed[0].stop_sshd()
    program = (
        "from flagscale.hosts.connection import Endpoint\n"
        "from flagscale.hosts.fan_out import Hosts\n"
        f"hosts = Hosts([Endpoint('h00')], {{'ssh': {{'config': {str(bed.ssh_config)!r}}}}})\n"
        "print(hosts.run_on_hosts(lambda _, host: host.run(['true']))[1][0])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.startswith("h00: nothing listens")
    assert result.stderr == ""
