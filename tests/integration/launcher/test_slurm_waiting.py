"""Tests of runs that wait on a real Slurm with accounting, whose controller soon forgets jobs.

``lab`` (support/slurm_lab.py) has an experiment on a Slurm cluster, whose nodes are the hosts of a
test bed (tests/bed): namespaces of this machine.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.slurm_lab import OUTER_JOB_VARIABLES, Cluster, SlurmLab, require_cluster, slurm_lab
from support.waiting import PATIENCE_SECONDS, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.integration]

ACCOUNTS = (
    "add cluster bed",
    "add account team Cluster=bed",
    "add qos small MaxTRESPerJob=node=1",
    "add qos few GrpTRES=cpu=1",
    "add user root Account=team",
    "add user learner Account=team QOS=normal,small,few",
)


# Prolog of a job on a node: on h01 it waits while a file next to it exists.
PROLOG = """\
#!/bin/sh
while [ "$(hostname)" = h01 ] && [ -e "${0%/*}/gate" ]; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def gate() -> Iterator[Path]:
    """While this file exists, the prolog of h01 does not finish."""
    # Each host has its own /tmp.
    with TemporaryDirectory(prefix="slurm-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        prolog = Path(name, "prolog")
        prolog.write_text(PROLOG)
        prolog.chmod(0o755)
        yield Path(name, "gate")


@pytest.fixture(scope="module")
def slurm_cluster(gate: Path) -> Iterator[Cluster]:
    fields = {"AccountingStoreFlags": "job_env,job_script"}
    settings = {"MinJobAge": "2", "Prolog": str(gate.with_name("prolog")), **fields}
    with require_cluster(accounts=ACCOUNTS, settings=settings) as cluster:
        yield cluster


@pytest.fixture
def lab(slurm_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    with slurm_lab(slurm_cluster, request.node.name) as new_lab:
        yield new_lab


def is_forgotten(lab: SlurmLab) -> bool:
    """Return True if the controller no longer knows the run's job."""
    job_ids = lab.cluster.slurm.run("squeue", "--noheader", "--states=all", "--format=%i")
    return lab.job_id not in job_ids.split()


@pytest.mark.parametrize(
    ("qos", "expected"),
    [
        pytest.param(
            "small",
            "(QOSMaxNodePerJobLimit: it requests more nodes than the QOS allows per job, and will "
            "never start)",
            id="of-a-job",
        ),
        pytest.param(
            "few",
            "(QOSGrpCpuLimit: with it the jobs of the QOS would exceed their total of "
            "CPUs; it waits for other jobs to end, and never starts if it exceeds the limit by "
            "itself)",
            id="of-a-group",
        ),
    ],
)
def test_limit_that_holds_a_job_is_reported(lab: SlurmLab, qos: str, expected: str) -> None:
    lab.write_config(qos=qos)
    lab.submit()
    assert lab.wait_for_pending_reason("QOS").endswith(expected)


def test_forgotten_job_is_found_in_accounting(lab: SlurmLab) -> None:
    """The job could not record its end, because its batch script was on the lost node."""
    slurm = lab.cluster.slurm
    lab.envs = {"API_TOKEN": "s3cr3t"}
    lab.write_config()
    assert lab.run_action("run").returncode == 0
    with slurm.without_node("h00"):
        wait_for(lambda: is_forgotten(lab))
        assert lab.wait_for_warning() == f"job {lab.job_id} lost a node: h00"
    query_record = lab.query()
    assert (query_record["state"], query_record["failure"]["host"]) == ("failed", "h00")
    # Accounting stores the submission of a job.
    for option, text in (("--env-vars", "XDG_STATE_HOME="), ("--batch-script", lab.state().run_id)):
        output = slurm.run("sacct", f"--jobs={lab.job_id}", option)
        assert (text in output, "s3cr3t" in output) == (True, False)


def test_late_component_of_a_heterogeneous_job(lab: SlurmLab, gate: Path) -> None:
    """The second component's node becomes free last, and its prolog takes long."""
    slurm = lab.cluster.slurm
    lab.envs = {"MEET": f"{lab.root}/meet"}
    kinds = {"A": {"nodes": 1, "partition": "all"}, "B": {"nodes": 1, "partition": "last"}}
    lab.write_config(time="5:00", device_type_specific=kinds, runner={"lost_host_timeout": 1})
    gate.touch()
    try:
        with slurm.allocation(nodes=1, tasks=1, nodelist="h01"):
            launcher = lab.start("run")
            wait_for(lambda: lab.layout.state.exists() and "job" in lab.state().runner.handle)
            # The other component could start at once, but not alone.
            reason = lab.wait_for_pending_reason("(Resources: ")
            assert "may start" not in reason
        late = wait_for(lambda: [text for text in lab.query()["warnings"] if "started" in text])
        assert late[0].startswith("h01 has not started: Slurm is still preparing it")
        assert lab.query()["state"] == "starting"
    finally:
        gate.unlink()
    out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 0, out
    assert "2 rank(s) joined" in out
    query_record = lab.query()
    assert (query_record["state"], query_record["warnings"]) == ("running", [])
    lines = set(lab.run_action("logs").stdout.splitlines())
    assert {"h00: rank 0 attempt 0", "h01: rank 1 attempt 0"} <= lines


# Slurm's commands run at normal speed, and record the launcher's accelerated time of each call.
ASKED = """\
#!/bin/bash
name=${{0##*/}}
printf '%s %(%s)T\\n' "$name" -1 >>{log}
PATH={path} exec env -u LD_PRELOAD "$name" "$@"
"""
SPEED = 40


def test_200_seconds_in_the_queue(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's clock is accelerated, which shortens its waits, but none of Slurm's."""
    clock = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    query_log = lab.root / "asked"
    for name in ("squeue", "sbatch", "scancel"):
        program = lab.root / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            ASKED.format(log=shlex.quote(str(query_log)), path=shlex.quote(os.environ["PATH"]))
        )
        program.chmod(0o755)
    lab.write_config(runner={"start_timeout": 60, "lost_host_timeout": 5})

    def times() -> list[int]:
        lines = query_log.read_text().splitlines() if query_log.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith("squeue")]

    with lab.cluster.slurm.allocation(nodes=2, tasks=2):
        monkeypatch.setitem(OUTER_JOB_VARIABLES, "PATH", f"{lab.root}/bin:{os.environ['PATH']}")
        with monkeypatch.context() as patch:
            patch.setitem(OUTER_JOB_VARIABLES, "LD_PRELOAD", str(clock))
            patch.setitem(OUTER_JOB_VARIABLES, "FAKETIME", f"+0 x{SPEED}")
            launcher = lab.start("run")
        wait_for(lambda: len(times()) > 1 and times()[-1] - times()[0] >= 200)
        launcher.send_signal(signal.SIGINT)
        out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
        assert launcher.returncode == 128 + signal.SIGINT, out
        assert "is pending (Resources" in out
        assert lab.job_id not in lab.cluster.slurm.list_jobs()
    # Seldom, but for the first times, when it is not known yet why the job waits.
    waited = [later - earlier for earlier, later in pairwise(times()) if later - times()[0] < 200]
    assert min(waited[-3:]) >= 29, waited
    assert lab.query()["state"] == "stopped"
