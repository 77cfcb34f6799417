"""Tests of Slurm jobs that lose a node: a spare takes its place, or the job goes on without it.

``lab`` (support/slurm_lab.py) has an experiment on a Slurm cluster, whose nodes are the hosts of a
test bed (tests/bed): namespaces of this machine. h00 and h01 train, h02 is a spare.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
from support.health_lab import install_chip
from support.launch_lab import PROJECT
from support.slurm_lab import Cluster, SlurmLab, require_cluster, slurm_lab
from support.waiting import PATIENCE_SECONDS, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

REPLACING = {"spares": 1, "on_bad_host": "replace", "lost_host_timeout": 4}
SHRINKING = {"nnodes": "2:3", "on_bad_host": "shrink", "lost_host_timeout": 4}
# Ranks wait for each other before they join, as in a rendezvous, and end with code 0 once the
# directory has a file `end`.
PROGRAM = """\
import os, signal, sys, time
from pathlib import Path
from flagscale.status import StatusWriter
rank, world, attempt = (os.environ[n] for n in ("RANK", "WORLD_SIZE", "FLAGSCALE_ATTEMPT"))
status = StatusWriter.from_environment(int(rank))
def save(*_):
    print("saved", rank, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
status.write("started")
meet = Path(os.environ["MEET"], attempt)
meet.mkdir(exist_ok=True, parents=True)
(meet / rank).touch()
while len(list(meet.iterdir())) < int(world):
    time.sleep(0.1)
for event in ("joined", "ready"):
    status.write(event)
print("rank", rank, "of", world, "attempt", attempt, flush=True)
while not (meet.parent / "end").exists():
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with require_cluster(hosts=3) as new_cluster:
        yield new_cluster


@pytest.fixture
def lab(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    with slurm_lab(cluster, request.node.name) as new_lab:
        yield new_lab
    # Slurm 22.05 miscounts the jobs of nodes that have left a job, and may not allocate them to the
    # next one.
    cluster.slurm.restart_controller()


def write_config(
    lab: SlurmLab, runner: dict[str, Any], *, light: bool = True, **slurm: Any
) -> None:
    """Write the YAML of a run of two nodes and a spare, or of three nodes."""
    fields = {"type": "slurm", "nproc_per_node": 1, "stop_grace": 1, **runner}
    if "nnodes" not in runner:
        slurm.setdefault("nodes", 2)
    envs = {"MEET": str(lab.root / "meet"), **lab.envs}
    lab.configure(PROGRAM, light=light, runner={**fields, "slurm": slurm}, envs=envs)


def start_run(lab: SlurmLab) -> None:
    """Start the run, and return once its ranks have joined."""
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr


def lose_node(lab: SlurmLab, name: str, fault: str = "down") -> AbstractContextManager[None]:
    """Kill all processes of a node: until the end of the block, or without word to Slurm."""
    slurm = lab.cluster.slurm
    if fault == "down":
        return slurm.without_node(name)
    slurm.crash_node(name)
    return nullcontext()


def wait_for_attempt(lab: SlurmLab, attempt: int, joined: int) -> dict[str, Any]:
    """Return the result of ``query`` once all ranks of an attempt have joined."""

    def query() -> dict[str, Any] | None:
        now = lab.query()
        ready = (now["state"], now["attempt"], now["joined"]) == ("running", attempt, joined)
        return now if ready else None

    snapshot: dict[str, Any] = wait_for(query)
    return snapshot


def end_ranks(lab: SlurmLab) -> None:
    """Let the ranks end with code 0."""
    (lab.root / "meet" / "end").touch()


@pytest.mark.parametrize(
    ("runner", "fault"),
    [
        pytest.param(REPLACING, "down", id="replace-down"),
        pytest.param(REPLACING, "silent", id="replace-silent", marks=pytest.mark.slow),
        pytest.param(SHRINKING, "down", id="shrink-down", marks=pytest.mark.slow),
        pytest.param(SHRINKING, "silent", id="shrink-silent", marks=pytest.mark.slow),
    ],
)
def test_job_goes_on_without_a_lost_node(lab: SlurmLab, runner: dict[str, Any], fault: str) -> None:
    slurm = lab.cluster.slurm
    write_config(lab, runner)
    launcher = lab.start("test")
    ranks = 2 if runner is REPLACING else 3
    wait_for(lambda: lab.layout.state.exists() and lab.query()["joined"] == ranks)
    job = lab.job_id
    with lose_node(lab, "h01", fault):
        snapshot = wait_for_attempt(lab, 2, 2)
        rows = {row["host"]: row for row in snapshot["hosts"]}
        place = "; h02 has taken its place" if runner is REPLACING else ""
        assert rows["h01"]["trouble"] == f"lost{place}"
        assert (rows["h02"]["state"], rows["h02"]["joined"]) == ("running", 1)
        assert "h02: rank 1 of 2 attempt 1" in lab.run_action("logs").stdout.splitlines()
        end_ranks(lab)
        out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
        assert launcher.returncode == 0, out
        slurm.wait_until_no_jobs(60)
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["exit_code"]) == ("completed", 0)
    assert "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", job)
    assert lab.find_processes() == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["during", "after"])
