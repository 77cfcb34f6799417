"""Hosts in trouble: each is named with what is wrong, the others are left clean."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from bed.host import Host
from launch_lab import until
from ssh_lab import SshLab

pytestmark = pytest.mark.integration


def bystanders(host: Host) -> list[int]:
    """Processes of other people that look like ours: a torchrun, and another run's rank."""
    sleeper = "exec -a torchrun sleep 1000"
    other = "FLAGSCALE_RUN_ID=20200101-000000-abcdef exec -a train_gpt.py sleep 1001"
    for command in (sleeper, other):
        subprocess.Popen(
            ["nsenter", "-t", str(host.pid), "-a", "--", "bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return until(lambda: len(found := _sleepers(host)) == 2 and found)


def _sleepers(host: Host) -> list[int]:
    return [p.pid for p in host.processes() if p.argv[1:] in (("1000",), ("1001",))]


def test_an_unreachable_host_is_named_and_nothing_starts(lab: SshLab) -> None:
    lab.configure()
    lab.bed["h01"].link("down")
    with lab.bed.ssh_config.open("a") as config:
        config.write("  ConnectTimeout 3\n")
    done = lab.do("run")
    assert done.returncode == 3
    assert "h01" in done.stderr
    assert "no route" in done.stderr or "answer" in done.stderr
    assert "h00" not in done.stderr
    assert not lab.bed["h00"].find("program.py")


def test_a_changed_host_key_in_the_middle_of_a_run(lab: SshLab) -> None:
    lab.configure(runner={"on_failure": "leave"})
    others = {host.name: bystanders(host) for host in lab.bed.hosts}
    assert lab.do("run").returncode == 0
    known = lab.bed.known_hosts.read_text()
    lab.bed["h01"].change_host_key()
    assert lab.do("check").returncode == 3
    shown = lab.do("query")
    assert shown.returncode == 3
    assert "h01: HOST KEY HAS CHANGED" in shown.stdout
    stopped = lab.do("stop")
    assert stopped.returncode == 3
    assert "h01" in stopped.stderr
    assert "stopped on 1 other" in stopped.stderr
    assert not lab.members(lab.bed["h00"])
    # The user looks into it, and trusts the new key.
    public = (lab.bed["h01"].directory / "hostkey.pub").read_text().strip()
    trusted = [line for line in known.splitlines() if not line.startswith("h01,")]
    lab.bed.known_hosts.write_text("\n".join([*trusted, f"h01,10.77.0.2 {public}"]) + "\n")
    assert lab.do("stop").returncode == 0
    assert lab.orphans() == {}
    assert {host.name: _sleepers(host) for host in lab.bed.hosts} == others


def test_a_dead_sshd_hides_a_run_and_does_not_end_it(lab: SshLab) -> None:
    lab.configure()
    assert lab.do("run").returncode == 0
    host = lab.bed["h01"]
    host.stop_sshd()
    shown = lab.do("query")
    assert shown.returncode == 3
    assert "h01: connection refused" in shown.stdout
    assert len(lab.members(host)) > 1
    host.start_sshd()
    assert lab.query()["state"] == "running"
    assert lab.do("stop").returncode == 0
    assert lab.orphans() == {}


def test_a_wrong_clock_is_refused(lab: SshLab) -> None:
    lab.configure()
    lab.bed["h01"].skew_clock(3600)
    done = lab.do("run")
    assert done.returncode == 2
    assert "clock (h01): 3600 s ahead of ours" in done.stderr
    assert not lab.bed["h00"].find("program.py")


def test_a_taken_port_is_named_with_its_holder(lab: SshLab) -> None:
    lab.configure(runner={"master_port": 23456})
    host = lab.bed["h00"]
    program = "import socket, time; s = socket.create_server(('', 23456)); time.sleep(1000)"
    listener = subprocess.Popen(
        ["nsenter", "-t", str(host.pid), "-a", "--", "python3", "-c", program]
    )
    try:
        until(lambda: "23456" in host.run(["ss", "-ltn"]).stdout)
        done = lab.do("run")
        assert done.returncode == 2
        assert "port 23456 of h00 is in use by process" in done.stderr
    finally:
        listener.kill()
        listener.wait()


@pytest.mark.bed(hosts=2, root="private", shared=[])
def test_a_full_disk(lab: SshLab) -> None:
    lab.configure(runner={"no_shared_fs": True})
    lab.install()
    host = lab.bed["h01"]
    host.small_disk(lab.exp_dir, 1)
    host.fill_disk(lab.exp_dir)
    done = lab.do("run")
    assert done.returncode == 2
    assert "exp_dir (h01)" in done.stderr
    assert "make room" in done.stderr
    unchecked = lab.do("run", "experiment.runner.preflight=false")
    assert unchecked.returncode == 3
    assert "h01: the script could not be started" in unchecked.stderr
    assert "No space left on device" in unchecked.stderr
    assert lab.orphans() == {}


@pytest.mark.bed(hosts=1, root="private", shared=[])
def test_a_python_that_is_not_there(lab: SshLab) -> None:
    lab.configure(runner={"no_shared_fs": True, "python": "/opt/no such/python"})
    lab.install()
    done = lab.do("run")
    assert done.returncode == 2
    assert "python (h00)" in done.stderr
    assert "/opt/no such/python" in done.stderr
    unchecked = lab.do("run", "experiment.runner.preflight=false")
    assert unchecked.returncode == 1
    assert "/opt/no such/python" in unchecked.stderr
    assert lab.orphans() == {}


def test_a_launcher_that_is_killed_leaves_a_run_that_stop_ends(lab: SshLab) -> None:
    lab.configure()
    launcher = lab.start("test")
    until((lab.exp_dir / "logs" / "state.json").exists)
    until(lambda: lab.query()["state"] == "running")
    launcher.kill()
    launcher.wait()
    assert lab.query()["state"] == "running"
    assert lab.do("stop").returncode == 0
    assert lab.orphans() == {}


def test_stopping_from_elsewhere_needs_no_config_but_the_directory(
    lab: SshLab, tmp_path: Path
) -> None:
    lab.configure()
    assert lab.do("run").returncode == 0
    # Another hostfile, another program: what was started is what is stopped.
    (lab.root / "hostfile").write_text("h00 slots=1\n")
    (lab.root / "program.py").write_text("")
    assert lab.do("stop", f"experiment.exp_dir={os.fspath(lab.exp_dir)}").returncode == 0
    assert lab.orphans() == {}
