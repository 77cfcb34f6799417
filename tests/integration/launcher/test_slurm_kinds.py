"""Tests on a Slurm that tracks processes by group, and whose nodes have GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.slurm_lab import Cluster, SlurmLab, require_cluster, slurm_lab
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[Cluster]:
    settings = {"ProctrackType": "proctrack/pgid", "KillWait": "1"}
    with require_cluster(settings=settings, gpus=("A", "B")) as cluster:
        yield cluster


@pytest.fixture
def lab(slurm_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    with slurm_lab(slurm_cluster, request.node.name) as new_lab:
        yield new_lab


def bash_task(script: str) -> tuple[str, str]:
    override = f"experiment.task.command=[bash, -c, {json.dumps(script)}]"
    return ("experiment.task.type=command", override)


# In time nothing of it ends by itself.
STAYS = bash_task("trap '' TERM; setsid sleep 599 & while :; do sleep 1; done")


def hosts_with_leftovers(lab: SlurmLab) -> set[str]:
    """Return the hosts on which processes that left their group are alive."""
    hosts = lab.cluster.slurm.bed.hosts
    return {host.name for host in hosts for p in host.processes() if p.argv[-1:] == ("599",)}


def test_processes_that_leave_their_group_do_not_outlive_a_cancel(lab: SlurmLab) -> None:
    lab.write_config()
    (row,) = (check for check in lab.run_preflight() if check.name == "proctrack")
    assert (row.ok, row.warning, "survive scancel" in row.found) == (True, True, True)
    lab.submit(*STAYS)
    wait_for(lambda: hosts_with_leftovers(lab) == {"h00", "h01"})
    lab.cluster.slurm.run("scancel", lab.job_id)
    wait_for(lambda: not hosts_with_leftovers(lab) and lab.find_processes() == [], seconds=20)
    output = lab.state().hosts[1].output
    wait_for(lambda: "h01: ended processes that Slurm left alive: " in output.read_text())
    assert lab.wait_for_warning() == f"job {lab.job_id} was cancelled"
    assert lab.query()["state"] == "stopped"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        pytest.param(
            {"gpus_per_node": "2"},
            {"h00:0: 0 of 2 has 0,1", "h01:1: 1 of 2 has 0,1"},
            id="alike",
        ),
        pytest.param(
            {
                "time": "5:00",
                "device_type_specific": {
                    "A": {"nodes": 1, "gpus_per_node": "A:2", "constraint": "A"},
                    "B": {"nodes": 1, "gpus_per_node": "B:1", "constraint": "B"},
                },
            },
            {"h00:0: 0 of 2 has 0,1", "h01:1: 1 of 2 has 0"},
            id="unlike",
        ),
    ],
)
def test_gpus(lab: SlurmLab, section: dict[str, Any], expected: set[str]) -> None:
    """Each rank of a command, one per node, sees the GPUs that its node was allocated."""
    lab.write_config(runner={"nproc_per_node": None}, **section)
    result = lab.run_action(
        "test", *bash_task("echo $RANK of $WORLD_SIZE has $CUDA_VISIBLE_DEVICES")
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert expected <= set(result.stdout.splitlines())


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def control_groups_v1() -> Iterator[None]:
    """Control groups of version 1, removed after the test."""
    if "freezer" not in Path("/proc/cgroups").read_text():
        pytest.skip("this kernel has no freezer of version 1")
    yield
    remaining = [
        path for name in ("slurm_h00", "slurm_h01") for path in FREEZER.glob(f"{name}/**/")
    ]
    for path in sorted(remaining, reverse=True):
        path.rmdir()


def test_the_kernels_groups_leave_nothing(control_groups_v1: None) -> None:
    settings = {"ProctrackType": "proctrack/cgroup", "KillWait": "1"}
    with require_cluster(settings=settings) as cluster, slurm_lab(cluster, "groups") as lab:
        lab.write_config()
        assert "proctrack" not in {check.name for check in lab.run_preflight()}
        lab.submit(*STAYS)
        wait_for(lambda: hosts_with_leftovers(lab) == {"h00", "h01"})
        lab.cluster.slurm.run("scancel", lab.job_id)
        wait_for(lambda: not hosts_with_leftovers(lab) and lab.find_processes() == [], seconds=20)
        assert lab.wait_for_warning() == f"job {lab.job_id} was cancelled"
        assert lab.query()["state"] == "stopped"