def test_stop_saves_although_a_node_is_lost(lab: SlurmLab, moment: str) -> None:
    write_config(lab, REPLACING)
    start_run(lab)
    with lose_node(lab, "h01"):
        if moment == "after":
            wait_for_attempt(lab, 2, 2)
        result = lab.run_action("stop")
        assert result.returncode == 0, result.stderr
        assert lab.find_processes() == []
    assert lab.query()["state"] == "stopped"
    saved = ["h00: saved 0", "h02: saved 1"] if moment == "after" else ["h00: saved 0"]
    assert set(saved) <= set(lab.run_action("logs").stdout.splitlines())
    lab.cluster.slurm.wait_until_no_jobs()


@pytest.mark.slow
def test_job_of_a_hostfile_goes_on_without_the_node_of_its_batch_script(lab: SlurmLab) -> None:
    """The agent on h00, where Slurm runs the batch script, is not the first one."""
    (lab.root / "hosts").write_text("".join(f"{name} slots=1\n" for name in ("h02", "h00", "h01")))
    write_config(lab, {**REPLACING, "nnodes": 2, "hostfile": "hosts"})
    start_run(lab)
    run_processes = [p for p in lab.find_processes("h00") if p.argv[0] != "srun"]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in run_processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
    snapshot = wait_for_attempt(lab, 2, 2)
    rows = {row["host"]: row for row in snapshot["hosts"]}
    assert rows["h00"]["trouble"] == "lost; h01 has taken its place"
    result = lab.run_action("stop")
    assert result.returncode == 0, result.stderr
    assert {"h02: saved 0", "h01: saved 1"} <= set(lab.run_action("logs").stdout.splitlines())
    assert lab.find_processes() == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["by-itself", "stopped"])
def test_job_of_a_hostfile_whose_batch_script_is_lost(lab: SlurmLab, end: str) -> None:
    """Slurm goes on without h00, where the batch script ran; the first agent is on h02."""
    (lab.root / "hosts").write_text("".join(f"{name} slots=1\n" for name in ("h02", "h00", "h01")))
    write_config(lab, {**REPLACING, "nnodes": 2, "hostfile": "hosts"})
    start_run(lab)
    with lose_node(lab, "h00"):
        wait_for_attempt(lab, 2, 2)
        if end == "stopped":
            result = lab.run_action("stop")
            assert result.returncode == 0, result.stderr
            assert "saved 1" in lab.run_action("logs").stdout
        else:
            end_ranks(lab)
        lab.wait_for_state("stopped" if end == "stopped" else "completed")
        lab.cluster.slurm.wait_until_no_jobs()
        assert lab.find_processes() == []


