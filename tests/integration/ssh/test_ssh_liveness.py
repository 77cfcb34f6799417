"""Tests of faults of hosts: without a `stop`, no process is left on any host.

``lab`` (support/ssh_lab.py) has an experiment on the hosts of the test bed ``lab.bed`` (tests/bed),
which are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

import pytest
from bed.host import Host
from support.liveness_lab import TOY_PROGRAM
from support.ssh_lab import PROJECT, SshLab, find_bystanders, start_bystanders
from support.waiting import wait_for

from flagscale.free_port import free_port
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE

pytestmark = pytest.mark.integration

# For tests in which a host is lost; in the other tests a short pause must not count as a loss.
QUICK = {"lost_host_timeout": 6}


def start(
    lab: SshLab, *, light: bool = True, runner: Any = None, **environment: str
) -> dict[str, list[int]]:
    """Start the toy program, whose ranks stay in step over the network, and bystander processes."""
    fields = {"TOY_PORT": str(free_port())}
    lab.configure(
        f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n{TOY_PROGRAM}",
        light=light,
        runner={"lost_host_timeout": 20, **(runner or {})},
        envs={**fields, **environment},
    )
    bystander_pids = start_bystanders(lab.bed)
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    return bystander_pids


def find_pid(lab: SshLab, host: Host, word: str) -> int:
    """Return the pid of the run's innermost process on a host with ``word`` in its command line."""
    return max(p.pid for p in lab.run_processes(host) if any(word in part for part in p.argv))


def read_exit_record(lab: SshLab, host: str) -> dict[str, Any]:
    run_dir = next(h.run_dir for h in lab.state().hosts if h.name == host)
    return dict(
        json.loads(
            wait_for(lambda: (run_dir / EXIT_FILE).exists() and run_dir / EXIT_FILE).read_text()
        )
    )


def wait_until_clean(lab: SshLab, others: dict[str, list[int]]) -> None:
    """Wait until the run has left no process on any host; check that bystanders are alive."""
    wait_for(lambda: not lab.remaining_processes(), seconds=60)
    assert find_bystanders(lab.bed) == others


def test_a_cut_link_ends_the_job_on_both_sides(lab: SshLab) -> None:
    with lab.bed.ssh_config.open("a") as config:
        config.write("  ConnectTimeout 3\n")
    bystander_pids = start(lab, runner=QUICK)
    lab.bed["h01"].set_link("down")
    wait_until_clean(lab, bystander_pids)
    stop_result = lab.run_action("stop")
    assert stop_result.returncode == 3
    assert "may still live on 1 host(s) that cannot be reached" in stop_result.stderr
    assert "h01" in stop_result.stderr
    failures = [read_exit_record(lab, host)["failure"] for host in ("h00", "h01")]
    assert [failure["host"] for failure in failures] == ["h01", "h00"]
    assert all("no word from its agent for 6 s" in failure["reason"] for failure in failures)
    lab.bed["h01"].set_link("up")
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["failure"]["host"]) == ("failed", "h01")
    assert lab.run_action("stop").returncode == 0


def test_link_restored_in_time(lab: SshLab) -> None:
    start(lab, runner={"lost_host_timeout": 60})
    host = lab.bed["h01"]
    port = json.loads(lab.state().hosts[0].script.parent.joinpath("plan.json").read_text())
    host.drop_packets(f"tcp sport {port['liveness_port']}")
    summary = lab.state().hosts[0].run_dir / LIVENESS_FILE
    # Longer than the heartbeat interval. The file is written when the summary changes.
    with pytest.raises(TimeoutError):
        wait_for(lambda: summary.exists() and "lost" in summary.read_text(), seconds=6)
    host.heal()
    assert lab.query()["state"] == "running"
    assert lab.run_action("stop").returncode == 0


@pytest.mark.parametrize("victim", ["h00", "h01"])
def test_a_killed_agent(lab: SshLab, victim: str) -> None:
    bystander_pids = start(lab, runner=QUICK)
    os.kill(find_pid(lab, lab.bed[victim], "flagscale.launcher.agent"), signal.SIGKILL)
    wait_until_clean(lab, bystander_pids)
    failure = lab.query()["failure"]
    assert (failure["host"], failure["rank"]) == (victim, None)
    assert "SIGKILL" in failure["reason"] or "no word from its agent" in failure["reason"]


def test_killed_script(lab: SshLab) -> None:
    """Its agent ends the job in order on all hosts, and it is not reported as a user's stop."""
    victim = "h01"
    bystander_pids = start(lab, runner={"max_restarts": 3})
    os.kill(find_pid(lab, lab.bed[victim], f"host_{victim[-1]}_{victim}_run.sh"), signal.SIGKILL)
    wait_until_clean(lab, bystander_pids)
    for host in lab.bed.names:
        assert read_exit_record(lab, host)["failure"]["host"] == victim
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["attempt"]) == ("failed", 1)
    assert (snapshot["failure"]["host"], snapshot["failure"]["rank"]) == (victim, None)
    assert "lost its script, which was killed" in snapshot["failure"]["reason"]


def test_a_killed_rank_is_named_with_host_log_and_signal(lab: SshLab) -> None:
    bystander_pids = start(lab, light=False)
    os.kill(find_pid(lab, lab.bed["h01"], "program.py"), signal.SIGKILL)
    wait_until_clean(lab, bystander_pids)
    snapshot = lab.query()
    failure = snapshot["failure"]
    assert (failure["host"], failure["rank"], failure["exit_code"]) == ("h01", 1, -9)
    assert failure["log"].endswith("/0/stderr.log")
    assert [row["state"] for row in snapshot["hosts"]] == ["failed", "failed"]


@pytest.mark.parametrize("victim", ["h00", "h01"])
def test_everything_on_one_host_is_killed(lab: SshLab, victim: str) -> None:
    bystander_pids = start(lab, runner=QUICK)
    for member in lab.run_processes(lab.bed[victim]):
        with suppress(ProcessLookupError):  # what its parent's end has ended already
            os.kill(member.pid, signal.SIGKILL)
    wait_until_clean(lab, bystander_pids)
    survivor = "h01" if victim == "h00" else "h00"
    failure = read_exit_record(lab, survivor)["failure"]
    assert (failure["host"], failure["rank"]) == (victim, None)
    assert lab.query()["failure"]["host"] == victim


def test_a_stopped_rank_is_a_stall(lab: SshLab) -> None:
    bystander_pids = start(lab, runner={"hang_detection_timeout": 8})
    os.kill(find_pid(lab, lab.bed["h01"], "program.py"), signal.SIGSTOP)
    wait_until_clean(lab, bystander_pids)
    failure = lab.query()["failure"]
    assert (failure["host"], failure["rank"]) == ("h01", 1)
    assert "SIGSTOP" in failure["reason"]


def test_the_job_starts_again_everywhere(lab: SshLab) -> None:
    bystander_pids = start(lab, runner={"max_restarts": 2}, TOY_1_0="raise", TOY_STEPS="40")
    wait_until_clean(lab, bystander_pids)
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["attempt"], snapshot["attempts"]) == ("completed", 2, 3)
    assert "attempt 2 of 3" in lab.run_action("query").stdout
