"""What hosts of a run make of each other's faults: nothing is left anywhere, without a `stop`."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

import pytest
from bed.host import Host
from support.launch_lab import free_port, until
from support.liveness_lab import TOY
from support.ssh_lab import PROJECT, SshLab, bystanders, sleepers

from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE

pytestmark = pytest.mark.integration

# Silence that counts as a loss, the end of the job, and room for a busy machine.
ENOUGH_SECONDS = 30.0


# For tests in which a host is lost; in the others no busy moment may pass for a loss.
QUICK = {"lost_host_timeout": 3}


def start(
    lab: SshLab, *, light: bool = True, runner: Any = None, **environment: str
) -> dict[str, list[int]]:
    """Start the toy, whose ranks keep in step over the network, beside bystanders."""
    given = {"TOY_ADDRESS": lab.bed["h00"].address, "TOY_PORT": str(free_port())}
    lab.configure(
        f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n{TOY}",
        light=light,
        runner={"lost_host_timeout": 20, **(runner or {})},
        envs={**given, **environment},
    )
    others = bystanders(lab.bed)
    done = lab.do("run")
    assert done.returncode == 0, done.stderr
    return others


def process(lab: SshLab, host: Host, word: str) -> int:
    """The pid of the run's process on a host whose command line holds ``word``; the innermost."""
    return max(p.pid for p in lab.members(host) if any(word in part for part in p.argv))


def ended(lab: SshLab, host: str) -> dict[str, Any]:
    run_dir = next(h.run_dir for h in lab.state().hosts if h.name == host)
    return dict(
        json.loads(
            until(
                lambda: (run_dir / EXIT_FILE).exists() and run_dir / EXIT_FILE, ENOUGH_SECONDS
            ).read_text()
        )
    )


def clean(lab: SshLab, others: dict[str, list[int]]) -> None:
    """Wait until nothing of the run is left on any host, and see that nobody else was touched."""
    until(lambda: not lab.orphans(), ENOUGH_SECONDS)
    assert sleepers(lab.bed) == others


def test_a_cut_link_ends_the_job_on_both_sides(lab: SshLab) -> None:
    with lab.bed.ssh_config.open("a") as config:
        config.write("  ConnectTimeout 3\n")
    others = start(lab, runner=QUICK)
    lab.bed["h01"].link("down")
    clean(lab, others)
    stopped = lab.do("stop")
    assert stopped.returncode == 3
    assert "may still live on 1 host(s) that cannot be reached" in stopped.stderr
    assert "h01" in stopped.stderr
    lost = [ended(lab, host)["failure"] for host in ("h00", "h01")]
    assert [failure["host"] for failure in lost] == ["h01", "h00"]
    assert all("no word from its agent for 3 s" in failure["reason"] for failure in lost)
    lab.bed["h01"].link("up")
    seen = lab.query()
    assert (seen["state"], seen["failure"]["host"]) == ("failed", "h01")
    assert lab.do("stop").returncode == 0


def test_a_link_that_comes_back_in_time_is_forgiven(lab: SshLab) -> None:
    start(lab, runner={"lost_host_timeout": 15})
    host = lab.bed["h01"]
    port = json.loads(lab.state().hosts[0].script.parent.joinpath("plan.json").read_text())
    host.drop(f"tcp sport {port['liveness_port']}")
    summary = lab.state().hosts[0].run_dir / LIVENESS_FILE
    # Longer than from one heartbeat to the next. The file is written once there is news.
    with pytest.raises(pytest.fail.Exception):
        until(lambda: summary.exists() and "lost" in summary.read_text(), 4)
    host.heal()
    assert lab.query()["state"] == "running"
    assert lab.do("stop").returncode == 0


@pytest.mark.parametrize("victim", ["h00", "h01"])
def test_a_killed_agent(lab: SshLab, victim: str) -> None:
    others = start(lab, runner=QUICK)
    os.kill(process(lab, lab.bed[victim], "flagscale.launcher.agent"), signal.SIGKILL)
    clean(lab, others)
    failure = lab.query()["failure"]
    assert (failure["host"], failure["rank"]) == (victim, None)
    assert "SIGKILL" in failure["reason"] or "no word from its agent" in failure["reason"]


def test_a_killed_script(lab: SshLab) -> None:
    """Its agent ends the job in order, everywhere, and nobody takes that for a stop by the user."""
    victim = "h01"
    others = start(lab, runner={"max_restarts": 3})
    os.kill(process(lab, lab.bed[victim], f"host_{victim[-1]}_{victim}_run.sh"), signal.SIGKILL)
    clean(lab, others)
    for host in lab.bed.names:
        assert ended(lab, host)["failure"]["host"] == victim
    seen = lab.query()
    assert (seen["state"], seen["attempt"]) == ("failed", 1)
    assert (seen["failure"]["host"], seen["failure"]["rank"]) == (victim, None)
    assert "lost its script, which was killed" in seen["failure"]["reason"]


def test_a_killed_rank_is_named_with_host_log_and_signal(lab: SshLab) -> None:
    others = start(lab, light=False)
    os.kill(process(lab, lab.bed["h01"], "program.py"), signal.SIGKILL)
    clean(lab, others)
    seen = lab.query()
    failure = seen["failure"]
    assert (failure["host"], failure["rank"], failure["exit_code"]) == ("h01", 1, -9)
    assert failure["log"].endswith("/0/stderr.log")
    assert [row["state"] for row in seen["hosts"]] == ["failed", "failed"]


@pytest.mark.parametrize("victim", ["h00", "h01"])
def test_everything_on_one_host_is_killed(lab: SshLab, victim: str) -> None:
    others = start(lab, runner=QUICK)
    for left in lab.members(lab.bed[victim]):
        with suppress(ProcessLookupError):  # what its parent's end has ended already
            os.kill(left.pid, signal.SIGKILL)
    clean(lab, others)
    other = "h01" if victim == "h00" else "h00"
    failure = ended(lab, other)["failure"]
    assert (failure["host"], failure["rank"]) == (victim, None)
    assert lab.query()["failure"]["host"] == victim


def test_a_stopped_rank_is_a_stall(lab: SshLab) -> None:
    others = start(lab, runner={**QUICK, "hang_detection_timeout": 3})
    os.kill(process(lab, lab.bed["h01"], "program.py"), signal.SIGSTOP)
    clean(lab, others)
    failure = lab.query()["failure"]
    assert (failure["host"], failure["rank"]) == ("h01", 1)
    assert "SIGSTOP" in failure["reason"]


def test_the_job_starts_again_everywhere(lab: SshLab) -> None:
    others = start(lab, runner={"max_restarts": 2}, TOY_1_0="raise", TOY_STEPS="40")
    clean(lab, others)
    seen = lab.query()
    assert (seen["state"], seen["attempt"], seen["attempts"]) == ("completed", 2, 3)
    assert "attempt 2 of 3" in lab.do("query").stdout
