"""Tests of stops over SSH with ranks that do not end, and on a full disk.

``lab`` (support/ssh_lab.py) has an experiment on the hosts of the test bed ``lab.bed`` (tests/bed),
which are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import os
import signal

import pytest
from support.ssh_lab import STEADY_PROGRAM, SshLab

from flagscale.launcher.layout import Layout

pytestmark = pytest.mark.integration

REPORTING = STEADY_PROGRAM.replace("rank=rank)", "rank=rank, pid=os.getpid())")


def start(lab: SshLab, *, shared: bool = True) -> None:
    lab.slots = 2
    lab.configure(REPORTING, runner={"stop_grace": 5, "no_shared_fs": not shared})
    if not shared:
        lab.copy_program()
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(True, id="shared", marks=pytest.mark.bed(hosts=1)),
        pytest.param(
            False, id="private", marks=pytest.mark.bed(hosts=1, root="private", shared=[])
        ),
    ],
)
def test_a_rank_that_had_to_be_killed_is_named(lab: SshLab, shared: bool) -> None:
    start(lab, shared=shared)
    members = [(p.pid, p.environment().get("RANK")) for p in lab.run_processes(lab.bed["h00"])]
    (pid,) = [pid for pid, rank in members if rank == "1"]
    os.kill(pid, signal.SIGSTOP)
    result = lab.run_action("stop")
    assert result.returncode == 0, result.stderr
    assert lab.remaining_processes() == {}
    assert "stopped in" in result.stdout
    assert (
        "warning: rank 1 on h00 did not end within the 5 s of runner.stop_grace and was killed; "
        "what was not saved is lost" in result.stderr
    )


def test_a_stop_that_cannot_be_recorded_is_an_error_afterwards(lab: SshLab) -> None:
    start(lab)
    result = lab.run_action("stop", wrapper=["prlimit", "--fsize=0"])
    assert lab.remaining_processes() == {}
    assert result.returncode == 1
    assert "stopped in" in result.stdout
    path = Layout(lab.exp_dir).state
    assert f"could not be recorded: {path}: File too large" in result.stderr


@pytest.mark.bed(hosts=3)
def test_every_host_has_the_whole_grace_period(lab: SshLab) -> None:
    """A host's agent is informed of the stop by the others as well; that must not count as a second
    signal.
    """
    save = f"open({str(lab.root)!r} + f'/saved_{{rank}}', 'w')"
    saving = f"lambda *_: (time.sleep(2), {save}, sys.exit(0))"
    lab.configure(
        STEADY_PROGRAM.replace("lambda *_: sys.exit(0)", saving), runner={"stop_grace": 20}
    )
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    result = lab.run_action("stop")
    assert (result.returncode, result.stderr) == (0, "")
    assert lab.remaining_processes() == {}
    assert sorted(path.name for path in lab.root.glob("saved_*")) == [
        "saved_0",
        "saved_1",
        "saved_2",
    ]
