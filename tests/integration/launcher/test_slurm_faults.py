"""Tests of faults during runs on a real Slurm.

``lab`` (support/slurm_lab.py) has an experiment on a Slurm cluster, whose nodes are the hosts of a
test bed (tests/bed): namespaces of this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.full_disk import fill_disk
from support.slurm_lab import Cluster, SlurmLab, slurm_lab
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.errors import JobError
from flagscale.launcher.runners.slurm.runner import SlurmRunner

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture
def lab(slurm_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    with slurm_lab(slurm_cluster, request.node.name) as new_lab:
        yield new_lab


def test_a_controller_that_does_not_answer_is_no_end(lab: SlurmLab) -> None:
    slurm = lab.cluster.slurm
    lab.write_config()
    assert lab.run_action("run").returncode == 0
    with slurm.without_controller():
        # Slurm's own commands take seconds to give up.
        query_launcher, stop_launcher = lab.start("query"), lab.start("stop")
        for launcher, message in (
            (query_launcher, "answer: "),
            (stop_launcher, "may live: Slurm does not answer"),
        ):
            out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
            assert (launcher.returncode, message in out) == (3, True), out
        assert len(lab.find_processes()) > 0
    lab.wait_for_state("running")
    # A node whose slurmd was killed is only noticed once Slurm reports it as down.
    with slurm.without_slurmd("h01"):
        assert lab.query()["state"] == "running"
        assert lab.run_action("stop").returncode == 0
        assert lab.find_processes() == []


def test_a_directory_that_nodes_do_not_share(lab: SlurmLab, tmp_path: Path) -> None:
    lab.write_config()
    # Every node has its own /tmp.
    exp_dir = Path(f"/tmp/{tmp_path.name}-{os.getpid()}")
    result = lab.run_action("run", f"experiment.exp_dir={exp_dir}")
    shutil.rmtree(exp_dir)
    assert result.returncode == 1
    assert "ended as FAILED" in result.stderr
    assert "which nodes have to share with this machine" in result.stderr


def test_jobs_end_on_a_full_disk(lab: SlurmLab) -> None:
    """Neither a job that is starting, nor one that is being stopped, stays alive."""
    lab.write_config()
    assert lab.run_action("run").returncode == 0
    filler = fill_disk(lab.cluster.shared)
    try:
        rejected = lab.run_action("run", f"experiment.exp_dir={lab.root}/other")
        assert (rejected.returncode, "MiB free" in rejected.stderr) == (2, True), rejected.stderr
        stop_result = lab.run_action("stop")
        # The agents remove one of their files to make room for the record of the end.
        output = "stopped in" in stop_result.stdout or "could not be recorded" in stop_result.stderr
        assert output, stop_result.stdout + stop_result.stderr
        lab.cluster.slurm.wait_until_no_jobs()
        assert lab.find_processes() == []
        assert lab.query()["state"] == "stopped"
        # A job that was never queried does not keep its nodes either.
        assert lab.run_action("run", "experiment.runner.preflight=false").returncode == 1
        lab.cluster.slurm.wait_until_no_jobs()
    finally:
        filler.unlink()
    start_result = lab.run_action("run")
    assert start_result.returncode == 0, start_result.stderr


def test_of_two_launchers_at_once_one_submits(lab: SlurmLab) -> None:
    lab.write_config()
    first, second = (lab.start("run") for _ in range(2))
    outputs = [launcher.communicate(timeout=PATIENCE_SECONDS)[0] for launcher in (first, second)]
    codes = [launcher.returncode for launcher in (first, second)]
    assert sorted(codes) in ([0, 1], [0, 2]), outputs
    assert " is alive " in outputs[codes.index(max(codes))]
    assert lab.cluster.slurm.list_jobs() == [lab.job_id]
    assert lab.query()["state"] == "running"


def test_lost_node_ends_the_job_on_the_others(lab: SlurmLab) -> None:
    lab.write_config(runner={"lost_host_timeout": 1, "stop_grace": 0})
    assert lab.run_action("run").returncode == 0
    lab.cluster.slurm.crash_node("h01")
    query_record = lab.wait_for_state("failed")
    assert query_record["failure"]["host"] == "h01"
    # The job does not keep its nodes, although Slurm considers the lost one healthy.
    lab.cluster.slurm.wait_until_no_jobs(60)
    assert lab.find_processes() == []


def test_untracked_processes_save_and_end(lab: SlurmLab) -> None:
    """Slurm's step daemon is killed on a node, but no process of the run."""
    lab.write_config(runner={"lost_host_timeout": 3, "stop_grace": 2})
    assert lab.run_action("run").returncode == 0
    lab.wait_for_state("running")
    for daemon in lab.cluster.slurm.bed["h01"].find("slurmstepd"):
        os.kill(daemon.pid, signal.SIGKILL)
    wait_for(lambda: not lab.find_processes("h01"), seconds=20)
    assert "saved 1" in lab.state().hosts[1].output.read_text()
    lab.cluster.slurm.wait_until_no_jobs(60)
    assert lab.find_processes() == []


