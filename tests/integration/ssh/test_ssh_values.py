"""Tests that values of a YAML reach exactly the hosts that they are for, unchanged.

``lab`` (support/ssh_lab.py) has an experiment on the hosts of the test bed ``lab.bed`` (tests/bed),
which are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from bed.lab import Bed
from support.ssh_lab import SshLab, ssh_lab
from support.waiting import wait_for

pytestmark = pytest.mark.integration

# Writes its arguments and environment to a file next to its exp_dir.
SHOW = """\
import json, os, sys
from pathlib import Path
sys.path.insert(0, {project!r})
from flagscale.status import StatusWriter
status = StatusWriter.from_environment(int(os.environ["RANK"]))
status.write("joined", backend="none")
record = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "exe": sys.executable}
path = Path(__file__).with_name(f"seen_{os.environ['RANK']}.json")
part = path.with_suffix(".part")
part.write_text(json.dumps(record))
part.rename(path)
"""
HOSTILE = {
    "COMMAS": "0,1,2",
    "QUOTES": """it's "quoted" `id` $(id) $HOME""",
    "LINES": "one\n two\n\n",
    "UNICODE": "机器 naïve 🚀",
    "BACKSLASH": "a\\b\\\\c\\n",
    "LONG": "x" * 50_000,
    "EMPTY": "",
    "GLOB": "*?[a-z]{1,2}~ !history",
}


def read_values(lab: SshLab, rank: int) -> dict[str, Any]:
    path = lab.root / f"seen_{rank}.json"
    wait_for(path.exists)
    return dict(json.loads(path.read_text()))


def test_hostile_values_and_paths(bed: Bed, tmp_path: Path) -> None:
    root = tmp_path / "a b 'c' \"d\" $e,f;g 机器"
    with ssh_lab(bed, root) as lab:
        lab.configure(SHOW, envs={**HOSTILE, "API_TOKEN": "s'3\"c$r`3\nt"})
        result = lab.run_action("run")
        assert result.returncode == 0, result.stderr
        for rank in (0, 1):
            environment = read_values(lab, rank)["env"]
            assert {name: environment[name] for name in HOSTILE} == HOSTILE
            assert environment["API_TOKEN"] == "s'3\"c$r`3\nt"
        wait_for(lambda: lab.query()["state"] == "completed")
        wait_for(lambda: not lab.remaining_processes())  # scripts end after the job
        assert "s'3" not in (lab.exp_dir / "logs" / "scripts" / "plan.json").read_text()


LONG_NAME = "node-with-a-very-long-name." + "x" * 33


@pytest.mark.bed(hosts=["N-1.rack-2.x", LONG_NAME])
def test_hostile_host_names(lab: SshLab) -> None:
    lab.configure(SHOW)
    result = lab.run_action("test")
    assert result.returncode == 0, result.stderr
    prefixes = {line.split(":")[0] for line in result.stdout.splitlines()}
    assert prefixes >= {"N-1.rack-2.x", LONG_NAME}
    assert [read_values(lab, rank)["env"]["RANK"] for rank in (0, 1)] == ["0", "1"]


@pytest.mark.bed(hosts=3)
def test_values_of_types_and_hosts_reach_no_other_host(lab: SshLab) -> None:
    link = lab.root / "venv" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.write_text(f'#!/bin/sh\nVIA=venv exec {shlex.quote(lab.command()[0])} "$@"\n')
    link.chmod(0o755)
    lab.configure(
        SHOW,
        hostfile="h00 slots=1 type=A\nh01 slots=1 type=B\nh02 slots=1 type=B\n",
        envs={
            "WHO": "all",
            "device_type_specific": {"B": {"WHO": "B"}},
            "node_specific": {"h02": {"WHO": "h02", "ONLY": "a,b 'c'"}},
        },
        cmds={"before_start": "export STEP=all"},
        top={
            "train": {"model": {"num_workers": 4, "shared": "a b"}},
            "device_type_specific": {
                "B": {"num_workers": 2, "python": str(link)},
            },
            "node_specific": {
                "h01": {"model": {"num_workers": 1}, "extra": ["x", "y z"]},
                "h02": {"shared": None, "cmds": {"before_start": "export STEP='h02 $x'"}},
            },
        },
    )
    result = lab.run_action("dryrun").stdout
    assert "#   node_specific.h01.model.num_workers" in result
    assert "#   envs.node_specific.h02" in result
    process = lab.run_action("run")
    assert process.returncode == 0, process.stderr
    first, second, third = (read_values(lab, rank) for rank in range(3))
    for record, arguments in (
        (first, ["--num-workers", "4", "--shared", "a b"]),
        (second, ["--num-workers", "1", "--shared", "a b", "--extra", "x", "y z"]),
        (third, ["--num-workers", "2"]),
    ):
        assert record["argv"][: len(arguments)] == arguments
        assert record["argv"][len(arguments)].startswith("--save")
    assert [r["env"]["WHO"] for r in (first, second, third)] == ["all", "B", "h02"]
    assert [r["env"].get("ONLY") for r in (first, second, third)] == [None, None, "a,b 'c'"]
    assert [r["env"]["STEP"] for r in (first, second, third)] == ["all", "all", "h02 $x"]
    assert [r["env"].get("VIA") for r in (first, second, third)] == [None, "venv", "venv"]
    assert second["env"]["PATH"].startswith(f"{link.parent}:")


@pytest.mark.bed(hosts=2, fabric=True)
def test_ranks_meet_in_the_fabric(lab: SshLab) -> None:
    hostfile = "h[00-01] slots=1 addr=10.78.0.[1-2] user=root port=22\n"
    lab.configure(SHOW, hostfile=hostfile)
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        environment = read_values(lab, rank)["env"]
        assert environment["GLOO_SOCKET_IFNAME"] == "fab0"
        assert environment["NCCL_SOCKET_IFNAME"] == "=fab0"
    script = (lab.exp_dir / "logs" / "scripts" / "host_1_h01_run.sh").read_text()
    assert "--master_addr 10.78.0.1" in script
    process = json.loads(lab.run_action("check", "json=true").stdout)
    assert "fab0 reaches 10.78.0.1" in [check["found"] for check in process]


@pytest.mark.bed(hosts=["gate", "h01", "h02"])
def test_hosts_behind_a_jump_host(lab: SshLab) -> None:
    hostfile = "h01 slots=1 proxy=gate\nh02 slots=1 proxy=root@gate:22\n"
    lab.configure(SHOW, hostfile=hostfile)
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    wait_for(lambda: lab.query()["state"] == "completed")
    assert lab.run_action("stop").returncode == 0
