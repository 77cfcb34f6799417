"""Tests of the Slurm job of a plan: golden files, and quoting of hostile values.

``FLAGSCALE_UPDATE_GOLDEN=1`` rewrites the golden files.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.arguments import train_arguments

from flagscale import __version__
from flagscale.config.schema import (
    PROJECT,
    Container,
    Environments,
    Experiment,
    Runner,
    Slurm,
    SlurmType,
    Task,
)
from flagscale.errors import ConfigError
from flagscale.files import write_json
from flagscale.hosts.hostfile import Host
from flagscale.hosts.program import read_source
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE
from flagscale.launcher.planning.deferred_values import defer_to_job
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.planning.script import render
from flagscale.launcher.runners.slurm import files
from flagscale.launcher.runners.slurm import job as slurm_job
from flagscale.launcher.runners.slurm.container import use_container_workdir
from flagscale.launcher.runners.slurm.job import batch_job, job_name, plan_with_job, signal_seconds

MakePlan = Callable[..., LaunchPlan]
MakeExperiment = Callable[..., Experiment]
GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "launcher"
TEXTS = ("node", "guard")
UNNAMED_HOSTS = (Host("node-0", 2), Host("node-1", 2))
CASES: dict[str, dict[str, Any]] = {
    "slurm": {
        "hosts": UNNAMED_HOSTS,
        "runner": Runner(
            type="slurm",
            nproc_per_node=2,
            slurm=Slurm(partition="gpu", time="2:00:00", gpus_per_node="h100:2", requeue=2),
        ),
    },
    "slurm_pyxis": {
        "hosts": UNNAMED_HOSTS,
        "runner": Runner(
            type="slurm",
            python="/opt/conda/bin/python",
            slurm=Slurm(
                container=Container(
                    image="nvcr.io#nvidia/pytorch:25.04-py3",
                    mounts=("/data", "/scratch/$USER 'x':/tmp/x:ro"),
                    options=("--no-container-mount-home",),
                )
            ),
        ),
    },
    "slurm_apptainer": {
        "hosts": UNNAMED_HOSTS,
        "runner": Runner(
            type="slurm",
            log_dir=Path("/logs of $USER"),
            build_dir=Path("/opt/flagscale"),
            slurm=Slurm(
                container=Container(
                    image="/images/it's $HOME.sif",
                    runtime="apptainer",
                    mounts=("/data:/mnt/data",),
                    workdir="/work",
                    options=("--nv",),
                )
            ),
        ),
    },
    "slurm_spares": {
        "hosts": (*UNNAMED_HOSTS, Host("node-2", 2)),
        "runner": Runner(
            type="slurm",
            nnodes=2,
            nproc_per_node=2,
            spares=1,
            on_bad_host="replace",
            slurm=Slurm(requeue=1),
        ),
    },
    "slurm_hostile": {
        "name": "evil\nname; rm -rf $HOME / %j|x",
        "exp_dir": Path("/data/a 'b' \"c\" $HOME %j `id`\nü"),
        "hosts": (Host("h03", 2, "A", addr="10.0.0.3"), Host("h01", 1, "B")),
        "envs": Environments({"API_TOKEN": "s3cr3t"}),
        "runner": Runner(
            type="slurm",
            hostfile=Path("/hosts"),
            master_port=29500,
            slurm=Slurm(
                cpus_per_task=4, exclusive=False, extra={"comment": "it's $HOME", "hold": None}
            ),
        ),
    },
}


def make_job_plan(make_plan: MakePlan, name: str) -> tuple[LaunchPlan, Runner]:
    case = CASES[name]
    runner = case["runner"]
    plan = defer_to_job(make_plan(**case), runner)
    return use_container_workdir(plan, runner.slurm.container), runner


@pytest.mark.parametrize("name", CASES)
def test_golden(make_plan: MakePlan, name: str) -> None:
    """The command, the job-specific part of its script, and that of one host's script."""
    plan, runner = make_job_plan(make_plan, name)
    job = batch_job(plan, runner)
    head = job.script.partition("IFS= read")[0]
    host = render(plan, plan.hosts[1]).partition("# Identity of the run")[0]
    text = "\n".join([*map(shlex.quote, job.command), "", head, host])
    text = text.replace(f"flagscale {__version__}", "flagscale VERSION")
    text = text.replace(str(PROJECT), "/PROJECT")
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("FLAGSCALE_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert "s3cr3t" not in job.script + host + repr(plan) + repr(plan.to_json())


def read_text(script: str, name: str) -> str:
    """Return the program for another shell that a batch script contains."""
    end = f"END_{name.upper()}_SOURCE"
    return script.partition(f"<<'{end}'\n")[2].partition(f"\n{end}\n")[0]


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_finds_nothing(make_plan: MakePlan, name: str, tmp_path: Path) -> None:
    venv_program = Path(sys.executable).parent / "shellcheck"
    path = str(venv_program) if venv_program.exists() else shutil.which("shellcheck")
    if path is None:
        pytest.skip("shellcheck is not installed")
    plan, runner = make_job_plan(make_plan, name)
    script = batch_job(plan, runner).script
    texts = {
        "job": script,
        **{name: f"#!/usr/bin/env bash\n{read_text(script, name)}\n" for name in TEXTS},
        "host": render(plan, plan.hosts[0]),
    }
    for part, text in texts.items():
        (tmp_path / part).write_text(text, encoding="utf-8")
    argv = [path, *(str(tmp_path / part) for part in texts)]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout


def test_bash_reads_the_values_back_unchanged(make_plan: MakePlan) -> None:
    plan, runner = make_job_plan(make_plan, "slurm_hostile")
    head = batch_job(plan, runner).script.partition("IFS= read")[0]
    result = subprocess.run(
        ["bash", "-c", f'{head}\nprintf \'%s\\0\' "$job_dir" "${{srun_options[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    directory, *srun = result.stdout.split("\0")[:-1]
    assert Path(directory) == files.job_directory(plan.exp_dir, plan.run_id)
    assert "--cpus-per-task=4" in srun


def test_job_name_is_safe(make_plan: MakePlan) -> None:
    plan, _ = make_job_plan(make_plan, "slurm_hostile")
    assert re.fullmatch(r"[A-Za-z0-9._\-]{1,90}", job_name(plan))
    assert job_name(replace(plan, name="ü" * 300)).endswith(f".{plan.run_id}")


def test_container_command_line(make_plan: MakePlan) -> None:
    """The command line is the one that the runtime receives after bash has parsed it."""
    arguments = {}
    for name, array in (
        ("slurm_pyxis", "srun_options"),
        ("slurm_apptainer", "container_command"),
    ):
        head = batch_job(*make_job_plan(make_plan, name)).script.partition("IFS= read")[0]
        script = f"{head}\nprintf '%s\\0' \"${{{array}[@]}}\""
        result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        arguments[name] = result.stdout.split("\0")[:-1]
    mounts = f"/data/runs/tiny:/data/runs/tiny,{PROJECT}:{PROJECT},/home/user/work:/home/user/work"
    assert arguments["slurm_pyxis"][-4:] == [
        "--container-image=nvcr.io#nvidia/pytorch:25.04-py3",
        f"--container-mounts={mounts},/data:/data,/scratch/$USER 'x':/tmp/x:ro",
        "--container-workdir=/home/user/work",
        "--no-container-mount-home",
    ]
    assert arguments["slurm_apptainer"] == [
        *("apptainer", "exec", "--bind=/data/runs/tiny:/data/runs/tiny"),
        *("--bind=/logs of $USER:/logs of $USER", "--bind=/data:/mnt/data", "--pwd=/work"),
        *("--nv", "/images/it's $HOME.sif"),
    ]


@pytest.mark.parametrize(
    ("runner_keys", "python"),
    [
        pytest.param({}, "python3", id="default: the image's"),
        pytest.param({"python": "/opt/bin/python"}, "/opt/bin/python", id="runner.python"),
        pytest.param({"conda": "train"}, "python", id="runner.conda"),
    ],
)
def test_python_of_ranks_in_a_container(
    make_experiment: MakeExperiment, runner_keys: dict[str, Any], python: str
) -> None:
    slurm = Slurm(container=Container(image="x.sif", runtime="apptainer", workdir="/w"))
    plan = plan_with_job(make_experiment(runner=Runner(type="slurm", slurm=slurm, **runner_keys)))
    assert [(host.python, host.workdir) for host in plan.hosts] == [(python, Path("/w"))]


def test_exp_dir_with_a_comma_cannot_be_mounted(make_experiment: MakeExperiment) -> None:
    runner = Runner(type="slurm", slurm=Slurm(container=Container(image="x")))
    with pytest.raises(ConfigError, match="/a,b cannot be mounted in a container"):
        plan_with_job(make_experiment(exp_dir=Path("/a,b"), runner=runner))


def test_ranks_are_as_many_as_gpus(make_experiment: MakeExperiment) -> None:
    slurm = Slurm(gpus_per_node="h100:4")
    plan = plan_with_job(make_experiment(runner=Runner(type="slurm", nnodes=2, slurm=slurm)))
    assert [host.nproc for host in plan.hosts] == [4, 4]
    fewer = Runner(type="slurm", nnodes=2, nproc_per_node=2, slurm=slurm)
    assert plan_with_job(make_experiment(runner=fewer)).world_size == 4


@pytest.mark.parametrize(
    ("fields", "nodes", "world_size"),
    [
        pytest.param({"nnodes": 2, "spares": 1, "on_bad_host": "replace"}, 3, 4, id="replace"),
        pytest.param({"nnodes": 3, "min_nnodes": 2, "on_bad_host": "shrink"}, 3, 6, id="shrink"),
        pytest.param({"nnodes": 2}, 2, 4, id="stop"),
    ],
)
def test_job_that_goes_on_without_lost_nodes(
    make_experiment: MakeExperiment, fields: dict[str, Any], nodes: int, world_size: int
) -> None:
    task = Task(entrypoint=Path("/program.py"))
    train = train_arguments(global_batch_size=12, micro_batch_size=1)
    runner = Runner(type="slurm", nproc_per_node=2, **fields)
    plan = plan_with_job(make_experiment(runner=runner, task=task, train=train))
    assert plan.job is not None
    assert f"--nodes={nodes}" in plan.job.command
    assert plan.world_size == world_size
    goes_on = "on_bad_host" in fields
    assert ("--no-kill" in plan.job.command) is goes_on
    (srun_options,) = re.findall(r"^srun_options=\((.*)\)$", plan.job.script, re.MULTILINE)
    assert ("--no-kill" in srun_options.split()) is goes_on


def test_spare_of_a_single_node_is_refused(make_experiment: MakeExperiment) -> None:
    runner = Runner(type="slurm", spares=1, on_bad_host="replace")
    with pytest.raises(ConfigError, match="at least two nodes must train"):
        plan_with_job(make_experiment(runner=runner))


@pytest.mark.parametrize(
    ("places", "codes", "on_bad_host", "expected"),
    [
        pytest.param(None, {}, "stop", "goes on, 9", id="no-agent-has-ended"),
        pytest.param(None, {1: 7}, "stop", "ends, 9", id="any-agent-has-ended"),
        pytest.param([0, 1], {1: 7}, "stop", "ends, 9", id="places-do-not-count"),
        pytest.param([0, 2], {1: 7}, "replace", "goes on, 9", id="replaced-host-has-ended"),
        pytest.param([0, 2], {1: 7, 2: 0}, "replace", "ends, 9", id="one-of-two-has-ended"),
        pytest.param([0, 2], {0: 0, 1: 7, 2: 0}, "replace", "ends, 0", id="completed"),
        pytest.param([0, 2], {0: 1, 1: 7, 2: 3}, "replace", "ends, 1", id="failed"),
        pytest.param([0, 1], {0: 1}, "replace", "ends, lost, 9", id="no-spare-is-left"),
        pytest.param([0], {1: 7}, "shrink", "goes on, 9", id="the-first-host-goes-on-alone"),
        pytest.param([0, 10], {1: 7}, "replace", "goes on, 9", id="number-that-begins-alike"),
        pytest.param(None, {1: 7}, "replace", "ends, 9", id="no-record-of-the-job"),
    ],
)
def test_end_of_a_job_that_goes_on_without_lost_nodes(
    tmp_path: Path,
    places: list[int] | None,
    codes: dict[int, int],
    on_bad_host: str,
    expected: str,
) -> None:
    """The batch script decides from the agents' records; srun's exit code is 9."""
    details = tmp_path / "a 'b' $c"
    for rank in (0, 1, 2, 10):
        run_dir = details / f"host_{rank}_node-{rank}" / "run"
        run_dir.mkdir(parents=True)
        if rank in codes:
            write_json(run_dir / EXIT_FILE, {"code": codes[rank], "phase": "job"})
    if places is not None:
        record = {"hosts": {"1": "lost"}, "places": places, "replaced": {"1": 2}}
        write_json(details / "host_0_node-0" / "run" / LIVENESS_FILE, record)
    program = read_source(Path(slurm_job.__file__).parent / "job.sh")
    lines = [
        *re.findall(r"^\w+\(\) \{.*?^\}[^\n]*$", program, re.DOTALL | re.MULTILINE),
        f"details={shlex.quote(str(details))} run_id=run on_bad_host={on_bad_host} code=9",
        'coordinator_dir="$details/host_0_node-0/run"',
        "is_job_ending && state=ends || state='goes on'; read_job_code",
        "! has_lost_place || state+=', lost'",
        'echo "$state, $code"',
    ]
    result = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert (result.stdout.strip(), result.stderr) == (expected, "")


def test_each_device_type_is_a_component_of_a_heterogeneous_job(
    make_experiment: MakeExperiment,
) -> None:
    kinds = {
        "A800": SlurmType(nodes=2, partition="a", gpus_per_node="8"),
        "BI": SlurmType(nodes=1, gpus_per_node="4"),
    }
    slurm = Slurm(partition="all", by_type=kinds)
    plan = plan_with_job(make_experiment(runner=Runner(type="slurm", slurm=slurm)))
    assert [(h.name, h.device_type, h.nproc) for h in plan.hosts] == [
        ("node-0", "A800", 8),
        ("node-1", "A800", 8),
        ("node-2", "BI", 4),
    ]
    assert plan.job is not None
    *command, _ = plan.job.command
    first, second = command[2 : command.index(":")], command[command.index(":") + 1 :]
    assert {"--nodes=2", "--partition=a", "--gpus-per-node=8"} <= set(first)
    assert {"--nodes=1", "--partition=all", "--gpus-per-node=4"} <= set(second)
    assert "srun_options=(--het-group=0,1 --ntasks-per-node=1" in plan.job.script


def test_device_type_that_no_host_has_is_rejected(
    make_experiment: MakeExperiment, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("h0 slots=1 type=A800\nh1 slots=1 type=BI\n")
    slurm = Slurm(by_type={"A80": SlurmType(mem="0")})
    runner = Runner(type="slurm", hostfile=tmp_path / "hosts", slurm=slurm)
    with pytest.raises(ConfigError, match=r"A80: no host .* did you mean 'A800'"):
        plan_with_job(make_experiment(runner=runner))


def test_job_of_one_node_has_a_loopback_rendezvous(make_experiment: MakeExperiment) -> None:
    plan = plan_with_job(make_experiment(runner=Runner(type="slurm")))
    assert (plan.master_addr, plan.master_port, plan.liveness_port) == ("127.0.0.1", 0, None)
    assert plan.job is not None
    assert "master_addr=127.0.0.1\n" in plan.job.script


def test_signal_comes_stop_grace_plus_margin_before_the_time_limit(make_plan: MakePlan) -> None:
    # 59.5 is rounded up; the margin (STOP_MARGIN_SECONDS) is 30 s.
    assert signal_seconds(Runner(stop_grace=59.5)) == 90


def test_end_records_of_a_job(tmp_path: Path) -> None:
    assert files.read_start(tmp_path) is None
    (tmp_path / "nodes").write_text("job=12\nstart=1\nnodes=h[01-02],x\nmaster=a:1\n")
    assert files.read_start(tmp_path) == files.JobStart("12", 1, ("h01", "h02", "x"))
    (tmp_path / "nodes").write_text("job=12\n")
    assert files.read_start(tmp_path) is None
    (tmp_path / "ended").write_text("start=0\ncode=7\nwhy=\n")
    assert files.read_end(tmp_path) == files.JobEnd(0, 7, "")


def test_secret_files_are_readable_by_the_user_only(make_plan: MakePlan, tmp_path: Path) -> None:
    hosts = (Host("h0", 1), Host("h1", 1))
    plan = replace(
        make_plan(hosts=hosts, envs=Environments({"API_TOKEN": "a 'b' $c"})),
        runner=RunnerHandle("slurm"),
    )
    files.write_job_files(plan, tmp_path / "job", has_host_names=True)
    assert (tmp_path / "job" / "hosts").read_text() == "h0\nh1\n"
    path = tmp_path / "job" / "secrets.1"
    assert path.stat().st_mode & 0o777 == 0o600
    print_token = ["bash", "-c", '. "$1" && printf %s "$API_TOKEN"', "bash", str(path)]
    assert (
        subprocess.run(print_token, capture_output=True, text=True, check=True).stdout == "a 'b' $c"
    )
    files.remove_secrets(tmp_path / "job")
    assert not path.exists()


def write_slurm_commands(directory: Path, *, nodes: str, failures: int, are_listed: bool) -> None:
    """Write commands of Slurm that record changes of a job, and fail before they succeed, and a
    `sleep` that ends a loop after some rounds.
    """
    directory.mkdir()
    calls = directory / "calls"
    change = f'echo "${{0##*/}} $*" >>{calls}; (($(wc -l <{calls}) > {failures}))'
    list_nodes = "tr , '\\n' <<<\"$3\"" if are_listed else "false"
    rounds = directory / "rounds"
    programs = {
        "squeue": f"echo {nodes}",
        "scontrol": f"if [[ $1 == show ]]; then {list_nodes}; else {change}; fi",
        "scancel": change,
        "sleep": f"echo >>{rounds}; (($(wc -l <{rounds}) < 6))",
    }
    for name, program in programs.items():
        (directory / name).write_text(f"#!/bin/bash\n{program}\n", encoding="utf-8")
        (directory / name).chmod(0o755)


@pytest.mark.parametrize(
    ("case", "requests", "end"),
    [
        pytest.param({"nodes": "n0,n1"}, [], None, id="batch-node-is-there"),
        pytest.param({"are_listed": False}, [], None, id="scontrol-does-not-answer"),
        pytest.param({}, ["scontrol requeue 12"], None, id="requeued"),
        pytest.param({"failures": 2}, 3 * ["scontrol requeue 12"], None, id="slurmctld-is-back"),
        pytest.param(
            {"starts": 1}, ["scancel 12"], files.JobEnd(1, 1, "batch_node_lost"), id="cancelled"
        ),
        pytest.param(
            {"starts": 1, "failures": 2},
            3 * ["scancel 12"],
            files.JobEnd(1, 1, "batch_node_lost"),
            id="cancelled-later",
        ),
        pytest.param({"code": 7}, ["scancel 12"], files.JobEnd(0, 7, ""), id="job-has-ended"),
        pytest.param({"other_guard": "directory"}, [], None, id="another-guard-acts"),
        pytest.param({"other_guard": "file"}, [], None, id="directory-cannot-be-created"),
    ],
)
def test_guard_acts_once_the_batch_node_is_lost(
    tmp_path: Path, case: dict[str, Any], requests: list[str], end: files.JobEnd | None
) -> None:
    job_dir, details, bin_dir = (tmp_path / name for name in ("job", "details", "bin"))
    job_dir.mkdir()
    starts = case.get("starts", 0)
    for rank in (0, 1):
        run_dir = details / f"host_{rank}_node-{rank}" / "run"
        run_dir.mkdir(parents=True)
        code = case.get("code")
        if rank or code is not None:
            write_json(run_dir / EXIT_FILE, {"code": code or 1, "phase": "job"})
    if "code" in case:
        record = {"hosts": {}, "places": [0, 1]}
        write_json(details / "host_0_node-0" / "run" / LIVENESS_FILE, record)
    if case.get("other_guard") == "directory":
        (job_dir / f"guard.{starts}").mkdir()
    elif case.get("other_guard") == "file":
        (job_dir / f"guard.{starts}").touch()
    write_slurm_commands(
        bin_dir,
        nodes=case.get("nodes", "n1"),
        failures=case.get("failures", 0),
        are_listed=case.get("are_listed", True),
    )
    directory = Path(slurm_job.__file__).parent
    functions = re.findall(
        r"^\w+\(\) \{.*?^\}[^\n]*$", read_source(directory / "job.sh"), re.DOTALL | re.MULTILINE
    )
    program = "\n".join([*functions, read_source(directory / "guard.sh")])
    arguments = ["run", job_dir, details, 12, starts, 1, "n0", "n0"]
    arguments += [details / "host_0_node-0" / "run", "replace", 30]
    command = ["bash", "-c", program, "guard", *map(str, arguments)]
    environment = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"}
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    calls = bin_dir / "calls"
    assert (calls.read_text().splitlines() if calls.exists() else []) == requests
    assert files.read_end(job_dir) == end
