"""Runs as jobs of a real Slurm, by an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.launch_lab import until
from support.slurm_lab import Cluster, SlurmLab, slurm_lab

import flagscale
from flagscale.launcher.runners.slurm import scheduler

pytestmark = pytest.mark.integration


@pytest.fixture
def lab(slurm_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    with slurm_lab(slurm_cluster, request.node.name) as made:
        yield made


def says(launcher: subprocess.Popen[str], text: str) -> None:
    """Wait until a launcher prints a line with this text."""
    assert launcher.stdout is not None
    until(lambda: text in str(launcher.stdout and launcher.stdout.readline()))


def test_every_verb(lab: SlurmLab) -> None:
    lab.envs = {"API_TOKEN": "s3cr3t"}
    lab.slurm(time="10:00", extra={"comment": "it's $HOME"})
    shown = json.loads(lab.do("dryrun", "json=true").stdout)
    checked = json.loads(lab.do("check", "json=true").stdout)
    assert {"python", "exp_dir", "partition", "job"} <= {
        row["name"] for row in checked if row["ok"]
    }
    started = lab.do("run")
    assert started.returncode == 0, started.stdout + started.stderr
    assert "2 rank(s) joined" in started.stdout
    state = lab.state()
    assert [host.name for host in state.hosts] == ["h00", "h01"]
    # What was shown is what was submitted, but for the run's id.
    script = lab.layout.scripts / "slurm_job.sh"
    assert script.read_text() == shown["job"]["script"].replace(shown["run_id"], state.run_id)

    told = lab.cluster.slurm.run("scontrol", "show", "job", lab.job)
    assert "Comment=it's $HOME" in told
    lines = [" ".join(p.argv) for host in lab.cluster.slurm.bed.hosts for p in host.processes()]
    batch = lab.cluster.slurm.run("scontrol", "write", "batch_script", lab.job, "-")
    for text in (told, batch, *lines):
        assert "s3cr3t" not in text
    # A launcher that was killed at the wrong moment has not written down the job's id.
    lab.cluster.user.do(lab.forget_job)
    again = lab.do("run")
    assert (again.returncode, "is alive" in again.stderr) == (1, True)
    now = lab.query()
    assert (now["state"], now["joined"]) == ("running", 2)
    assert {"h00: rank 0 attempt 0", "h01: rank 1 attempt 0"} <= set(
        lab.do("logs").stdout.splitlines()
    )
    stopped = lab.do("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert {"h00: saved 0", "h01: saved 1"} <= set(lab.do("logs").stdout.splitlines())
    assert lab.query()["state"] == "stopped"
    assert "nothing to stop" in lab.do("stop").stdout
    assert lab.processes() == []
    assert list(lab.layout.logs.glob("slurm/*/secrets*")) == []


def test_a_job_that_waits_is_told_of_started_and_stopped(lab: SlurmLab) -> None:
    slurm = lab.cluster.slurm
    lab.slurm()
    with slurm.allocation(nodes=2, tasks=2):
        waiting = lab.start("run")
        until(lambda: lab.layout.state.exists() and "job" in lab.state().runner.handle)
        # Nobody knows when: what holds the nodes has no time limit.
        told = lab.until_waiting("(Resources: ")
        assert told.endswith("(Resources: it is the next one, and waits for nodes to get free)")
        assert "is pending (Resources" in lab.do("query").stdout
        assert lab.do("run").returncode == 1
        says(waiting, "is pending (Resources")
    # Now there are nodes.
    out, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, out
    assert "2 rank(s) joined" in out
    assert lab.do("stop").returncode == 0

    with slurm.allocation(nodes=2, tasks=2):
        lab.submit()
        stopped = lab.do("stop")
        assert stopped.returncode == 0, stopped.stderr
        assert lab.query()["state"] == "stopped"
        assert lab.job not in slurm.jobs()
        # Ctrl-C while a launcher waits.
        waiting = lab.start("test")
        says(waiting, "is pending")
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(timeout=60) == 128 + signal.SIGINT
        assert lab.job not in slurm.jobs()


def test_the_first_failure_and_its_code(lab: SlurmLab) -> None:
    """Of a run that is started from within a job of Slurm's."""
    lab.envs = {"FAIL": "7"}
    lab.slurm(exclusive=False)
    with lab.cluster.slurm.allocation(nodes=1, tasks=1, where="h00") as job:
        under = ("srun", f"--jobid={job}", "--export=ALL", f"--chdir={lab.root}")
        done = lab.do("test", under=under)
    assert done.returncode == 7, done.stdout + done.stderr
    assert "first failure: h01: the job ended with exit code 7" in done.stderr
    assert "h01: rank 1 attempt 0" in done.stdout.splitlines()
    now = lab.query()
    assert (now["state"], now["failure"]["host"], now["exit_code"]) == ("failed", "h01", 7)


