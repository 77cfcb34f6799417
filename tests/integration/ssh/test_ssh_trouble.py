"""Tests of faulty hosts: each is reported with its problem, and the others are left without
processes.

``lab`` (support/ssh_lab.py) has an experiment on the hosts of the test bed ``lab.bed`` (tests/bed),
which are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support.ssh_lab import STEADY_PROGRAM, SshLab, find_bystanders, start_bystanders
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.launcher.failures import read_job_record

pytestmark = [pytest.mark.slow, pytest.mark.integration]


BAD = {
    "unplugged": ("no route", "no answer"),
    "filtered": ("no answer from filtered within 3 s", "unplugged,filtered: no answer"),
    "closed": ("nothing listens on closed port 22",),
    "unknown": ("ssh-keyscan -t ed25519 unknown",),
    "changed": ("the host key of changed has changed",),
}


@pytest.mark.bed(hosts=["fine", *BAD])
def test_hosts_that_cannot_be_reached_are_named_and_nothing_starts(lab: SshLab) -> None:
    lab.configure()
    output = lab.bed.known_hosts.read_text().splitlines()
    lab.bed.known_hosts.write_text(
        "".join(f"{line}\n" for line in output if not line.startswith("unknown,"))
    )
    lab.bed["unplugged"].set_link("down")
    lab.bed["filtered"].drop_packets()
    lab.bed["closed"].stop_sshd()
    lab.bed["changed"].change_host_key()
    with lab.bed.ssh_config.open("a") as config:
        config.write("  ConnectTimeout 3\n")
    for overrides in (
        (),
        ("experiment.runner.preflight=false", "experiment.runner.master_port=23456"),
    ):
        result = lab.run_action("run", *overrides)
        assert result.returncode == 3
        for name, message in BAD.items():
            assert any(text in result.stderr for text in message), (name, result.stderr)
        assert "fine:" not in result.stderr
        assert all(not host.find("program.py") for host in lab.bed.hosts)


def test_a_changed_host_key_in_the_middle_of_a_run(lab: SshLab) -> None:
    lab.configure(runner={"on_failure": "leave"})
    bystander_pids = start_bystanders(lab.bed)
    assert lab.run_action("run").returncode == 0
    output = lab.bed.known_hosts.read_text()
    lab.bed["h01"].change_host_key()
    assert lab.run_action("check").returncode == 3
    result = lab.run_action("query")
    assert result.returncode == 3
    assert "h01: HOST KEY HAS CHANGED" in result.stdout
    stop_result = lab.run_action("stop")
    assert stop_result.returncode == 3
    assert "h01" in stop_result.stderr
    assert "stopped on 1 other" in stop_result.stderr
    assert not lab.run_processes(lab.bed["h00"])
    # The user investigates, and trusts the new key.
    public = (lab.bed["h01"].directory / "hostkey.pub").read_text().strip()
    trusted = [line for line in output.splitlines() if not line.startswith("h01,")]
    lab.bed.known_hosts.write_text("\n".join([*trusted, f"h01,10.77.0.2 {public}"]) + "\n")
    assert lab.run_action("stop").returncode == 0
    assert lab.remaining_processes() == {}
    assert find_bystanders(lab.bed) == bystander_pids


def test_dead_sshd_makes_a_run_unreachable_but_not_ended(lab: SshLab) -> None:
    lab.configure()
    assert lab.run_action("run").returncode == 0
    host = lab.bed["h01"]
    host.stop_sshd()
    result = lab.run_action("query")
    assert result.returncode == 3
    assert "h01: connection refused" in result.stdout
    assert len(lab.run_processes(host)) > 1
    host.start_sshd()
    assert lab.query()["state"] == "running"
    assert lab.run_action("stop").returncode == 0
    assert lab.remaining_processes() == {}


def test_a_wrong_clock_is_refused(lab: SshLab) -> None:
    lab.configure()
    lab.bed["h01"].skew_clock(3600)
    result = lab.run_action("run")
    assert result.returncode == 2
    assert re.search(r"clock \(h01\): (3599|3600|3601) s ahead of ours", result.stderr)
    assert not lab.bed["h00"].find("program.py")


def test_a_wrong_clock_does_not_confuse_the_order_of_failures(lab: SshLab) -> None:
    # The library that skews the clock cannot sleep for no time: h01's rank does not sleep at all.
    program = (
        "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(2)\nraise SystemExit(7)\n"
    )
    lab.configure(program, runner={"preflight": False, "on_failure": "leave"})
    lab.bed["h01"].skew_clock(3600)
    assert lab.run_action("test").returncode == 7
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["failure"]["host"]) == ("failed", "h01")
    assert lab.remaining_processes() == {}


def test_a_host_that_loses_power(lab: SshLab) -> None:
    lab.configure(runner={"lost_host_timeout": 3})
    with lab.bed.ssh_config.open("a") as config:
        config.write("  ConnectTimeout 3\n")
    assert lab.run_action("run").returncode == 0
    lab.bed["h01"].cut_power()
    wait_for(lambda: not lab.run_processes(lab.bed["h00"]), seconds=30)
    result = lab.run_action("query", "json=true")
    assert result.returncode == 3
    record = json.loads(result.stdout)
    assert [row["state"] for row in record["hosts"]] == ["failed", "unreachable"]
    assert record["failure"]["host"] == "h01"
    assert "no word from its agent for 3 s" in record["failure"]["reason"]


def test_a_link_that_is_cut_while_the_launcher_waits(lab: SshLab) -> None:
    waiting = 'status.write("joined", backend="none")'
    lab.configure(
        STEADY_PROGRAM.replace(waiting, "time.sleep(600)"), runner={"lost_host_timeout": 3}
    )
    with lab.bed.ssh_config.open("a") as config:
        config.write("  ConnectTimeout 3\n")
    launcher = lab.start("run")
    wait_for(lambda: lab.exp_dir.joinpath("logs", "state.json").exists())
    wait_for(lambda: read_job_record(lab.state().hosts).get("hosts", {}).get("1") == "starting")
    lab.bed["h01"].set_link("down")
    output = launcher.communicate(timeout=PATIENCE_SECONDS)[0]
    assert launcher.returncode == 1
    assert "failed: h01: was lost: no word from its agent for 3 s" in output
    wait_for(lambda: not lab.remaining_processes(), seconds=30)


def test_port_in_use_is_reported_with_its_process(lab: SshLab) -> None:
    lab.configure(runner={"master_port": 23456})
    host = lab.bed["h00"]
    program = "import socket, time; s = socket.create_server(('', 23456)); time.sleep(1000)"
    listener = subprocess.Popen(
        ["nsenter", "-t", str(host.pid), "-a", "--", "python3", "-c", program]
    )
    try:
        wait_for(lambda: "23456" in host.run(["ss", "-ltn"]).stdout)
        result = lab.run_action("run")
        assert result.returncode == 2
        assert "port 23456 of h00 is in use by process" in result.stderr
    finally:
        listener.kill()
        listener.wait()


@pytest.mark.bed(hosts=2, root="private", shared=[])
def test_a_full_disk(lab: SshLab) -> None:
    lab.configure(runner={"no_shared_fs": True})
    lab.copy_program()
    host = lab.bed["h01"]
    host.mount_small_disk(lab.exp_dir, 1)
    host.fill_disk(lab.exp_dir)
    result = lab.run_action("run")
    assert result.returncode == 2
    assert "exp_dir (h01)" in result.stderr
    assert "make room" in result.stderr
    unchecked = lab.run_action("run", "experiment.runner.preflight=false")
    assert unchecked.returncode == 2
    assert "h01: the script could not be started" in unchecked.stderr
    assert "No space left on device" in unchecked.stderr
    assert lab.remaining_processes() == {}


@pytest.mark.bed(hosts=2, root="private", shared=[])
def test_disks_that_fill_up_during_a_run(lab: SshLab) -> None:
    """The agent needs no disk space to supervise the job, and makes room to record its end."""
    lab.configure(runner={"no_shared_fs": True})
    lab.copy_program()
    for host in lab.bed.hosts:
        host.mount_small_disk(lab.exp_dir, 80)
    assert lab.run_action("run").returncode == 0
    for host in lab.bed.hosts:
        host.fill_disk(lab.exp_dir)
    assert lab.query()["state"] == "running"
    rank = max(p.pid for p in lab.run_processes(lab.bed["h01"]) if "program.py" in str(p.argv))
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: not lab.remaining_processes(), seconds=30)
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["failure"]["host"]) == ("failed", "h01")
    assert {row["host"]: row["state"] for row in snapshot["hosts"]} == {
        "h00": "failed",
        "h01": "failed",
    }
    assert lab.run_action("stop").returncode == 0


@pytest.mark.bed(hosts=1, root="private", shared=[])
def test_missing_python(lab: SshLab) -> None:
    lab.configure(runner={"no_shared_fs": True, "python": "/opt/no such/python"})
    lab.copy_program()
    result = lab.run_action("run")
    assert result.returncode == 2
    assert "python (h00)" in result.stderr
    assert "/opt/no such/python" in result.stderr
    unchecked = lab.run_action("run", "experiment.runner.preflight=false")
    assert unchecked.returncode == 1
    assert "/opt/no such/python" in unchecked.stderr
    assert lab.remaining_processes() == {}


def test_a_launcher_that_is_killed_leaves_a_run_that_stop_ends(lab: SshLab) -> None:
    lab.configure()
    launcher = lab.start("test")
    wait_for((lab.exp_dir / "logs" / "state.json").exists)
    wait_for(lambda: lab.query()["state"] == "running")
    launcher.kill()
    launcher.wait()
    assert lab.query()["state"] == "running"
    assert lab.run_action("stop").returncode == 0
    assert lab.remaining_processes() == {}


def test_stopping_from_elsewhere_needs_no_config_but_the_directory(
    lab: SshLab, tmp_path: Path
) -> None:
    lab.configure()
    assert lab.run_action("run").returncode == 0
    # With another hostfile and program: the started run is the one that is stopped.
    (lab.root / "hostfile").write_text("h00 slots=1\n")
    (lab.root / "program.py").write_text("")
    assert lab.run_action("stop", f"experiment.exp_dir={os.fspath(lab.exp_dir)}").returncode == 0
    assert lab.remaining_processes() == {}
