"""Tests of the command line: output, files and exit codes, without starting a job."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch_lab import Lab
from support.warm_programs import run_command_line

pytestmark = pytest.mark.integration

PROGRAM = "print('hello')\n"
PROJECT = Path(__file__).resolve().parents[3]


def list_tree(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_dryrun_prints_what_run_would_start_and_writes_nothing(lab: Lab) -> None:
    secrets = {"HF_TOKEN": "s3cr3t", "GIT_PAT": "s3cr3t", "HTTPS_PROXY": "http://u:s3cr3t@h:1"}
    secrets |= {"SESSION_COOKIE": "s3cr3t", "AZURE_CONN": "AccountName=me;AccountKey=s3cr3t;A=b"}
    lab.configure(PROGRAM, envs={**secrets, "NCCL_DEBUG": "WARN"})
    tree_before = list_tree(lab.root)
    result = lab.run_action("dryrun")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^# +envs +NCCL_DEBUG=WARN$", result.stdout, re.MULTILINE)
    for name in secrets:
        assert f"{name}=<secret, not written>" in result.stdout
    assert "#!/usr/bin/env bash" in result.stdout
    assert "s3cr3t" not in result.stdout
    assert list_tree(lab.root) == tree_before


def test_dryrun_as_json(lab: Lab) -> None:
    lab.configure(PROGRAM)
    plan = json.loads(lab.run_action("dryrun", "json=true").stdout)
    assert plan["world_size"] == 2
    assert plan["hosts"][0]["program"][0] == str(lab.root / "program.py")


def test_dryrun_of_a_thousand_hosts(lab: Lab) -> None:
    """All hosts, one of them, as JSON; an unknown host is an error."""
    (lab.root / "hosts").write_text("node[0001-1024] slots=8\n", encoding="utf-8")
    lab.configure(PROGRAM, runner={"hostfile": "hosts", "nproc_per_node": 8})
    text = lab.run_action("dryrun").stdout
    assert "# 1024 hosts node[0001-1024]: 8 rank(s) each" in text
    assert text.count("#!/usr/bin/env bash") == 1
    result = lab.run_action("dryrun", "host=node0512").stdout
    assert "# host 511 node0512: ranks 4088-4095" in result
    assert '"node_rank": 511' in result
    plan = json.loads(lab.run_action("dryrun", "json=true").stdout)
    assert [host["name"] for host in plan["hosts"]] == [f"node{n:04}" for n in range(1, 1025)]
    assert plan["hosts"][0]["agent"]["hosts"] == ["node[0001-1024]"]
    picked = json.loads(lab.run_action("dryrun", "json=true", "host=node0512").stdout)
    assert [host["node_rank"] for host in picked["hosts"]] == [511]
    assert (picked["world_size"], picked["runner"]["type"]) == (8192, "ssh")
    wrong = lab.run_action("dryrun", "host=node512")
    assert wrong.returncode == 2
    assert "host: no host of the plan is called node512; did you mean" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--cfg", "job"], "exp_name: lab", id="cfg-job"),
        pytest.param(["--cfg", "job", "--package", "experiment.task"], "backend:", id="package"),
        pytest.param(["--help"], "Config", id="help"),
        pytest.param(["--cfg", "job", "experiment.exp_name=x"], "exp_name: x", id="override"),
        pytest.param(["--cfg", "job", "follow=true"], "follow: true", id="launcher-option"),
    ],
)
def test_hydra_cfg_output(lab: Lab, arguments: list[str], expected: str) -> None:
    lab.configure(PROGRAM)
    tree_before = list_tree(lab.root)
    result = subprocess.run(
        lab.command(*arguments), cwd=lab.root, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout
    assert list_tree(lab.root) == tree_before


@pytest.mark.parametrize("action", ["query", "stop", "logs", "check"])
def test_actions_on_nothing_leave_nothing(lab: Lab, action: str) -> None:
    lab.configure(PROGRAM)
    tree_before = list_tree(lab.root)
    result = lab.run_action(action)
    assert "Traceback" not in result.stderr
    assert list_tree(lab.root) == tree_before
    if action == "stop":
        assert result.returncode == 0
        assert "nothing to stop" in result.stdout
    if action in ("query", "logs"):
        assert result.returncode == 1
        assert "no run was started" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["action=fly"], "fly", id="action"),
        pytest.param(["experiment.runner.nproc_per_nodes=2"], "nproc_per_node", id="typo"),
        pytest.param(["experiment.runner.nproc_per_node=x"], "nproc_per_node", id="no-number"),
        pytest.param(["experiment.runner.nnodes=4"], "4 hosts, but", id="hosts-without-hostfile"),
        pytest.param(["experiment.runner.hostfile=nowhere"], "nowhere", id="missing-hostfile"),
        pytest.param(["experiment.task.entrypoint=no.py"], "no.py", id="missing-entrypoint"),
        pytest.param(["rank=7", "action=logs"], "no run", id="rank"),
        pytest.param(["--multirun"], "no override has several", id="multirun"),
        pytest.param(["=x"], "=x", id="unreadable-override"),
    ],
)
def test_a_mistake_is_one_message(lab: Lab, arguments: list[str], message: str) -> None:
    lab.configure(PROGRAM)
    result = subprocess.run(
        lab.command(*arguments), cwd=lab.root, capture_output=True, text=True, check=False
    )
    assert result.returncode == (1 if "action=logs" in arguments else 2), result.stderr
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not lab.exp_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-path", "./nowhere", "--config-name", "lab"], "no directory nowhere"),
        (["--config-path", "./conf", "--config-name", "labb"], "lab"),
        (["--config-path", "./conf"], "--config-name is missing"),
    ],
)
def test_a_wrong_place(lab: Lab, arguments: list[str], message: str) -> None:
    lab.configure(PROGRAM)
    command = [*lab.command()[:2], *arguments, "action=dryrun"]
    result = subprocess.run(command, cwd=lab.root, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_port_in_use_is_reported_with_its_process(lab: Lab) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        lab.configure(PROGRAM, runner={"master_port": port})
        result = lab.run_action("run")
        assert result.returncode == 2
        assert f"port {port} of localhost is in use by process {os.getpid()}" in result.stderr
        assert not lab.exp_dir.exists()
        check = lab.run_action("check")
        assert check.returncode == 2
        assert "FAILS" in check.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("localhost slots=1\n127.0.0.1 slots=1", "are this machine"),
        ("localhost slots=8 garbage", "hosts:1: 'garbage'"),
    ],
)
def test_a_hostfile_that_cannot_be_used(lab: Lab, line: str, message: str) -> None:
    (lab.root / "hosts").write_text(f"{line}\n", encoding="utf-8")
    lab.configure(PROGRAM, runner={"hostfile": "hosts"})
    result = lab.run_action("dryrun")
    assert result.returncode == 2
    assert message in result.stderr


def test_a_hostfile_with_this_machine_and_its_type(lab: Lab) -> None:
    text = "127.0.0.1 slots=1 type=CPU\nfar slots=8 type=GPU\n"
    (lab.root / "hosts").write_text(text, encoding="utf-8")
    envs = {"device_type_specific": {"CPU": {"KIND": "slow"}, "GPU": {"KIND": "fast"}}}
    lab.configure(PROGRAM, runner={"hostfile": "hosts", "nnodes": 1}, envs=envs)
    plan = json.loads(lab.run_action("dryrun", "json=true").stdout)
    host = plan["hosts"][0]
    assert (host["name"], host["nproc"], host["device_type"]) == ("127.0.0.1", 1, "CPU")
    values = {value["name"]: value.get("value") for value in host["environment"]}
    assert values["KIND"] == "slow"


def test_nccl_without_a_gpu(lab: Lab) -> None:
    lab.configure(PROGRAM)
    result = lab.run_action("run", "+train.system.distributed_backend=nccl")
    if "GPU" in result.stderr:
        assert result.returncode == 2
        assert "nccl is requested, but there is no GPU" in result.stderr
    else:
        pytest.skip("this machine has GPUs")


def test_an_exp_dir_that_is_a_file(lab: Lab) -> None:
    lab.configure(PROGRAM)
    lab.exp_dir.write_text("", encoding="utf-8")
    result = lab.run_action("run")
    assert result.returncode == 2
    assert "is not a directory" in result.stderr


def test_a_reader_that_leaves_early(lab: Lab) -> None:
    lab.configure(PROGRAM)
    command = " ".join(f"'{argument}'" for argument in lab.command("action=dryrun"))
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -c 1"],
        cwd=lab.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr == ""


def run_flagscale(lab: Lab, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run ``flagscale ARGV`` in the lab."""
    command = [sys.executable, "-m", "flagscale.cli", *argv]
    return run_command_line(command, environment=lab.environment(), cwd=lab.root, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        pytest.param(["--help"], 0, "flagscale logs", id="help"),
        pytest.param(["run", "--help"], 0, "overrides in Hydra's", id="help-of-run"),
        pytest.param([], 2, "examples", id="nothing"),
        pytest.param(["version"], 0, "flagscale 0", id="version"),
        pytest.param(["dryrun", "conf/lab.yaml"], 0, "#!/usr/bin/env bash", id="dryrun"),
        pytest.param(["dryrun", "--json", "conf/lab.yaml"], 0, '"run_id"', id="json"),
        pytest.param(
            ["dryrun", "conf/lab.yaml", "experiment.exp_name=two words"],
            0,
            "two words",
            id="override",
        ),
        pytest.param(["stop", "conf/lab.yaml"], 0, "nothing to stop", id="stop"),
        pytest.param(["run"], 2, "`flagscale run` needs a YAML or a program", id="no-words"),
        pytest.param(
            ["query", "none.yaml"],
            2,
            "error: no none.yaml in the current directory; it has no YAML files",
            id="no-file",
        ),
        pytest.param(
            ["query", "conf/lab.yaml", "action=stop"],
            2,
            "action=stop: `flagscale query` is an action already",
            id="two-actions",
        ),
        pytest.param(["run", "conf/lab.yaml", "--wrong"], 2, "unknown option --wrong", id="option"),
    ],
)
def test_the_console_script(lab: Lab, arguments: list[str], code: int, expected: str) -> None:
    lab.configure(PROGRAM)
    result = run_flagscale(lab, arguments)
    assert result.returncode == code, result.stderr
    assert expected in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_inactive_environment_is_reported(lab: Lab) -> None:
    without_packages = [sys.executable, "-S", *lab.command()[1:2]]  # without its packages
    result = subprocess.run(
        [*without_packages, "--config-path", "conf", "--config-name", "lab", "action=dryrun"],
        cwd=lab.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "has no module yaml" in result.stderr
    assert ". .venv/bin/activate" in result.stderr
    assert "Traceback" not in result.stderr


def test_run_py_without_anything_teaches(lab: Lab) -> None:
    result = subprocess.run(lab.command()[:2], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "action=run" in result.stdout


def test_fresh_clone_reports_everything_it_lacks(tmp_path: Path) -> None:
    for name in ("flagscale", "examples"):
        shutil.copytree(
            PROJECT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "csrc")
        )
    shutil.copy(PROJECT / "run.py", tmp_path)
    result = subprocess.run(
        [
            *(sys.executable, "run.py", "--config-path", "examples/llama3/conf"),
            *("--config-name", "train", "action=run"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "train.data.data_path: no data set" in result.stderr
    assert "no adapted Megatron-LM in third_party/Megatron-LM" in result.stderr
    assert "`make data`" in result.stderr and "`make backend`" in result.stderr


@pytest.mark.parametrize(
    ("argv", "code", "expected"),
    [
        pytest.param(["logs", "1970-ab", "-n", "0"], 1, "'1970-ab' is not a run id", id="id"),
        pytest.param(["query", "/no/dir", "-f"], 1, "'/no/dir' is not a run id", id="directory"),
        pytest.param(["stop", "conf/lab.yaml"], 0, "no run was started", id="yaml"),
        pytest.param(["stop", "conf/lab"], 0, "no run was started", id="yaml-without-suffix"),
        pytest.param(["stop", "conf/no.yaml"], 2, "no no.yaml in conf", id="missing-yaml"),
        pytest.param(["stop", "2026-ab", "a=1"], 2, "a=1: an existing run takes", id="override"),
        pytest.param(["run", "2026-ab"], 2, "no 2026-ab.yaml", id="not-to-find"),
        pytest.param(["stop", "--help"], 0, "or a run: its id, name or directory", id="help"),
    ],
)
def test_actions_accept_a_run(lab: Lab, argv: list[str], code: int, expected: str) -> None:
    lab.configure(PROGRAM)
    result = run_flagscale(lab, argv)
    assert result.returncode == code, result.stderr
    assert expected in result.stdout + result.stderr