@pytest.mark.slow
@pytest.mark.torch
def test_sick_node_is_replaced_after_a_failure(lab: SlurmLab) -> None:
    """A device reports a fault once the ranks run. Then a rank on another node fails."""
    site = lab.root / "site"
    install_chip(site, {name: {"rate": 100} for name in lab.cluster.slurm.bed.names})
    lab.envs = {"PYTHONPATH": os.pathsep.join([str(site), str(PROJECT)])}
    write_config(lab, {**REPLACING, "health": "quick"}, light=False)
    start_run(lab)
    install_chip(site, {"h01": {"rate": 100, "fault": "its memory is broken"}})
    ranks = [p.pid for p in lab.find_processes("h00") if "LOCAL_RANK" in p.environment()]
    os.kill(min(ranks), signal.SIGKILL)
    snapshot = wait_for_attempt(lab, 2, 2)
    rows = {row["host"]: row for row in snapshot["hosts"]}
    reason = "device state: Demo device 0: its memory is broken"
    assert rows["h01"]["trouble"] == f"sick: {reason}; h02 has taken its place"
    end_ranks(lab)
    lab.wait_for_state("completed")
    lab.cluster.slurm.wait_until_no_jobs()
    assert lab.find_processes() == []


@pytest.mark.slow
def test_requeued_job_starts_on_all_its_nodes_again(lab: SlurmLab) -> None:
    write_config(lab, {**SHRINKING, "nnodes": "1:2", "spares": 1}, requeue=1)
    start_run(lab)
    with lose_node(lab, "h01"):
        wait_for_attempt(lab, 2, 2)
    lab.cluster.slurm.run("scontrol", "requeue", lab.job_id)
    lab.wait_for_pending_reason("is pending (BeginTime")
    wait_for(lambda: "h01: rank 1 of 2 attempt 1" in lab.run_action("logs").stdout)
    snapshot = wait_for_attempt(lab, 1, 2)
    assert [row["state"] for row in snapshot["hosts"]] == ["running"] * 3
    assert snapshot["hosts"][2]["doing"] == "waiting as a spare"
    end_ranks(lab)
    lab.wait_for_state("completed")
    lab.cluster.slurm.wait_until_no_jobs()
    assert lab.find_processes() == []


@pytest.mark.slow
def test_lost_first_node_is_the_failure(lab: SlurmLab) -> None:
    """It runs the batch script. Another node that had left the job is down, too."""
    write_config(lab, REPLACING)
    start_run(lab)
    with lose_node(lab, "h01"):
        wait_for_attempt(lab, 2, 2)
        with lose_node(lab, "h00"):
            end = f"job {lab.job_id} lost the node that ran its batch script"
            wait_for(lambda: lab.query()["warnings"] == [end])
            snapshot = lab.query()
            assert (snapshot["state"], snapshot["failure"]["host"]) == ("failed", "h00")
            lab.cluster.slurm.wait_until_no_jobs()
            assert lab.find_processes() == []


@pytest.mark.slow
def test_lost_first_node_requeues_the_job(lab: SlurmLab) -> None:
    write_config(lab, REPLACING, requeue=1)
    start_run(lab)
    with lose_node(lab, "h00"):
        lab.wait_for_pending_reason("is pending (BeginTime")
    wait_for(lambda: "h01: rank 1 of 2 attempt 1" in lab.run_action("logs").stdout)
    wait_for_attempt(lab, 1, 2)
    assert lab.run_action("stop").returncode == 0
    assert lab.find_processes() == []


@pytest.mark.slow
def test_loss_without_a_spare_requeues_the_job(lab: SlurmLab) -> None:
    write_config(lab, REPLACING, requeue=1)
    start_run(lab)
    with lose_node(lab, "h01"):
        wait_for_attempt(lab, 2, 2)
        with lose_node(lab, "h02"):
            lab.wait_for_pending_reason("is pending (BeginTime")
    wait_for(lambda: "h01: rank 1 of 2 attempt 1" in lab.run_action("logs").stdout)
    wait_for_attempt(lab, 1, 2)
    end_ranks(lab)
    lab.wait_for_state("completed")
    assert lab.find_processes() == []
