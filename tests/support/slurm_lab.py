"""An experiment of an ordinary user on a real Slurm, started with the launcher's own command line.

The nodes of the Slurm cluster are the hosts of a test bed (tests/bed): namespaces of this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from bed import accounting
from bed.host import HostProcess
from bed.lab import Bed
from bed.plugin import require_bed
from bed.slurm import PROGRAMS, Slurm
from bed.users import User, known_user

from flagscale.config.load import load
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.preflight.checks import Check
from flagscale.launcher.runners.slurm.runner import SlurmRunner
from support.full_disk import small_disk
from support.launch_lab import Lab
from support.needs import require_program
from support.waiting import PATIENCE_SECONDS, wait_for
from support.warm_programs import run_command_line

# Joins, runs until SIGTERM, then saves and exits. FAIL is the exit code of rank 1. MEET is a
# directory in which ranks wait for each other before they join.
PROGRAM = """\
import os, signal, sys, time
from pathlib import Path
from flagscale.status import StatusWriter
rank = int(os.environ["RANK"])
status = StatusWriter.from_environment(rank)
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status.write("checkpoint", step=7)
    print("saved", rank, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("rank", rank, "attempt", os.environ["FLAGSCALE_ATTEMPT"], flush=True)
status.write("started")
if "MEET" in os.environ:
    meet = Path(os.environ["MEET"])
    meet.mkdir(exist_ok=True)
    (meet / str(rank)).touch()
    while len(list(meet.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.1)
for event in ("joined", "ready"):
    status.write(event)
if rank == 1 and "FAIL" in os.environ:
    sys.exit(int(os.environ["FAIL"]))
time.sleep(600)
"""
PARTITIONS = (
    "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    "PartitionName=short Nodes=ALL MaxTime=10 State=UP",
    "PartitionName=brief Nodes=ALL DefaultTime=1 MaxTime=INFINITE State=UP",
    "PartitionName=closed Nodes=ALL State=DOWN",
    "PartitionName=last Nodes=h01 MaxTime=INFINITE State=UP",
    "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 State=UP",
    "PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF State=UP",
)
SETTINGS = {
    "KillWait": "3",
    "MessageTimeout": "5",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
}
# Variables that a job inherits if it is submitted from within another job.
OUTER_JOB_VARIABLES = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "9",
    "SLURM_GPUS_PER_NODE": "8",
    "SBATCH_WAIT": "1",
}


@dataclass
class Cluster:
    """A Slurm with its user, and a directory of the user that all nodes share."""

    slurm: Slurm
    user: User
    shared: Path

    def create_lab(self, name: str) -> SlurmLab:
        """Create a directory for an experiment."""
        root = self.shared / name
        root.mkdir(mode=0o755)
        os.chown(root, self.user.uid, self.user.gid)
        return SlurmLab(root, root / "exp", cluster=self)


@contextmanager
def start_cluster(
    hosts: int = 2,
    *,
    settings: Mapping[str, str] | None = None,
    accounts: Sequence[str] = (),
    gpus: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Start a Slurm, and point this process's environment to it.

    The options are those of :meth:`bed.slurm.Slurm.open`.
    """
    # Other users may enter this directory, in contrast to pytest's temporary directories.
    with (
        TemporaryDirectory(prefix="slurm-") as name,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
    ):
        directory, user = Path(name), User()
        directory.chmod(0o755)
        (directory / "bed").mkdir(mode=0o755)
        # A separate file system, which tests may fill.
        shared = stack.enter_context(small_disk(directory, "256m"))
        (shared / "home").mkdir(mode=0o755)
        for shared_directory in (shared, shared / "home"):
            shared_directory.chmod(0o755)
            os.chown(shared_directory, user.uid, user.gid)
        with (
            known_user(directory, user),
            Bed.open(directory / "bed", hosts, shared=[shared]) as bed,
            Slurm.open(
                bed,
                settings={**SETTINGS, **(settings or {})},
                partitions=PARTITIONS,
                accounts=accounts,
                gpus=gpus,
            ) as slurm,
        ):
            environment = {"HOME": str(shared / "home"), "XDG_STATE_HOME": str(shared / "state")}
            for variable, value in {**slurm.environment(), **environment}.items():
                patch.setenv(variable, value)
            yield Cluster(slurm, user, shared)


@dataclass
class SlurmLab(Lab):
    """An experiment of the user."""

    cluster: Cluster = field(kw_only=True)
    envs: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        inside = (f"{name}={value}" for name, value in OUTER_JOB_VARIABLES.items())
        return [*self.cluster.user.command_prefix, "env", *inside, *super().command(*words)]

    def run_action(
        self,
        action: str,
        *words: str,
        wrapper: Sequence[str] = (),
        timeout: float = PATIENCE_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        if wrapper:
            return super().run_action(action, *words, wrapper=wrapper, timeout=timeout)
        user = self.cluster.user
        return run_command_line(
            super().command(f"action={action}", *words),
            environment={**self.environment(), **OUTER_JOB_VARIABLES},
            cwd=self.root,
            timeout=timeout,
            owner=(user.uid, user.gid),
        )

    def write_config(self, *, runner: dict[str, Any] | None = None, **section: Any) -> None:
        """Write the YAML of a run on two nodes; ``section`` is the runner's ``slurm`` section."""
        runner_section = {"type": "slurm", "nproc_per_node": 1, "stop_grace": 5, **(runner or {})}
        if "hostfile" not in runner_section and "device_type_specific" not in section:
            section.setdefault("nodes", 2)
        self.configure(
            PROGRAM, light=True, runner={**runner_section, "slurm": section}, envs=self.envs
        )

    @property
    def job_id(self) -> str:
        """Id of the run's Slurm job."""
        return str(self.state().runner.handle["job"])

    def submit(self, *words: str) -> None:
        """Submit the job without waiting for it."""
        result = self.run_action("run", "experiment.runner.wait_for=none", *words)
        assert result.returncode == 0, result.stdout + result.stderr

    def forget_job(self) -> dict[str, Any]:
        """Remove the job's id from the run's state."""
        state = self.state()
        handle = {k: v for k, v in state.runner.handle.items() if k != "job"}
        replace(state, runner=RunnerHandle("slurm", handle)).save(self.layout.state)
        return {}

    def query(self) -> dict[str, Any]:
        """Return the result of ``action=query``, run by the user without a new Python process."""

        # Imported here, because the user may not be able to read the modules at the first import.
        from flagscale.launcher import failures, snapshot  # noqa: F401

        def run_query() -> dict[str, Any]:
            with closing(SlurmRunner()) as runner:
                return runner.query(self.state()).to_json()

        return self.cluster.user.call(run_query)

    def wait_for_state(self, state: str) -> dict[str, Any]:
        """Return the result of ``query`` once the run is in this state."""
        snapshot: dict[str, Any] = wait_for(
            lambda: now if (now := self.query())["state"] == state else None
        )
        return snapshot

    def wait_for_pending_reason(self, expected_reason: str) -> str:
        """Return the explanation of a pending job, once it contains ``reason``."""

        def pending_reason() -> str:
            now = self.query()
            reason = str(now["hosts"][0].get("waits", ""))
            return reason if now["state"] == "pending" and expected_reason in reason else ""

        explanation: str = wait_for(pending_reason)
        return explanation

    def wait_for_warning(self) -> str:
        """Return the first warning of ``query``, once there is one."""
        warnings: list[str] = wait_for(lambda: self.query()["warnings"])
        return warnings[0]

    def run_preflight(self) -> list[Check]:
        """Return the results of a preflight by this process."""
        experiment = load(self.root / "conf", "lab", (), "plan").experiment
        with SlurmRunner().prepare(experiment, checking=True) as ready:
            return ready.checks

    def find_processes(self, name: str = "") -> list[HostProcess]:
        """Return the running processes of the run on the nodes, or on one."""
        hosts = (host for host in self.cluster.slurm.bed.hosts if name in ("", host.name))
        return [p for host in hosts for p in host.find(str(self.root))]

    def kill_processes(self) -> None:
        super().kill_processes()
        slurm = self.cluster.slurm
        # Components of a heterogeneous job cannot be cancelled individually.
        if jobs := {job.partition("+")[0] for job in slurm.list_jobs()}:
            slurm.run("scancel", *jobs)
        slurm.wait_until_no_jobs(PATIENCE_SECONDS)


@contextmanager
def require_cluster(**options: Any) -> Iterator[Cluster]:
    """Yield a Slurm; the test is skipped, with the reason, if there is none.

    ``options`` are those of :func:`start_cluster`.
    """
    require_bed()
    for program in (*PROGRAMS, *(accounting.PROGRAMS if "accounts" in options else ())):
        require_program("slurm", program)
    with start_cluster(**options) as new_cluster:
        yield new_cluster


@contextmanager
def slurm_lab(cluster_of_test: Cluster, name: str) -> Iterator[SlurmLab]:
    """Yield an experiment in a directory whose name contains special characters of shells and
    Slurm.
    """
    lab = cluster_of_test.create_lab(f"{name} 'b' %j $c")
    yield lab
    lab.kill_processes()
    shutil.rmtree(lab.root)