def test_a_command_on_nodes(lab: SlurmLab) -> None:
    """Its ranks are numbered through the nodes, and told to save as those of training are."""
    lab.slurm(runner={"nproc_per_node": 2})
    words = "trap 'echo saved $RANK; exit 0' TERM; echo $RANK of $WORLD_SIZE; "
    words += "while :; do sleep 0.1; done"
    command = f"experiment.task.command=[bash, -c, {json.dumps(words)}]"
    more = ("experiment.task.type=command", command, "experiment.runner.wait_for=none")
    done = lab.do("run", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    until(lambda: len(lab.do("logs").stdout.splitlines()) >= 6)
    assert lab.do("stop").returncode == 0
    said = {f"h0{rank // 2}:{rank}: saved {rank}" for rank in range(4)}
    assert {*said, "h01:3: 3 of 4"} <= set(lab.do("logs").stdout.splitlines())
    assert lab.processes() == []
    # Several at a time, each a job of its own.
    words = ("-m", "--jobs", "2", "json=true", "experiment.task.type=command")
    done = lab.do(
        "run", *words, "experiment.task.command=date", "experiment.runner.slurm.nodes=1,2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["state"] for row in json.loads(done.stdout)] == ["completed", "completed"]
    assert done.stderr.count("submitted job") == 2


# Takes what Apptainer would, and leaves the program where it is: the real one is in no package of
# the systems that these tests run on.
APPTAINER = """\
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


def test_nodes_run_in_a_container(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    program = lab.root / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(APPTAINER, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    lab.slurm(container={"image": str(program), "runtime": "apptainer"})
    words = 'echo "$APPTAINER_CONTAINER $(ps -o args= $PPID | cut -c 1-7)"'
    command = f"experiment.task.command=[bash, -c, {json.dumps(words)}]"
    done = lab.do("test", "experiment.task.type=command", command)
    assert done.returncode == 0, done.stdout + done.stderr
    # Its ranks, and what starts them: the image's Python.
    assert f"h01:1: {program} python3" in done.stdout.splitlines()
    # Ended by the pid of what is in it.
    assert lab.do("run").returncode == 0
    assert lab.do("stop").returncode == 0
    assert {"h00: saved 0", "h01: saved 1"} <= set(lab.do("logs").stdout.splitlines())
    (row,) = (check for check in lab.checks() if check.name == "container")
    assert (row.ok, row.warning, row.found) == (True, False, f"{program}, by apptainer")
    lab.slurm(container={"image": "nvidia/cuda"})
    (row,) = (check for check in lab.checks() if check.name == "container")
    assert (row.ok, row.warning) == (True, True)
    assert "srun has no --container-image" in row.found


def image(directory: Path) -> Path:
    """An image that has nothing of its own but a file; programs are the machine's /usr."""
    for name in ("usr", "proc", "sys", "dev", "tmp", "var/tmp", "etc", "root", "home"):
        (directory / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (directory / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (directory / "etc" / name).touch()
    (directory / "only-here").write_text("in the image\n")
    return directory


def test_nodes_run_in_a_container_of_apptainers(
    lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the real one, by a user who is none there, in directories with hostile names."""
    apptainer = shutil.which("apptainer")
    if apptainer is None:
        pytest.skip("no apptainer on this machine, nor in Debian 12's packages")
    container = {
        "image": str(image(lab.root / "image")),
        "runtime": "apptainer",
        "mounts": ["/usr", sys.base_prefix],
        "options": ["--no-home"],
    }
    monkeypatch.setenv("HOME", str(lab.root))
    lab.slurm(container=container, runner={"python": f"{sys.base_prefix}/bin/python3"})
    command = "experiment.task.command=[bash, -c, 'cat /only-here; pwd']"
    done = lab.do("test", "experiment.task.type=command", command)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = set(done.stdout.splitlines())
    assert {"h00:0: in the image", "h01:1: in the image", f"h01:1: {lab.root}"} <= lines
    assert lab.do("run").returncode == 0
    (row,) = (check for check in lab.checks() if check.name == "container")
    assert (row.ok, row.warning) == (True, False), row.found
    assert len(lab.processes("h01")) > 0
    assert lab.do("stop").returncode == 0
    assert {"h00: saved 0", "h01: saved 1"} <= set(lab.do("logs").stdout.splitlines())
    assert lab.processes() == []


def test_ctrl_c_in_the_foreground_saves_and_ends_the_job(lab: SlurmLab) -> None:
    lab.slurm()
    launcher = lab.start("test")
    says(launcher, "attempt 0")
    until(lambda: lab.query()["joined"] == 2)
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGINT
    assert {"h00: saved 0", "h01: saved 1"} <= set(out.splitlines())
    assert lab.processes() == []
    assert lab.query()["state"] == "stopped"


def test_what_slurm_has_ended_is_told_long_after(
    lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = lab.cluster.slurm
    lab.slurm()
    assert lab.do("run").returncode == 0
    slurm.run("scancel", lab.job)
    assert lab.until_warned() == f"job {lab.job} was cancelled"
    assert lab.query()["state"] == "stopped"
    assert lab.processes() == []
    assert "saved 1" in lab.do("logs").stdout
    with slurm.allocation(nodes=2, tasks=2):
        lab.submit()
        slurm.run("scancel", lab.job)
        assert f"job {lab.job} was cancelled" in lab.until_warned()
    # Nobody is asked any more.
    monkeypatch.setenv("SLURM_CONF", "/nonexistent")
    assert lab.query()["state"] == "stopped"


def test_the_order_of_a_hostfile(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that is driven from Python."""
    (lab.root / "hosts").write_text("h01 slots=1 type=A\nh00 slots=2 type=B\n")
    # Each type is a component of its own, in the order of the plan.
    kinds = {"B": {"mem": "10"}}
    lab.slurm(runner={"hostfile": "hosts", "nproc_per_node": 2}, device_type_specific=kinds)

    def drive() -> dict[str, Any]:
        os.chdir(lab.root)
        run = flagscale.launch(lab.root / "conf" / "lab.yaml")
        # However often somebody looks Slurm is asked seldom.
        monkeypatch.setattr(scheduler, "look", Mock(wraps=scheduler.look))
        phases = {run.status().phase for _ in range(50)}
        lines, looks = run.logs(), scheduler.look.call_count  # type: ignore[attr-defined]
        run.stop()
        return {"phases": [*phases, run.wait().phase], "lines": lines, "looks": looks}

    told = lab.cluster.user.do(drive)
    assert (told["phases"], told["looks"] <= 1) == (["running", "stopped"], True)
    assert [host.name for host in lab.state().hosts] == ["h01", "h00"]
    assert {"h01: rank 0 attempt 0", "h00: rank 2 attempt 0"} <= set(told["lines"])


def test_unlike_nodes_in_one_heterogeneous_job(lab: SlurmLab) -> None:
    kinds = {"A": {"nodes": 1, "partition": "all"}, "B": {"nodes": 1, "partition": "short"}}
    lab.slurm(time="5:00", device_type_specific=kinds)
    assert [check.found for check in lab.checks() if not check.ok] == []
    assert lab.do("run").returncode == 0
    shown = lab.cluster.slurm.run("squeue", "--noheader", "--format=%i %P %N", "--sort=i")
    job, nodes = lab.job, [host.name for host in lab.state().hosts]
    assert shown.split("\n")[:2] == [f"{job}+0 all {nodes[0]}", f"{job}+1 short {nodes[1]}"]
    lines = set(lab.do("logs").stdout.splitlines())
    assert {f"{nodes[0]}: rank 0 attempt 0", f"{nodes[1]}: rank 1 attempt 0"} <= lines
    assert lab.query()["state"] == "running"
    stopped = lab.do("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert f"{nodes[1]}: saved 1" in lab.do("logs").stdout.splitlines()
    assert lab.cluster.slurm.jobs() == []


@pytest.mark.parametrize(
    ("section", "said"),
    [
        pytest.param({"nodes": 3}, "the job would wait for ever: all has 2 node(s), 3", id="nodes"),
        pytest.param({"cpus_per_task": 64}, "nodes of 4 CPUs at most, 64 are asked", id="cpus"),
        pytest.param({"partition": "short", "time": "20"}, "short gives 10:00 at most", id="time"),
        pytest.param({"partition": "closed"}, "closed is down", id="down"),
        pytest.param({"partition": "no"}, "there is no partition no; it has all", id="partition"),
        pytest.param({"constraint": "x"}, "Slurm refuses it: ", id="feature"),
        pytest.param({"gpus_per_node": "2"}, "Slurm refuses it: ", id="gpus"),
        pytest.param({"extra": {"frobnicate": "1"}}, "unrecognized option", id="option"),
    ],
)
def test_what_would_wait_for_ever_is_refused(
    lab: SlurmLab, section: dict[str, Any], said: str
) -> None:
    lab.slurm(**section)
    checks = {check.name: check for check in lab.checks()}
    found = [check.found for check in checks.values() if not check.ok]
    assert said in " ".join(found)


def test_a_job_that_waits_for_one_that_failed_is_refused(lab: SlurmLab) -> None:
    failed = lab.cluster.slurm.run(
        "sbatch", "--output=/dev/null", "--parsable", "--wait", "--wrap=false", check=False
    )
    job = failed.strip()
    lab.slurm(dependency=f"afterok:{job}")
    refused = lab.do("run")
    assert refused.returncode == 2
    assert f"afterok:{job} cannot come true any more: job {job} is FAILED" in refused.stderr
    assert not lab.layout.state.exists()
    # Of those between question marks one is enough.
    lab.slurm(dependency=f"afterok:{job}?afterany:{job}")
    assert [check.found for check in lab.checks() if not check.ok] == []


def test_the_time_that_a_job_gets_without_asking(
    lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.slurm(partition="brief", runner={"stop_grace": 60})
    (found,) = (check.found for check in lab.checks() if not check.ok)
    assert "brief gives 1:00 where no time is asked for, no longer than the 90 s in" in found
    monkeypatch.setenv("SBATCH_TIMELIMIT", "20")
    assert [check.found for check in lab.checks() if not check.ok] == []
    lab.slurm(partition="short")
    found = " ".join(check.found for check in lab.checks() if not check.ok)
    assert "short gives 10:00 at most, 20 is asked for" in found


def test_a_run_goes_on_after_its_time_limit(lab: SlurmLab) -> None:
    """A real one: Slurm's least, of which most is for saving."""
    lab.slurm(time="1:00", requeue=1, runner={"stop_grace": 28})
    lab.submit()
    lab.until_waiting("is pending (BeginTime")
    assert "h01: saved 1" in lab.do("logs").stdout
    assert "has come to its time limit" in next(lab.layout.logs.glob("slurm/*/output")).read_text()
    until(lambda: "h01: rank 1 attempt 1" in lab.do("logs").stdout)
    assert lab.do("stop").returncode == 0


def test_a_preempted_job_saves_and_goes_on(lab: SlurmLab) -> None:
    slurm = lab.cluster.slurm
    lab.slurm(partition="low", requeue=1)
    assert lab.do("run").returncode == 0
    urgent = slurm.run(
        *("sbatch", "--output=/dev/null", "--parsable", "--partition=high", "--nodes=2"),
        "--wrap=sleep 600",
    )
    lab.until_waiting("is pending")
    assert "saved 1" in lab.do("logs").stdout
    slurm.run("scancel", urgent.strip())
    lab.until_state("running", 60)
    assert lab.do("stop").returncode == 0


COLLECTIVE = """\
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
def test_ranks_meet_by_torchrun(lab: SlurmLab) -> None:
    """Though the first node takes its own name for a loopback address, as Debian has it."""
    hosts = lab.cluster.slurm.bed["h00"].path("/etc/hosts")
    hosts.write_text(f"127.0.1.1 h00\n{hosts.read_text()}")
    lab.configure(COLLECTIVE, runner={"type": "slurm", "nproc_per_node": 2, "slurm": {"nodes": 2}})
    done = lab.do("test", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f"h0{rank // 2}:{rank}: sum 4" for rank in range(4)} <= set(done.stdout.splitlines())
    assert lab.query()["state"] == "completed"
    (said,) = lab.layout.logs.glob("slurm/*/nodes")
    assert f"master={lab.cluster.slurm.bed['h00'].address}:" in said.read_text()
