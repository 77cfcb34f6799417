"""Runs that wait on a real Slurm, which keeps accounts and whose controller soon forgets."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.launch_lab import until
from support.slurm_lab import INSIDE, Cluster, SlurmLab, needed_cluster, slurm_lab

pytestmark = [pytest.mark.slow, pytest.mark.integration]

ACCOUNTS = (
    "add cluster bed",
    "add account team Cluster=bed",
    "add qos small MaxTRESPerJob=node=1",
    "add qos few GrpTRES=cpu=1",
    "add user root Account=team",
    "add user learner Account=team QOS=normal,small,few",
)


# Prepares a node before a job begins there: h01 for as long as a file beside it exists.
PROLOG = """\
#!/bin/sh
while [ "$(hostname)" = h01 ] && [ -e "${0%/*}/gate" ]; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def gate() -> Iterator[Path]:
    """While this file exists h01 is being prepared for its job."""
    # Hosts have a /tmp of their own.
    with TemporaryDirectory(prefix="slurm-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        prolog = Path(name, "prolog")
        prolog.write_text(PROLOG)
        prolog.chmod(0o755)
        yield Path(name, "gate")


@pytest.fixture(scope="module")
def slurm_cluster(gate: Path) -> Iterator[Cluster]:
    kept = {"AccountingStoreFlags": "job_env,job_script"}
    settings = {"MinJobAge": "2", "Prolog": str(gate.with_name("prolog")), **kept}
    with needed_cluster(accounts=ACCOUNTS, settings=settings) as made:
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
    lab.envs = {"API_TOKEN": "s3cr3t"}
    lab.slurm()
    assert lab.do("run").returncode == 0
    with slurm.without_node("h00", str(lab.root)):
        until(lambda: forgotten(lab))
        assert lab.until_warned() == f"job {lab.job} lost a node: h00"
    now = lab.query()
    assert (now["state"], now["failure"]["host"]) == ("failed", "h00")
    # Accounts keep what a job was submitted with.
    for kept, text in (("--env-vars", "XDG_STATE_HOME="), ("--batch-script", lab.state().run_id)):
        told = slurm.run("sacct", f"--jobs={lab.job}", kept)
        assert (text in told, "s3cr3t" in told) == (True, False)


def test_a_component_that_comes_late(lab: SlurmLab, gate: Path) -> None:
    """Its node gets free last, and is prepared for long then."""
    slurm = lab.cluster.slurm
    lab.envs = {"MEET": f"{lab.root}/meet"}
    kinds = {"A": {"nodes": 1, "partition": "all"}, "B": {"nodes": 1, "partition": "last"}}
    lab.slurm(time="5:00", device_type_specific=kinds, runner={"lost_host_timeout": 1})
    gate.touch()
    try:
        with slurm.allocation(nodes=1, tasks=1, where="h01"):
            launcher = lab.start("run")
            until(lambda: lab.layout.state.exists() and "job" in lab.state().runner.handle)
            # The other one could begin at once, but not alone.
            told = lab.until_waiting("(Resources: ")
            assert "may start" not in told
        late = until(lambda: [text for text in lab.query()["warnings"] if "begun" in text])
        assert late[0].startswith("h01 has not begun: Slurm still prepares it")
        assert lab.query()["state"] == "starting"
    finally:
        gate.unlink()
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, out
    assert "2 rank(s) joined" in out
    now = lab.query()
    assert (now["state"], now["warnings"]) == ("running", [])
    lines = set(lab.do("logs").stdout.splitlines())
    assert {"h00: rank 0 attempt 0", "h01: rank 1 attempt 0"} <= lines


# Slurm's own commands, by their own clock; by the launcher's it is noted when one is called.
ASKED = """\
#!/bin/bash
name=${{0##*/}}
printf '%s %(%s)T\\n' "$name" -1 >>{log}
PATH={path} exec env -u LD_PRELOAD "$name" "$@"
"""
SPEED = 40


def test_200_seconds_in_the_queue(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a launcher whose clock goes faster: all of its waits, none of Slurm's, are shorter."""
    clock = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    asked = lab.root / "asked"
    for name in ("squeue", "sbatch", "scancel"):
        program = lab.root / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            ASKED.format(log=shlex.quote(str(asked)), path=shlex.quote(os.environ["PATH"]))
        )
        program.chmod(0o755)
    lab.slurm(runner={"start_timeout": 60, "lost_host_timeout": 5})

    def times() -> list[int]:
        lines = asked.read_text().splitlines() if asked.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith("squeue")]

    with lab.cluster.slurm.allocation(nodes=2, tasks=2):
        monkeypatch.setitem(INSIDE, "PATH", f"{lab.root}/bin:{os.environ['PATH']}")
        with monkeypatch.context() as patch:
            patch.setitem(INSIDE, "LD_PRELOAD", str(clock))
            patch.setitem(INSIDE, "FAKETIME", f"+0 x{SPEED}")
            launcher = lab.start("run")
        until(lambda: len(times()) > 1 and times()[-1] - times()[0] >= 200)
        launcher.send_signal(signal.SIGINT)
        out, _ = launcher.communicate(timeout=60)
        assert launcher.returncode == 128 + signal.SIGINT, out
        assert "is pending (Resources" in out
        assert lab.job not in lab.cluster.slurm.jobs()
    # Seldom, but for the first times, when it is not known yet why the job waits.
    waited = [later - earlier for earlier, later in pairwise(times()) if later - times()[0] < 200]
    assert min(waited[-3:]) >= 29, waited
    assert lab.query()["state"] == "stopped"