def test_node_reported_as_down_is_the_failure(lab: SlurmLab) -> None:
    lab.write_config(runner={"stop_grace": 0})
    launcher = lab.start("test")
    wait_for(lambda: lab.layout.state.exists() and lab.query()["joined"] == 2)
    with lab.cluster.slurm.without_node("h01"):
        query_record = lab.wait_for_state("failed")
        assert query_record["warnings"] == [f"job {lab.job_id} lost a node: h01"]
        assert query_record["failure"]["host"] == "h01"
        out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == query_record["exit_code"] > 0, out
    assert "first failure: h01: " in out
    assert lab.find_processes() == []


def test_no_other_node_is_the_failure_if_the_lost_one_is_back(lab: SlurmLab) -> None:
    """Nobody looks at the run while its node is down, and both nodes record their end."""
    slurm = lab.cluster.slurm
    lab.write_config(runner={"stop_grace": 0})
    assert lab.run_action("run").returncode == 0
    assert [host.name for host in lab.state().hosts] == ["h00", "h01"]
    slurm.run("scontrol", "update", "nodename=h01", "state=down", "reason=lost")
    slurm.wait_until_no_jobs(60)
    # Its daemon registers again.
    wait_for(lambda: "down" not in slurm.run("sinfo", "-h", "-n", "h01", "-o", "%T"))
    query_record = lab.wait_for_state("failed")
    failure = query_record["failure"]
    assert failure["host"] == "h[00-01]"
    assert "which one is not known" in failure["reason"]
    lost = f"job {lab.job_id} lost a node; which one of h[00-01] is not known"
    assert query_record["warnings"] == [lost]


def test_run_continues_after_the_loss_of_its_first_node(lab: SlurmLab) -> None:
    """Its batch script, the agents' coordinator and rank 0 are lost with it."""
    slurm = lab.cluster.slurm
    lab.write_config(requeue=1)
    assert lab.run_action("run").returncode == 0
    run_id = lab.state().run_id
    with slurm.without_node("h00"):
        lab.wait_for_pending_reason("(BeginTime: ")
        wait_for(lambda: lab.find_processes() == [])
    lab.wait_for_state("running")
    assert lab.state().run_id == run_id
    # For the ranks it is a later attempt, which continues from their checkpoints.
    ranks = ("h00: rank 0 attempt", "h01: rank 1 attempt")

    def started_again() -> str | None:
        output = lab.run_action("logs").stdout
        return output if all(f"{rank} 1" in output for rank in ranks) else None

    output = str(wait_for(started_again))
    for rank in ranks:
        assert -1 < output.find(f"{rank} 0") < output.find(f"{rank} 1"), output
    # It was started as often as slurm.requeue allows.
    slurm.run("scontrol", "requeue", lab.job_id)
    reason = "was started by Slurm more often than slurm.requeue allows"
    wait_for(lambda: reason in str(lab.query()["warnings"]))
    assert lab.find_processes() == []


def test_ctrl_c_before_sbatch_has_returned(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may have accepted the job already."""
    sbatch = shutil.which("sbatch")
    programs = lab.root / "programs"
    programs.mkdir()
    slow_sbatch = programs / "sbatch"
    slow_sbatch.write_text(f'#!/bin/sh\n{sbatch} "$@"\nstatus=$?\nsleep 4\nexit $status\n')
    slow_sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    lab.write_config()
    launcher = lab.start("test", own_process_group=True)
    wait_for(lab.cluster.slurm.list_jobs)
    os.killpg(launcher.pid, signal.SIGINT)
    out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 128 + signal.SIGINT, out
    assert "its job was submitted already" in out
    lab.cluster.slurm.wait_until_no_jobs()
    assert lab.find_processes() == []


def test_suspended_job_is_reported_and_stopped(lab: SlurmLab) -> None:
    slurm = lab.cluster.slurm
    lab.write_config()
    assert lab.run_action("run").returncode == 0
    slurm.run("scontrol", "suspend", lab.job_id)
    assert lab.wait_for_warning() == "Slurm has suspended the job"
    stop_result = lab.run_action("stop")
    assert stop_result.returncode == 0, stop_result.stderr
    assert lab.find_processes() == []
    assert lab.query()["state"] == "stopped"


def test_job_that_starts_after_its_stop_was_requested_starts_no_rank(lab: SlurmLab) -> None:
    """Slurm drops a signal to a script that it is about to start."""
    lab.write_config(extra={"hold": True})
    lab.submit()
    (lab.layout.logs / "slurm" / lab.state().run_id / "stop").touch()
    replace(lab.state(), stop_requested=time.time()).save(lab.layout.state)
    os.chown(lab.layout.state, lab.cluster.user.uid, lab.cluster.user.gid)
    lab.cluster.slurm.run("scontrol", "release", lab.job_id)
    lab.wait_for_state("stopped")
    assert "rank" not in lab.run_action("logs").stdout


def test_job_cancelled_while_pending(lab: SlurmLab) -> None:
    """A launcher that waits for it ends as after a stop."""
    lab.write_config(extra={"hold": True})
    lab.submit()
    lab.cluster.slurm.run("scancel", lab.job_id)

    def wait() -> dict[str, Any]:
        with closing(SlurmRunner()) as runner, pytest.raises(JobError) as error:
            runner.await_hosts(lab.state())
        return {"message": error.value.message, "code": error.value.exit_code}

    result = lab.cluster.user.call(wait)
    assert f"has not started: job {lab.job_id} was cancelled" in result["message"]
    assert result["code"] == 128 + signal.SIGTERM
