"""What becomes of runs on a real Slurm when something there goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from support.full_disk import fill
from support.launch_lab import until
from support.slurm_lab import Cluster, SlurmLab, slurm_lab

from flagscale.errors import JobError
from flagscale.launcher.runners.slurm.runner import SlurmRunner

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture
def lab(slurm_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    with slurm_lab(slurm_cluster, request.node.name) as made:
        yield made


def test_a_controller_that_does_not_answer_is_no_end(lab: SlurmLab) -> None:
    slurm = lab.cluster.slurm
    lab.slurm()
    assert lab.do("run").returncode == 0
    with slurm.without_controller():
        # Slurm's own commands take seconds to give up.
        asked, stopped = lab.start("query"), lab.start("stop")
        for launcher, said in ((asked, "answer: "), (stopped, "may live: Slurm does not answer")):
            out, _ = launcher.communicate(timeout=60)
            assert (launcher.returncode, said in out) == (3, True), out
        assert len(lab.processes()) > 0
    lab.until_state("running")
    # Nor is a node whose slurmd was killed: nobody notices before it is taken for down.
    with slurm.without_daemon("h01"):
        assert lab.query()["state"] == "running"
        assert lab.do("stop").returncode == 0
        assert lab.processes() == []


def test_a_directory_that_nodes_do_not_share(lab: SlurmLab, tmp_path: Path) -> None:
    lab.slurm()
    # Of /tmp every node has its own.
    exp_dir = Path(f"/tmp/{tmp_path.name}-{os.getpid()}")
    done = lab.do("run", f"experiment.exp_dir={exp_dir}")
    shutil.rmtree(exp_dir)
    assert done.returncode == 1
    assert "ended as FAILED" in done.stderr
    assert "which nodes have to share with this machine" in done.stderr


def test_a_full_disk_keeps_no_job_alive(lab: SlurmLab) -> None:
    """Neither one that is to start there, nor one that is to be stopped."""
    lab.slurm()
    assert lab.do("run").returncode == 0
    filler = fill(lab.cluster.shared)
    try:
        refused = lab.do("run", f"experiment.exp_dir={lab.root}/other")
        assert (refused.returncode, "MiB free" in refused.stderr) == (2, True), refused.stderr
        stopped = lab.do("stop")
        # The agents give up a file of theirs, which may make room for what is to be recorded.
        told = "stopped in" in stopped.stdout or "could not be recorded" in stopped.stderr
        assert told, stopped.stdout + stopped.stderr
        lab.cluster.slurm.wait_empty()
        assert lab.processes() == []
        assert lab.query()["state"] == "stopped"
        # Nor does one that nobody has looked at before hold its nodes.
        assert lab.do("run", "experiment.runner.preflight=false").returncode == 1
        lab.cluster.slurm.wait_empty()
    finally:
        filler.unlink()
    started = lab.do("run")
    assert started.returncode == 0, started.stderr


def test_of_two_launchers_at_once_one_submits(lab: SlurmLab) -> None:
    lab.slurm()
    first, second = (lab.start("run") for _ in range(2))
    outs = [launcher.communicate(timeout=60)[0] for launcher in (first, second)]
    codes = [launcher.returncode for launcher in (first, second)]
    assert sorted(codes) in ([0, 1], [0, 2]), outs
    assert " is alive " in outs[codes.index(max(codes))]
    assert lab.cluster.slurm.jobs() == [lab.job]
    assert lab.query()["state"] == "running"


def test_a_lost_node_ends_the_job_on_the_others(lab: SlurmLab) -> None:
    lab.slurm(runner={"lost_host_timeout": 1, "stop_grace": 0})
    assert lab.do("run").returncode == 0
    # All that Slurm and the run have there: as after a crash, from which slurmd comes back at once.
    for process in lab.cluster.slurm.bed["h01"].find("slurmstepd") + lab.processes("h01"):
        with suppress(ProcessLookupError):  # It may have ended with another one.
            os.kill(process.pid, signal.SIGKILL)
    now = lab.until_state("failed", 60)
    assert now["failure"]["host"] == "h01"
    # Nor does the job hold its nodes, though Slurm takes the one that was lost for well.
    lab.cluster.slurm.wait_empty(60)
    assert lab.processes() == []


def test_what_slurm_has_lost_hold_of_saves_and_ends(lab: SlurmLab) -> None:
    """Slurm's own daemon of the step is killed on a node, and nothing of the run."""
    lab.slurm(runner={"lost_host_timeout": 3, "stop_grace": 2})
    assert lab.do("run").returncode == 0
    lab.until_state("running")
    for daemon in lab.cluster.slurm.bed["h01"].find("slurmstepd"):
        os.kill(daemon.pid, signal.SIGKILL)
    until(lambda: not lab.processes("h01"), 20)
    assert "saved 1" in lab.state().hosts[1].output.read_text()
    lab.cluster.slurm.wait_empty(60)
    assert lab.processes() == []


