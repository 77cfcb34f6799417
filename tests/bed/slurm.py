"""A real Slurm on the bed: the controller on the hub, a slurmd on every host."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bed.lab import HUB_ADDRESS, Bed

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "salloc", "scancel", "squeue", "sinfo")

_CONFIGURATION = """\
ClusterName=bed
SlurmctldHost={hub}({address})
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
UnkillableStepTimeout=20
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster whose nodes are the hosts of a bed; commands run on the hub."""

    bed: Bed
    directory: Path

    @property
    def configuration(self) -> Path:
        return self.directory / "slurm.conf"

    def environment(self, **more: str) -> dict[str, str]:
        """The bed's environment, in which Slurm's commands find this cluster and no other."""
        inherited = {k: v for k, v in self.bed.environment().items() if not k.startswith("SLURM_")}
        return {**inherited, "SLURM_CONF": str(self.configuration), **more}

    def run(self, *argv: str | Path, check: bool = True) -> str:
        """A command's standard output."""
        done = subprocess.run(
            [str(word) for word in argv],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if check and done.returncode:
            raise RuntimeError(f"{argv[0]} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    @contextmanager
    def allocation(self, nodes: int, tasks: int) -> Iterator[str]:
        """The id of a job that holds ``nodes`` hosts for the length of a block."""
        name = f"allocation-{time.monotonic_ns()}"
        size = (f"--nodes={nodes}", f"--ntasks={tasks}", f"--job-name={name}")
        self.run("salloc", "--no-shell", "--immediate=30", *size)
        job = self.run("squeue", "--noheader", f"--name={name}", "--format=%i").strip()
        try:
            yield job
        finally:
            self.run("scancel", job)

    def jobs(self) -> list[str]:
        """The ids of the jobs that wait, run or are about to end."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def wait_empty(self, seconds: float = 20) -> None:
        """Wait until no job is left."""
        deadline = time.monotonic() + seconds
        while self.jobs():
            if time.monotonic() > deadline:
                raise TimeoutError(f"jobs {self.jobs()} did not end within {seconds:g} s")
            time.sleep(0.1)

    @classmethod
    @contextmanager
    def open(cls, bed: Bed, *, cpus: int = 4) -> Iterator[Slurm]:
        """Start it on a bed whose hosts have a shared root; every node says it has ``cpus``."""
        slurm = cls(bed, bed.directory / "slurm")
        slurm._write_files(cpus)
        directory = slurm.directory
        with ExitStack() as stack:
            munge = ("key-file", "socket", "pid-file", "log-file", "seed-file")
            paths = (f"--{name}={directory}/munge.{_suffix(name)}" for name in munge)
            stack.enter_context(slurm._daemon("munged", "--foreground", "--force", *paths))
            _until_exists(directory / "munge.sock")
            stack.enter_context(slurm._daemon("slurmctld", "-D", "-c"))
            for host in bed.hosts:
                inside = ("nsenter", "-t", str(host.pid), "-a", "--", "slurmd", "-D")
                stack.enter_context(slurm._daemon(*inside, log=f"slurmd-{host.name}"))
            slurm._wait_idle()
            yield slurm

    def _write_files(self, cpus: int) -> None:
        self.directory.mkdir(mode=0o755)
        for name in ("state", *(f"spool-{host}" for host in self.bed.names)):
            (self.directory / name).mkdir()
        # The hosts see no control groups; asked for version 1 and none of its controllers, slurmd
        # looks for none.
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        lines = [
            _CONFIGURATION.format(
                hub=socket.gethostname(), address=HUB_ADDRESS, directory=self.directory
            )
        ]
        for host in self.bed.hosts:
            name = f"NodeName={host.name} NodeAddr={host.address}"
            lines.append(f"{name} CPUs={cpus} RealMemory=1000 State=UNKNOWN\n")
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
        self.configuration.write_text("".join(lines))

    @contextmanager
    def _daemon(self, *argv: str, log: str = "") -> Iterator[None]:
        with (self.directory / f"{log or argv[0]}.log").open("wb") as output:
            process = subprocess.Popen(
                argv,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            yield
        finally:
            # Its state is of this bed alone, and what runs inside a host ends with the host.
            process.kill()
            process.wait()

    def _wait_idle(self, seconds: float = 30) -> None:
        wanted = ["idle", str(len(self.bed.hosts))]
        deadline = time.monotonic() + seconds
        while self.run("sinfo", "--noheader", "--format=%t %D", check=False).split() != wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"Slurm is not up within {seconds:g} s\n{self._logs()}")
            time.sleep(0.1)

    def _logs(self) -> str:
        logs: Sequence[Path] = sorted(self.directory.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in logs)


def _suffix(name: str) -> str:
    """``munge.sock`` for ``socket``, ``munge.log`` for ``log-file``."""
    return "sock" if name == "socket" else name.removesuffix("-file")


def _until_exists(path: Path, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear within {seconds:g} s")
        time.sleep(0.02)
