"""Tests of the test bed itself: isolation of hosts, and faults."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from bed import plugin
from bed.lab import Bed
from bed.plugin import MakeBed
from support.waiting import wait_for

pytestmark = pytest.mark.integration


def run_ssh(bed: Bed, host: str, *command: str, **options: str) -> str:
    flags = [f"-o{key}={value}" for key, value in options.items()]
    argv = ["ssh", "-F", str(bed.ssh_config), *flags, host, *command]
    return subprocess.run(argv, check=True, text=True, capture_output=True, timeout=30).stdout


def answers_ssh(host: str) -> bool:
    try:
        with socket.create_connection((host, 22), 0.3) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


@pytest.mark.bed(hosts=["node-a", "node-b"])
def test_hosts_have_their_own_name_processes_and_tmp(bed: Bed, tmp_path: Path) -> None:
    a, b = bed.hosts
    assert run_ssh(bed, "node-a", "hostname") == "node-a\n"
    assert run_ssh(bed, "node-b", "hostname") == "node-b\n"
    run_ssh(bed, "node-a", "nohup sleep 300 >/dev/null 2>&1 </dev/null &")
    wait_for(lambda: len(a.find("sleep", "300")) == 1)
    assert b.find("sleep") == []
    run_ssh(bed, "node-a", "touch /tmp/mine /dev/shm/mine; touch " + str(tmp_path / "ours"))
    assert run_ssh(bed, "node-b", "ls /tmp /dev/shm").count("mine") == 0
    assert (tmp_path / "ours").exists()
    assert run_ssh(bed, "node-a", "getent hosts node-b").split() == [b.address, "node-b"]


@pytest.mark.bed(hosts=1, root="private", users=["trainer"])
def test_a_private_root_keeps_its_files_to_itself(bed: Bed, tmp_path: Path) -> None:
    host = bed[0]
    marker = f"/usr/share/bed-{os.getpid()}"
    run_ssh(bed, "h00", f"echo mine > {marker}; echo shared > {tmp_path}/shared")
    assert not Path(marker).exists()
    assert host.local_path(marker).read_text() == "mine\n"
    assert (tmp_path / "shared").read_text() == "shared\n"
    assert run_ssh(bed, "trainer@h00", "whoami; pwd").split() == ["trainer", "/home/trainer"]


@pytest.mark.bed(hosts=1)
def test_faults_appear_and_heal(bed: Bed) -> None:
    host = bed[0]
    host.wait_for_banner()
    host.set_link("down")
    assert not answers_ssh("h00")
    host.heal()
    host.wait_for_banner()
    host.drop_packets()
    assert not answers_ssh("h00")
    host.heal()
    host.drop_percent(20)
    host.limit_rate("100mbit")
    host.wait_for_banner()
    host.heal()
    host.signal_sshd(signal.SIGSTOP)
    assert not answers_ssh("h00")
    host.signal_sshd(signal.SIGCONT)
    host.wait_for_banner()
    host.stop_sshd()
    assert not answers_ssh("h00")
    host.start_sshd()
    host.mount_small_disk("/scratch", 1)
    host.fill_disk("/scratch")
    assert host.run(["sh", "-c", "echo more > /scratch/more"], check=False).returncode != 0
    host.skew_clock(3600)
    assert 3500 < int(run_ssh(bed, "h00", "date +%s")) - time.time() < 3700
    host.change_host_key()
    with pytest.raises(subprocess.CalledProcessError, match="255"):
        run_ssh(bed, "h00", "true")


@pytest.mark.bed(hosts=2, fabric=True)
def test_a_fabric_joins_hosts_and_not_the_hub(bed: Bed) -> None:
    assert "ok" in run_ssh(bed, "h00", "getent hosts h01-fabric >/dev/null && echo ok")
    reach = ["timeout", "20", "bash", "-c", "exec 3<>/dev/tcp/h01-fabric/22 && echo reached"]
    assert bed[0].run(reach).stdout == "reached\n"
    assert subprocess.run(reach, capture_output=True, check=False).returncode != 0


def test_the_test_returns_to_its_own_network(make_bed: MakeBed, tmp_path: Path) -> None:
    def network() -> str:
        return str(Path("/proc/thread-self/ns/net").readlink())

    directory_before, network_before = Path.cwd(), network()
    with make_bed(1) as first:
        assert network() != network_before
        pid = first[0].pid
        assert Path(f"/proc/{pid}").exists()
    assert network() == network_before
    assert Path.cwd() == directory_before
    assert not Path(f"/proc/{pid}").exists()
    with make_bed(1) as second:
        second[0].wait_for_banner()


@pytest.mark.parametrize(("required", "outcome"), [("", "Skipped"), ("1", "Failed")])
def test_without_a_bed_tests_are_skipped_or_fail(
    monkeypatch: pytest.MonkeyPatch, required: str, outcome: str
) -> None:
    monkeypatch.setenv("FLAGSCALE_REQUIRE_BED", required)
    monkeypatch.setattr(plugin, "explain_no_bed", lambda: "no namespaces here")
    with pytest.raises(BaseException, match="no namespaces here") as caught:
        plugin.require_bed()
    assert type(caught.value).__name__ == outcome