def test_a_node_that_slurm_takes_for_down_is_what_a_run_fails_by(lab: SlurmLab) -> None:
    lab.slurm(runner={"stop_grace": 0})
    launcher = lab.start("test")
    until(lambda: lab.layout.state.exists() and lab.query()["joined"] == 2)
    with lab.cluster.slurm.without_node("h01", str(lab.root)):
        now = lab.until_state("failed")
        assert now["warnings"] == [f"job {lab.job} lost a node: h01"]
        assert now["failure"]["host"] == "h01"
        out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == now["exit_code"] > 0, out
    assert "first failure: h01: " in out
    assert lab.processes() == []


def test_a_run_whose_first_node_is_lost_goes_on_as_the_same(lab: SlurmLab) -> None:
    """Its batch script, the coordinator of its agents and rank 0 are all gone with it."""
    slurm = lab.cluster.slurm
    lab.slurm(requeue=1)
    assert lab.do("run").returncode == 0
    run_id = lab.state().run_id
    with slurm.without_node("h00", str(lab.root)):
        lab.until_waiting("(BeginTime: ")
        until(lambda: lab.processes() == [])
    lab.until_state("running", 60)
    assert lab.state().run_id == run_id
    # It is a later attempt to its ranks, which go on from what they have saved themselves.
    ranks = ("h00: rank 0 attempt", "h01: rank 1 attempt")

    def started_again() -> str | None:
        output = lab.do("logs").stdout
        return output if all(f"{rank} 1" in output for rank in ranks) else None

    output = str(until(started_again))
    for rank in ranks:
        assert -1 < output.find(f"{rank} 0") < output.find(f"{rank} 1"), output
    # It was started as often as it may be.
    slurm.run("scontrol", "requeue", lab.job)
    told = "was started by Slurm more often than slurm.requeue allows"
    until(lambda: told in str(lab.query()["warnings"]))
    assert lab.processes() == []


def test_ctrl_c_before_sbatch_has_answered(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the job may have been taken."""
    sbatch = shutil.which("sbatch")
    programs = lab.root / "programs"
    programs.mkdir()
    slow = programs / "sbatch"
    slow.write_text(f'#!/bin/sh\n{sbatch} "$@"\nstatus=$?\nsleep 4\nexit $status\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    lab.slurm()
    launcher = lab.start("test", in_a_group=True)
    until(lab.cluster.slurm.jobs)
    os.killpg(launcher.pid, signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGINT, out
    assert "Slurm was asked for its job already" in out
    lab.cluster.slurm.wait_empty()
    assert lab.processes() == []


def test_a_suspended_job_is_told_of_and_stopped(lab: SlurmLab) -> None:
    slurm = lab.cluster.slurm
    lab.slurm()
    assert lab.do("run").returncode == 0
    slurm.run("scontrol", "suspend", lab.job)
    assert lab.until_warned() == "Slurm has suspended the job"
    stopped = lab.do("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert lab.processes() == []
    assert lab.query()["state"] == "stopped"


def test_a_job_that_is_cancelled_while_it_waits(lab: SlurmLab) -> None:
    """Whoever waits for it ends as a run that was stopped."""
    lab.slurm(extra={"hold": True})
    lab.submit()
    lab.cluster.slurm.run("scancel", lab.job)

    def wait() -> dict[str, Any]:
        with closing(SlurmRunner()) as runner, pytest.raises(JobError) as error:
            runner.await_hosts(lab.state())
        return {"message": error.value.message, "code": error.value.exit_code}

    told = lab.cluster.user.do(wait)
    assert f"has not started: job {lab.job} was cancelled" in told["message"]
    assert told["code"] == 128 + signal.SIGTERM
