"""Tests of runs as jobs of a real Slurm, by an ordinary user.

``lab`` (support/slurm_lab.py) has an experiment on a Slurm cluster, whose nodes are the hosts of a
test bed (tests/bed): namespaces of this machine.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.launch_lab import wait_for_line
from support.slurm_lab import Cluster, SlurmLab, slurm_lab
from support.waiting import PATIENCE_SECONDS, wait_for

import flagscale
from flagscale.launcher.host_record import read_host_record
from flagscale.launcher.layout import STATUS_DIRECTORY
from flagscale.launcher.runners.slurm import scheduler

pytestmark = pytest.mark.integration


@pytest.fixture
def lab(slurm_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    with slurm_lab(slurm_cluster, request.node.name) as new_lab:
        yield new_lab


def test_dryrun_check_run_query_logs_and_stop(lab: SlurmLab) -> None:
    lab.envs = {"API_TOKEN": "s3cr3t"}
    lab.write_config(time="10:00", extra={"comment": "it's $HOME"})
    dry_run = json.loads(lab.run_action("dryrun", "json=true").stdout)
    checked = json.loads(lab.run_action("check", "json=true").stdout)
    assert {"python", "exp_dir", "partition", "job"} <= {
        row["name"] for row in checked if row["ok"]
    }
    start_result = lab.run_action("run")
    assert start_result.returncode == 0, start_result.stdout + start_result.stderr
    assert "2 rank(s) joined" in start_result.stdout
    state = lab.state()
    assert [host.name for host in state.hosts] == ["h00", "h01"]
    # The shown plan is the submitted one, except for the run id.
    script = lab.layout.scripts / "slurm_job.sh"
    assert script.read_text() == dry_run["job"]["script"].replace(dry_run["run_id"], state.run_id)

    job_record = lab.cluster.slurm.run("scontrol", "show", "job", lab.job_id)
    assert "Comment=it's $HOME" in job_record
    lines = [" ".join(p.argv) for host in lab.cluster.slurm.bed.hosts for p in host.processes()]
    batch = lab.cluster.slurm.run("scontrol", "write", "batch_script", lab.job_id, "-")
    for text in (job_record, batch, *lines):
        assert "s3cr3t" not in text
    # A launcher that is killed right after sbatch has not recorded the job's id: the run is still
    # found, by the job's name.
    lab.cluster.user.call(lab.forget_job)
    second_result = lab.run_action("run")
    assert (second_result.returncode, "is alive" in second_result.stderr) == (1, True)
    query_record = lab.query()
    assert (query_record["state"], query_record["joined"]) == ("running", 2)
    assert {"h00: rank 0 attempt 0", "h01: rank 1 attempt 0"} <= set(
        lab.run_action("logs").stdout.splitlines()
    )
    stop_result = lab.run_action("stop")
    assert (stop_result.returncode, stop_result.stderr) == (0, "")
    assert {"h00: saved 0", "h01: saved 1"} <= set(lab.run_action("logs").stdout.splitlines())
    assert lab.query()["state"] == "stopped"
    assert "nothing to stop" in lab.run_action("stop").stdout
    assert lab.find_processes() == []
    assert list(lab.layout.logs.glob("slurm/*/secrets*")) == []


def test_pending_job_is_reported_started_and_stopped(lab: SlurmLab) -> None:
    slurm = lab.cluster.slurm
    lab.write_config()
    with slurm.allocation(nodes=2, tasks=2):
        waiting = lab.start("run")
        wait_for(lambda: lab.layout.state.exists() and "job" in lab.state().runner.handle)
        # The start is unknown: the job that holds the nodes has no time limit.
        reason = lab.wait_for_pending_reason("(Resources: ")
        assert reason.endswith(
            "(Resources: it is the next one, and waits for nodes to become free)"
        )
        assert "is pending (Resources" in lab.run_action("query").stdout
        assert lab.run_action("run").returncode == 1
        wait_for_line(waiting, "is pending (Resources")
    # The nodes are free again, and the job starts.
    out, _ = waiting.communicate(timeout=PATIENCE_SECONDS)
    assert waiting.returncode == 0, out
    assert "2 rank(s) joined" in out
    assert lab.run_action("stop").returncode == 0

    with slurm.allocation(nodes=2, tasks=2):
        lab.submit()
        stop_result = lab.run_action("stop")
        assert stop_result.returncode == 0, stop_result.stderr
        assert lab.query()["state"] == "stopped"
        assert lab.job_id not in slurm.list_jobs()
        # Ctrl-C while the launcher waits for the job to start cancels the job.
        waiting = lab.start("test")
        wait_for_line(waiting, "is pending")
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(timeout=PATIENCE_SECONDS) == 128 + signal.SIGINT
        assert lab.job_id not in slurm.list_jobs()


def test_first_failure_and_exit_code(lab: SlurmLab) -> None:
    """The run is started from within a Slurm job."""
    lab.envs = {"FAIL": "7"}
    lab.write_config(exclusive=False)
    with lab.cluster.slurm.allocation(nodes=1, tasks=1, nodelist="h00") as job:
        wrapper = ("srun", f"--jobid={job}", "--export=ALL", f"--chdir={lab.root}")
        result = lab.run_action("test", wrapper=wrapper)
    assert result.returncode == 7, result.stdout + result.stderr
    assert "first failure: h01: the job ended with exit code 7" in result.stderr
    assert "h01: rank 1 attempt 0" in result.stdout.splitlines()
    query_record = lab.query()
    assert (query_record["state"], query_record["failure"]["host"], query_record["exit_code"]) == (
        "failed",
        "h01",
        7,
    )


def test_command_on_nodes(lab: SlurmLab) -> None:
    """Ranks are numbered across the nodes and get the signal to save, as in training."""
    lab.write_config(runner={"nproc_per_node": 2})
    script = "trap 'echo saved $RANK; exit 0' TERM; echo $RANK of $WORLD_SIZE; "
    script += "while :; do sleep 0.1; done"
    command = f"experiment.task.command=[bash, -c, {json.dumps(script)}]"
    overrides = ("experiment.task.type=command", command, "experiment.runner.wait_for=none")
    result = lab.run_action("run", *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    # A line of each node's script ("run … starts"), and one of each of the 4 ranks.
    wait_for(lambda: len(lab.run_action("logs").stdout.splitlines()) >= 6)
    assert lab.run_action("stop").returncode == 0
    expected = {f"h0{rank // 2}:{rank}: saved {rank}" for rank in range(4)}
    assert {*expected, "h01:3: 3 of 4"} <= set(lab.run_action("logs").stdout.splitlines())
    assert lab.find_processes() == []
    # Several commands at the same time, each in its own job.
    sweep = ("-m", "--jobs", "2", "json=true", "experiment.runner.slurm.nodes=1,2")
    date_task = ("experiment.task.type=command", "experiment.task.command=date")
    result = lab.run_action("run", *sweep, *date_task)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [row["state"] for row in json.loads(result.stdout)] == ["completed", "completed"]
    assert result.stderr.count("submitted job") == 2


# Replacement for Apptainer where it is not installed. It parses the arguments of `apptainer exec`,
# fails if a bound path does not exist, and runs the program without any container.
FAKE_APPTAINER = """\
#!/bin/bash
[[ $1 == exec ]] && shift || exit 255
while [[ $1 == --* ]]; do
    [[ $1 != --pwd=* ]] || cd "${1#*=}" || exit 255
    [[ $1 != --bind=* || -e ${1##*:} ]] || exit 255
    shift
done
export APPTAINER_CONTAINER=$1
exec "${@:2}"
"""


def test_container_command_with_a_fake_apptainer(
    lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = lab.root / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(FAKE_APPTAINER, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    lab.write_config(container={"image": str(program), "runtime": "apptainer"})
    script = 'echo "$APPTAINER_CONTAINER $(ps -o args= $PPID | cut -c 1-7)"'
    command = f"experiment.task.command=[bash, -c, {json.dumps(script)}]"
    result = lab.run_action("test", "experiment.task.type=command", command)
    assert result.returncode == 0, result.stdout + result.stderr
    # APPTAINER_CONTAINER is set for the ranks. Their parent, the agent, runs `python3`: the default
    # with an image, instead of the launcher's own Python.
    assert f"h01:1: {program} python3" in result.stdout.splitlines()
    # `stop` signals the pid that the script in the container has recorded. The nodes run a copy of
    # the code, which the container has to see.
    result = lab.run_action("run", "experiment.runner.snapshot=true")
    assert result.returncode == 0, result.stdout + result.stderr
    status_directories = [host.run_dir / STATUS_DIRECTORY for host in lab.state().hosts]
    wait_for(lambda: all(read_host_record(path)[0] for path in status_directories))
    records = [read_host_record(path)[0] for path in status_directories]
    assert {record and record.container for record in records} == {str(program)}
    assert lab.run_action("stop").returncode == 0
    assert {"h00: saved 0", "h01: saved 1"} <= set(lab.run_action("logs").stdout.splitlines())
    (container_check,) = (c for c in lab.run_preflight() if c.name == "container")
    assert (container_check.ok, container_check.warning, container_check.found) == (
        True,
        False,
        f"{program}, by apptainer",
    )
    lab.write_config(container={"image": "nvidia/cuda"})
    (container_check,) = (c for c in lab.run_preflight() if c.name == "container")
    assert (container_check.ok, container_check.warning) == (True, True)
    assert "srun has no --container-image" in container_check.found


def create_image(directory: Path) -> Path:
    """Create an image directory with the file /only-here; programs are in the host's /usr, which
    the test mounts.
    """
    for name in ("usr", "proc", "sys", "dev", "tmp", "var/tmp", "etc", "root", "home"):
        (directory / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (directory / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (directory / "etc" / name).touch()
    (directory / "only-here").write_text("in the image\n")
    return directory


def test_container_of_the_real_apptainer(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image has no account of the user, and `HOME` is not mounted."""
    apptainer = shutil.which("apptainer")
    if apptainer is None:
        pytest.skip("apptainer is not installed, and Debian 12 has no package of it")
    container = {
        "image": str(create_image(lab.root / "image")),
        "runtime": "apptainer",
        "mounts": ["/usr", sys.base_prefix],
        "options": ["--no-home"],
    }
    monkeypatch.setenv("HOME", str(lab.root))
    lab.write_config(container=container, runner={"python": f"{sys.base_prefix}/bin/python3"})
    command = "experiment.task.command=[bash, -c, 'cat /only-here; pwd']"
    result = lab.run_action("test", "experiment.task.type=command", command)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = set(result.stdout.splitlines())
    assert {"h00:0: in the image", "h01:1: in the image", f"h01:1: {lab.root}"} <= lines
    assert lab.run_action("run").returncode == 0
    (container_check,) = (c for c in lab.run_preflight() if c.name == "container")
    assert (container_check.ok, container_check.warning) == (True, False), container_check.found
    assert len(lab.find_processes("h01")) > 0
    assert lab.run_action("stop").returncode == 0
    assert {"h00: saved 0", "h01: saved 1"} <= set(lab.run_action("logs").stdout.splitlines())
    assert lab.find_processes() == []


def test_ctrl_c_in_the_foreground_saves_and_ends_the_job(lab: SlurmLab) -> None:
    lab.write_config()
    launcher = lab.start("test")
    wait_for_line(launcher, "attempt 0")
    wait_for(lambda: lab.query()["joined"] == 2)
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 128 + signal.SIGINT
    assert {"h00: saved 0", "h01: saved 1"} <= set(out.splitlines())
    assert lab.find_processes() == []
    assert lab.query()["state"] == "stopped"


def test_end_by_slurm_is_reported_later(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = lab.cluster.slurm
    lab.write_config()
    assert lab.run_action("run").returncode == 0
    slurm.run("scancel", lab.job_id)
    assert lab.wait_for_warning() == f"job {lab.job_id} was cancelled"
    assert lab.query()["state"] == "stopped"
    assert lab.find_processes() == []
    assert "saved 1" in lab.run_action("logs").stdout
    with slurm.allocation(nodes=2, tasks=2):
        lab.submit()
        slurm.run("scancel", lab.job_id)
        assert f"job {lab.job_id} was cancelled" in lab.wait_for_warning()
    # Slurm is not queried any more.
    monkeypatch.setenv("SLURM_CONF", "/nonexistent")
    assert lab.query()["state"] == "stopped"


def test_node_ranks_follow_the_hostfile(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is started from Python."""
    (lab.root / "hosts").write_text("h01 slots=1 type=A\nh00 slots=2 type=B\n")
    # Each type is one component, in the order of the plan.
    kinds = {"B": {"mem": "10"}}
    lab.write_config(runner={"hostfile": "hosts", "nproc_per_node": 2}, device_type_specific=kinds)

    def drive() -> dict[str, Any]:
        os.chdir(lab.root)
        run = flagscale.launch(lab.root / "conf" / "lab.yaml")
        # Slurm is queried rarely, regardless of the number of status queries.
        monkeypatch.setattr(scheduler, "query_job", Mock(wraps=scheduler.query_job))
        start_time = time.monotonic()
        phases = {run.status().phase for _ in range(50)}
        query_count = scheduler.query_job.call_count  # type: ignore[attr-defined]
        # Again after a second, and then after twice the time each.
        expected_count = 1 + int(math.log2(1 + time.monotonic() - start_time))
        lines = run.logs()
        run.stop()
        return {
            "phases": [*phases, run.wait().phase],
            "lines": lines,
            "is_queried_rarely": query_count <= expected_count,
        }

    result = lab.cluster.user.call(drive)
    assert (result["phases"], result["is_queried_rarely"]) == (["running", "stopped"], True)
    assert [host.name for host in lab.state().hosts] == ["h01", "h00"]
    assert {"h01: rank 0 attempt 0", "h00: rank 2 attempt 0"} <= set(result["lines"])


def test_heterogeneous_job(lab: SlurmLab) -> None:
    kinds = {"A": {"nodes": 1, "partition": "all"}, "B": {"nodes": 1, "partition": "short"}}
    lab.write_config(time="5:00", device_type_specific=kinds)
    assert [check.found for check in lab.run_preflight() if not check.ok] == []
    assert lab.run_action("run").returncode == 0
    components = lab.cluster.slurm.run("squeue", "--noheader", "--format=%i %P %N", "--sort=i")
    job, nodes = lab.job_id, [host.name for host in lab.state().hosts]
    assert components.split("\n")[:2] == [f"{job}+0 all {nodes[0]}", f"{job}+1 short {nodes[1]}"]
    lines = set(lab.run_action("logs").stdout.splitlines())
    assert {f"{nodes[0]}: rank 0 attempt 0", f"{nodes[1]}: rank 1 attempt 0"} <= lines
    assert lab.query()["state"] == "running"
    stop_result = lab.run_action("stop")
    assert (stop_result.returncode, stop_result.stderr) == (0, "")
    assert f"{nodes[1]}: saved 1" in lab.run_action("logs").stdout.splitlines()
    # The job has recorded its end; Slurm finishes with it a moment later.
    lab.cluster.slurm.wait_until_no_jobs()


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        pytest.param(
            {"nodes": 3}, "would wait forever: partition 'all' has 2 node(s), but 3", id="nodes"
        ),
        pytest.param(
            {"cpus_per_task": 64}, "nodes of at most 4 CPUs, but 64 are requested", id="cpus"
        ),
        pytest.param(
            {"partition": "short", "time": "20"}, "'short' allows at most 10:00", id="time"
        ),
        pytest.param({"partition": "closed"}, "'closed' is down", id="down"),
        pytest.param(
            {"partition": "no"}, "no partition 'no'; its partitions are 'all'", id="partition"
        ),
        pytest.param({"constraint": "x"}, "Slurm rejects it: ", id="feature"),
        pytest.param({"gpus_per_node": "2"}, "Slurm rejects it: ", id="gpus"),
        pytest.param({"extra": {"frobnicate": "1"}}, "unrecognized option", id="option"),
    ],
)
def test_jobs_that_would_wait_forever_are_rejected(
    lab: SlurmLab, section: dict[str, Any], expected: str
) -> None:
    lab.write_config(**section)
    checks = {check.name: check for check in lab.run_preflight()}
    problems = [check.found for check in checks.values() if not check.ok]
    assert expected in " ".join(problems)


def test_dependency_on_a_failed_job_is_rejected(lab: SlurmLab) -> None:
    failed = lab.cluster.slurm.run(
        "sbatch", "--output=/dev/null", "--parsable", "--wait", "--wrap=false", check=False
    )
    job = failed.strip()
    lab.write_config(dependency=f"afterok:{job}")
    result = lab.run_action("run")
    assert result.returncode == 2
    assert f"afterok:{job} can never be satisfied: job {job} is FAILED" in result.stderr
    assert not lab.layout.state.exists()
    # Clauses that are separated by question marks are alternatives.
    lab.write_config(dependency=f"afterok:{job}?afterany:{job}")
    assert [check.found for check in lab.run_preflight() if not check.ok] == []


def test_default_time_limit_of_a_partition_is_too_short(
    lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.write_config(partition="brief", runner={"stop_grace": 60})
    (problem,) = (check.found for check in lab.run_preflight() if not check.ok)
    # 90 s = stop_grace + STOP_MARGIN_SECONDS.
    assert "'brief' allows 1:00 if no time is requested, which is not longer than the 90" in problem
    assert "(experiment.runner.stop_grace + 30 s)" in problem
    monkeypatch.setenv("SBATCH_TIMELIMIT", "20")
    assert [check.found for check in lab.run_preflight() if not check.ok] == []
    lab.write_config(partition="short")
    problem = " ".join(check.found for check in lab.run_preflight() if not check.ok)
    assert "'short' allows at most 10:00, but 20 is requested" in problem


def test_run_continues_after_its_time_limit(lab: SlurmLab) -> None:
    """The time limit is Slurm's minimum. Ranks have the seconds to start in that are not reserved
    for saving (STOP_MARGIN_SECONDS and stop_grace).
    """
    lab.write_config(time="1:00", requeue=1, runner={"stop_grace": 18})
    lab.submit()
    lab.wait_for_pending_reason("is pending (BeginTime")
    assert "h01: saved 1" in lab.run_action("logs").stdout
    assert "has reached its time limit" in next(lab.layout.logs.glob("slurm/*/output")).read_text()
    wait_for(lambda: "h01: rank 1 attempt 1" in lab.run_action("logs").stdout)
    assert lab.run_action("stop").returncode == 0


def test_preempted_job_saves_and_continues(lab: SlurmLab) -> None:
    slurm = lab.cluster.slurm
    lab.write_config(partition="low", requeue=1)
    assert lab.run_action("run").returncode == 0
    preempting_job = slurm.run(
        *("sbatch", "--output=/dev/null", "--parsable", "--partition=high", "--nodes=2"),
        "--wrap=sleep 600",
    )
    lab.wait_for_pending_reason("is pending")
    assert "saved 1" in lab.run_action("logs").stdout
    slurm.run("scancel", preempting_job.strip())
    lab.wait_for_state("running")
    assert lab.run_action("stop").returncode == 0


ALL_REDUCE_PROGRAM = """\
import os
import torch
import torch.distributed as dist
from flagscale.status import StatusWriter
dist.init_process_group("gloo")
status = StatusWriter.from_environment(dist.get_rank())
for event in ("started", "joined", "ready"):
    status.write(event)
ones = torch.ones(1)
dist.all_reduce(ones)
print("sum", int(ones), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.torch
def test_rendezvous_through_torchrun(lab: SlurmLab) -> None:
    """The first node resolves its own name to a loopback address, as on Debian."""
    hosts = lab.cluster.slurm.bed["h00"].local_path("/etc/hosts")
    hosts.write_text(f"127.0.1.1 h00\n{hosts.read_text()}")
    lab.configure(
        ALL_REDUCE_PROGRAM, runner={"type": "slurm", "nproc_per_node": 2, "slurm": {"nodes": 2}}
    )
    result = lab.run_action("test")
    assert result.returncode == 0, result.stdout + result.stderr
    assert {f"h0{rank // 2}:{rank}: sum 4" for rank in range(4)} <= set(result.stdout.splitlines())
    assert lab.query()["state"] == "completed"
    (nodes_file,) = lab.layout.logs.glob("slurm/*/nodes")
    assert f"master={lab.cluster.slurm.bed['h00'].address}:" in nodes_file.read_text()
