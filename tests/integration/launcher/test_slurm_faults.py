"""Tests of faults during runs on a real Slurm."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from support.full_disk import fill_disk
from support.launch_lab import until
from support.slurm_lab import Cluster, SlurmLab, slurm_lab

from flagscale.errors import JobError
from flagscale.launcher.runners.slurm.runner import SlurmRunner

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture
def lab(slurm_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    with slurm_lab(slurm_cluster, request.node.name) as new_lab:
        yield new_lab


def test_a_controller_that_does_not_answer_is_no_end(lab: SlurmLab) -> None:
    slurm = lab.cluster.slurm
    lab.slurm()
    assert lab.do("run").returncode == 0
    with slurm.without_controller():
        # Slurm's own commands take seconds to give up.
        query, stopped = lab.start("query"), lab.start("stop")
        for launcher, message in (
            (query, "answer: "),
            (stopped, "may live: Slurm does not answer"),
        ):
            out, _ = launcher.communicate(timeout=60)
            assert (launcher.returncode, message in out) == (3, True), out
        assert len(lab.processes()) > 0
    lab.until_state("running")
    # A node whose slurmd was killed is only noticed once Slurm reports it as down.
    with slurm.without_daemon("h01"):
        assert lab.query()["state"] == "running"
        assert lab.do("stop").returncode == 0
        assert lab.processes() == []


def test_a_directory_that_nodes_do_not_share(lab: SlurmLab, tmp_path: Path) -> None:
    lab.slurm()
    # Every node has its own /tmp.
    exp_dir = Path(f"/tmp/{tmp_path.name}-{os.getpid()}")
    result = lab.do("run", f"experiment.exp_dir={exp_dir}")
    shutil.rmtree(exp_dir)
    assert result.returncode == 1
    assert "ended as FAILED" in result.stderr
    assert "which nodes have to share with this machine" in result.stderr


def test_jobs_end_on_a_full_disk(lab: SlurmLab) -> None:
    """Neither a job that is starting, nor one that is being stopped, stays alive."""
    lab.slurm()
    assert lab.do("run").returncode == 0
    filler = fill_disk(lab.cluster.shared)
    try:
        refused = lab.do("run", f"experiment.exp_dir={lab.root}/other")
        assert (refused.returncode, "MiB free" in refused.stderr) == (2, True), refused.stderr
        stopped = lab.do("stop")
        # The agents remove one of their files to make room for the record of the end.
        output = "stopped in" in stopped.stdout or "could not be recorded" in stopped.stderr
        assert output, stopped.stdout + stopped.stderr
        lab.cluster.slurm.wait_empty()
        assert lab.processes() == []
        assert lab.query()["state"] == "stopped"
        # A job that was never queried does not keep its nodes either.
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


def test_lost_node_ends_the_job_on_the_others(lab: SlurmLab) -> None:
    lab.slurm(runner={"lost_host_timeout": 1, "stop_grace": 0})
    assert lab.do("run").returncode == 0
    # All that Slurm and the run have there: as after a crash, from which slurmd comes back at once.
    for process in lab.cluster.slurm.bed["h01"].find("slurmstepd") + lab.processes("h01"):
        with suppress(ProcessLookupError):  # It may have ended with another one.
            os.kill(process.pid, signal.SIGKILL)
    now = lab.until_state("failed", 60)
    assert now["failure"]["host"] == "h01"
    # The job does not keep its nodes, although Slurm considers the lost one healthy.
    lab.cluster.slurm.wait_empty(60)
    assert lab.processes() == []


def test_untracked_processes_save_and_end(lab: SlurmLab) -> None:
    """Slurm's own daemon of the step is killed on a node, and no process of the run."""
    lab.slurm(runner={"lost_host_timeout": 3, "stop_grace": 2})
    assert lab.do("run").returncode == 0
    lab.until_state("running")
    for daemon in lab.cluster.slurm.bed["h01"].find("slurmstepd"):
        os.kill(daemon.pid, signal.SIGKILL)
    until(lambda: not lab.processes("h01"), 20)
    assert "saved 1" in lab.state().hosts[1].output.read_text()
    lab.cluster.slurm.wait_empty(60)
    assert lab.processes() == []


def test_node_reported_as_down_is_the_failure(lab: SlurmLab) -> None:
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


def test_run_continues_after_the_loss_of_its_first_node(lab: SlurmLab) -> None:
    """Its batch script, the agents' coordinator and rank 0 are lost with it."""
    slurm = lab.cluster.slurm
    lab.slurm(requeue=1)
    assert lab.do("run").returncode == 0
    run_id = lab.state().run_id
    with slurm.without_node("h00", str(lab.root)):
        lab.until_waiting("(BeginTime: ")
        until(lambda: lab.processes() == [])
    lab.until_state("running", 60)
    assert lab.state().run_id == run_id
    # For its ranks it is a later attempt, which continues from their own checkpoints.
    ranks = ("h00: rank 0 attempt", "h01: rank 1 attempt")

    def started_again() -> str | None:
        output = lab.do("logs").stdout
        return output if all(f"{rank} 1" in output for rank in ranks) else None

    output = str(until(started_again))
    for rank in ranks:
        assert -1 < output.find(f"{rank} 0") < output.find(f"{rank} 1"), output
    # It was started as often as it may be.
    slurm.run("scontrol", "requeue", lab.job)
    reason = "was started by Slurm more often than slurm.requeue allows"
    until(lambda: reason in str(lab.query()["warnings"]))
    assert lab.processes() == []


def test_ctrl_c_before_sbatch_has_returned(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may have accepted the job already."""
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
    assert "its job was submitted already" in out
    lab.cluster.slurm.wait_empty()
    assert lab.processes() == []


def test_suspended_job_is_reported_and_stopped(lab: SlurmLab) -> None:
    slurm = lab.cluster.slurm
    lab.slurm()
    assert lab.do("run").returncode == 0
    slurm.run("scontrol", "suspend", lab.job)
    assert lab.until_warned() == "Slurm has suspended the job"
    stopped = lab.do("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert lab.processes() == []
    assert lab.query()["state"] == "stopped"


def test_job_cancelled_while_pending(lab: SlurmLab) -> None:
    """A launcher that waits for it ends as after a stop."""
    lab.slurm(extra={"hold": True})
    lab.submit()
    lab.cluster.slurm.run("scancel", lab.job)

    def wait() -> dict[str, Any]:
        with closing(SlurmRunner()) as runner, pytest.raises(JobError) as error:
            runner.await_hosts(lab.state())
        return {"message": error.value.message, "code": error.value.exit_code}

    result = lab.cluster.user.do(wait)
    assert f"has not started: job {lab.job} was cancelled" in result["message"]
    assert result["code"] == 128 + signal.SIGTERM
