"""Runs on a real Slurm that keeps accounts, and whose controller soon forgets its jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launch_lab import until
from slurm_lab import Cluster, SlurmLab, needed_cluster, slurm_lab

pytestmark = pytest.mark.integration

ACCOUNTS = (
    "add cluster bed",
    "add account team Cluster=bed",
    "add qos small MaxTRESPerJob=node=1",
    "add qos few GrpTRES=cpu=1",
    "add user root Account=team",
    "add user learner Account=team QOS=normal,small,few",
)


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[Cluster]:
    with needed_cluster(accounts=ACCOUNTS, settings={"MinJobAge": "2"}) as made:
        yield made


@pytest.fixture
def lab(slurm_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    with slurm_lab(slurm_cluster, request.node.name) as made:
        yield made


def forgotten(lab: SlurmLab) -> bool:
    """Whether the controller knows nothing of the run's job any more."""
    shown = lab.cluster.slurm.run("squeue", "--noheader", "--states=all", "--format=%i")
    return lab.job not in shown.split()


@pytest.mark.parametrize(
    ("qos", "told"),
    [
        pytest.param(
            "small",
            "(QOSMaxNodePerJobLimit: it asks for more nodes than the QOS gives a job, and will "
            "never start)",
            id="of-a-job",
        ),
        pytest.param(
            "few",
            "(QOSGrpCpuLimit: with it the jobs of the QOS would have more CPUs than they may have "
            "together; it waits for others to end)",
            id="of-a-group",
        ),
    ],
)
def test_a_limit_that_holds_a_job_is_told(lab: SlurmLab, qos: str, told: str) -> None:
    lab.slurm(qos=qos)
    lab.submit()
    assert lab.until_waiting("QOS").endswith(told)


def test_what_the_controller_has_forgotten_is_in_the_accounts(lab: SlurmLab) -> None:
    """Of a job that could not say how it ended: its batch script was on the node that it lost."""
    slurm = lab.cluster.slurm
    lab.slurm()
    assert lab.do("run").returncode == 0
    with slurm.without_node("h00", str(lab.root)):
        until(lambda: forgotten(lab))
        assert lab.until_warned() == f"job {lab.job} lost a node"
