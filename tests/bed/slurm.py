"""A real Slurm on the bed: the controller on the hub, and a slurmd on every host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.waiting import wait_for

from bed import accounting
from bed.host import Host
from bed.lab import HUB_ADDRESS, Bed

PROGRAMS = (
    *("slurmctld", "slurmd", "munged", "srun", "sbatch", "salloc", "scancel", "squeue", "sinfo"),
    "scontrol",
)

_CONFIGURATION = """\
ClusterName=bed
SlurmctldHost={hub}({address})
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=5
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


_PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"


@dataclass(frozen=True)
class Slurm:
    """A cluster whose nodes are the hosts of a bed; commands run on the hub."""

    bed: Bed
    directory: Path
    _controllers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _nodes: ExitStack = field(default_factory=ExitStack)

    @property
    def configuration(self) -> Path:
        return self.directory / "slurm.conf"

    def environment(self, **more: str) -> dict[str, str]:
        """Return the bed's environment, in which Slurm's commands use this cluster."""
        inherited = {k: v for k, v in self.bed.environment().items() if not k.startswith("SLURM_")}
        return {**inherited, "SLURM_CONF": str(self.configuration), **more}

    def run(self, *argv: str | Path, check: bool = True) -> str:
        """Run a command, and return its standard output."""
        result = subprocess.run(
            [str(word) for word in argv],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if check and result.returncode:
            raise RuntimeError(f"{argv[0]} ended with {result.returncode}: {result.stderr}")
        return result.stdout

    @contextmanager
    def allocation(self, nodes: int, tasks: int, nodelist: str = "") -> Iterator[str]:
        """Allocate ``nodes`` hosts within the block, on the nodes ``nodelist`` if given; yields the
        job id.
        """
        name = f"allocation-{time.monotonic_ns()}"
        size = [f"--nodes={nodes}", f"--ntasks={tasks}", f"--job-name={name}"]
        size += [f"--nodelist={nodelist}"] if nodelist else []
        self.run("salloc", "--no-shell", "--immediate=30", *size)
        job = self.run("squeue", "--noheader", f"--name={name}", "--format=%i").strip()
        try:
            yield job
        finally:
            self.run("scancel", job)

    def list_jobs(self) -> list[str]:
        """Return the ids of pending, running and ending jobs."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def wait_until_no_jobs(self, seconds: float = 20) -> None:
        """Wait until all jobs have ended."""
        wait_for(lambda: not self.list_jobs(), "the end of all jobs", seconds, interval=0.1)

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """Stop the controller within the block; jobs continue."""
        # The controller saves its state on SIGTERM.
        self._controllers[-1].terminate()
        self._controllers[-1].wait()
        try:
            yield
        finally:
            self._start_controller("slurmctld", "-D")

    def restart_controller(self) -> None:
        """Restart the controller, which then counts the jobs of every node anew."""
        with self.without_controller():
            pass
        self._wait_idle()

    @contextmanager
    def without_node(self, name: str) -> Iterator[None]:
        """Kill all processes of a node within the block, including its part of Slurm.

        The controller is informed at once, as by a monitor of nodes.
        """
        host = self.bed[name]
        # Stopped first, so that no node detects the end of another one before the controller does.
        _send_signal((process.pid for process in host.processes()), signal.SIGSTOP)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")
        host.kill_processes()
        try:
            yield
        finally:
            self._start_node(host)
            self.run("scontrol", "update", f"nodename={name}", "state=resume")

    def crash_node(self, name: str) -> None:
        """Kill all processes of a node. Its slurmd starts again at once, so that the controller
        does not notice.
        """
        self.bed[name].kill_processes()
        self._start_node(self.bed[name])

    @contextmanager
    def without_slurmd(self, name: str) -> Iterator[None]:
        """Kill a node's slurmd within the block; its jobs continue."""
        host = self.bed[name]
        for process in host.find("slurmd -D"):
            os.kill(process.pid, signal.SIGKILL)
        try:
            yield
        finally:
            self._start_node(host)

    def _start_node(self, host: Host) -> None:
        inside = ("nsenter", "-t", str(host.pid), "-a", "--", "slurmd", "-D")
        self._nodes.enter_context(self._daemon(*inside, log=f"slurmd-{host.name}"))

    def _start_controller(self, *argv: str) -> None:
        with (self.directory / "slurmctld.log").open("ab") as output:
            controller = subprocess.Popen(
                argv,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._controllers.append(controller)

    def _end_controller(self) -> None:
        self._controllers[-1].kill()
        self._controllers[-1].wait()

    @classmethod
    @contextmanager
    def open(
        cls,
        bed: Bed,
        *,
        cpus: int = 4,
        settings: Mapping[str, str] | None = None,
        partitions: Sequence[str] = (_PARTITION,),
        accounts: Sequence[str] = (),
        gpus: Sequence[str] = (),
    ) -> Iterator[Slurm]:
        """Start Slurm on a bed whose hosts have a shared root.

        Args:
            cpus: Number of CPUs that every node reports.
            settings: Lines of slurm.conf that take precedence.
            partitions: Partitions instead of the one with all nodes.
            accounts: Commands of sacctmgr; with any of them accounting is enabled.
            gpus: Type of the two GPUs of each host, which is also a feature of the host.
        """
        slurm = cls(bed, bed.directory / "slurm")
        directory = slurm.directory
        accounting_settings = accounting.accounting_settings(directory) if accounts else {}
        gres_settings = {"GresTypes": "gpu"} if gpus else {}
        slurm._write_files(
            cpus, {**accounting_settings, **gres_settings, **(settings or {})}, partitions, gpus
        )
        with ExitStack() as stack:
            munge = ("key-file", "socket", "pid-file", "log-file", "seed-file")
            paths = (f"--{name}={directory}/munge.{_suffix(name)}" for name in munge)
            stack.enter_context(slurm._daemon("munged", "--foreground", "--force", *paths))
            wait_for((directory / "munge.sock").exists, "munge", interval=0.02)
            if accounts:
                stack.enter_context(accounting.run_accounting(directory))
            for grant in accounts:
                slurm.run("sacctmgr", "--immediate", "--quiet", *grant.split())
            slurm._start_controller("slurmctld", "-D", "-c")
            stack.callback(slurm._end_controller)
            stack.enter_context(slurm._nodes)
            for host in bed.hosts:
                slurm._start_node(host)
            slurm._wait_idle()
            yield slurm

    def _write_files(
        self,
        cpus: int,
        settings: Mapping[str, str],
        partitions: Sequence[str],
        gpus: Sequence[str],
    ) -> None:
        self.directory.mkdir(mode=0o755)
        for name in ("state", *(f"spool-{host}" for host in self.bed.names)):
            (self.directory / name).mkdir()
        # The hosts have no control groups. With version 1 and without its controllers, slurmd uses
        # none; with some of them, it mounts these in a separate directory.
        lines = ["CgroupPlugin=cgroup/v1", "CgroupAutomount=yes"]
        lines.append(f"CgroupMountpoint={self.directory}/cgroup")
        (self.directory / "cgroup").mkdir()
        (self.directory / "cgroup.conf").write_text("\n".join(lines) + "\n")
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        text = _CONFIGURATION.format(
            hub=socket.gethostname(), address=HUB_ADDRESS, directory=self.directory
        )
        rows = dict(line.split("=", 1) for line in text.splitlines())
        lines = [f"{name}={value}\n" for name, value in {**rows, **settings}.items()]
        gres = ["AutoDetect=off\n"]
        for number, host in enumerate(self.bed.hosts):
            kind = gpus[number] if gpus else ""
            name = f"NodeName={host.name}"
            node = f"{name} NodeAddr={host.name} CPUs={cpus} RealMemory=1000 State=UNKNOWN"
            lines.append(f"{node} Gres=gpu:{kind}:2 Feature={kind}\n" if kind else f"{node}\n")
            gres.append(f"{name} Name=gpu Type={kind} File={self.directory}/gpu[0-1]\n")
        if gpus:
            for number in range(2):
                # Slurm requires device files: these have the device number of /dev/null.
                os.mknod(self.directory / f"gpu{number}", 0o20666, os.makedev(1, 3))
            (self.directory / "gres.conf").write_text("".join(gres))
        lines += [f"{partition}\n" for partition in partitions]
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
            # Its state belongs to this bed only, and processes inside a host end with the host.
            process.kill()
            process.wait()

    def _wait_idle(self) -> None:
        try:
            wait_for(lambda: self._idle() == len(self.bed.hosts), "idle nodes", interval=0.1)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self._logs()}") from None

    def _idle(self) -> int:
        states = self.run("sinfo", "--noheader", "--Node", "--format=%N %t", check=False)
        return len({line for line in states.splitlines() if line.endswith(" idle")})

    def _logs(self) -> str:
        logs: Sequence[Path] = sorted(self.directory.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in logs)


def _suffix(name: str) -> str:
    """Return ``munge.sock`` for ``socket``, and ``munge.log`` for ``log-file``."""
    return "sock" if name == "socket" else name.removesuffix("-file")


def _send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to those of ``pids`` that are running."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
