"""One host of the bed: its processes, its sshd, and its simulated faults."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.waiting import PATIENCE_SECONDS, wait_for

from bed.keys import write_key

INIT = Path(__file__).with_name("init.sh")
PROJECT = Path(__file__).resolve().parents[2]
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")

SSHD_CONFIG = """\
Port 22
HostKey {directory}/hostkey
AuthorizedKeysFile /run/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PrintMotd no
PrintLastLog no
PidFile none
MaxSessions 64
Subsystem sftp internal-sftp
"""


def _installed_in_tmp() -> list[Path]:
    """Return this project and its Python if they are in /tmp, which is private to every host."""
    directories = {PROJECT, Path(sys.prefix), Path(sys.base_prefix)}
    in_tmp = sorted(path for path in directories if path.is_relative_to("/tmp"))
    return [path for path in in_tmp if not any(parent in path.parents for parent in in_tmp)]


@dataclass(frozen=True)
class HostProcess:
    """A process of one host, as seen from the test: ``pid`` can be signalled from here."""

    pid: int
    inner_pid: int
    argv: tuple[str, ...]
    state: str

    def environment(self) -> dict[str, str]:
        """Return the initial environment; empty if the process has ended."""
        try:
            data = Path(f"/proc/{self.pid}/environ").read_bytes()
        except OSError:
            return {}
        return dict(item.split("=", 1) for item in os.fsdecode(data).split("\0") if "=" in item)


@dataclass
class Host:
    """One host. Faults last until :meth:`heal`, or until the bed is closed.

    ``directory`` is the host's own directory on this machine, ``bed_directory`` that of the whole
    bed; ``veth`` is the hub's end of the host's cable.
    """

    name: str
    address: str
    fabric_address: str | None
    directory: Path
    bed_directory: Path
    veth: str
    sshd_options: dict[str, str] = field(default_factory=dict)
    _unshare: subprocess.Popen[str] | None = None
    _init: int = 0

    # -- start and end -------------------------------------------------------------------------

    def spawn(self, root: str, shared: Sequence[Path], users: Sequence[str]) -> None:
        """Start the host's first process; :meth:`wait_until_ready` waits until it is running."""
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "BED_NAME": self.name,
            "BED_DIR": str(self.directory),
            "BED_TOP": str(self.bed_directory),
            "BED_ROOT": root,
            "BED_SHARED": "\n".join(str(path) for path in shared),
            "BED_USERS": "\n".join(users),
            "BED_INSTALLED": "\n".join(str(path) for path in _installed_in_tmp()),
        }
        with (self.directory / "init.log").open("w") as log:
            self._unshare = subprocess.Popen(
                ["unshare", *NAMESPACES, "--fork", "--kill-child=KILL", "bash", str(INIT)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        self._read_reply("ready")
        process = self._process()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self._init = int(children[0])

    @property
    def pid(self) -> int:
        """Pid of the host's process 1, as seen from the test."""
        return self._init

    def send_commands(self, *commands: str) -> None:
        """Send commands to the host's first process.

        :meth:`wait_for_replies` waits for their ends.
        """
        stdin = self._process().stdin
        if stdin is None:
            raise RuntimeError(f"{self.name} has no control pipe")
        stdin.write("".join(f"{command}\n" for command in commands))
        stdin.flush()

    def wait_for_replies(self, count: int = 1) -> None:
        """Wait until the first process has finished ``count`` commands."""
        for _ in range(count):
            self._read_reply("done")

    def kill(self) -> None:
        """Cut the power: every process of the host ends at once."""
        self.cut_power()
        self.wait_until_dead()

    def kill_processes(self) -> None:
        """Kill all processes of the host at once, so that none detects the end of another one. The
        host itself stays, without sshd.
        """
        inside = ("nsenter", "-t", str(self.pid), "--pid", "--", "bash", "-c", "kill -KILL -1")
        subprocess.run(inside, check=True, timeout=PATIENCE_SECONDS)

    def cut_power(self) -> None:
        """Perform the first half of :meth:`kill`, so that many hosts can be ended in parallel."""
        if self._unshare is None:
            return
        if self._init == 0:
            self._unshare.kill()
        elif self._unshare.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)

    def wait_until_dead(self) -> None:
        if self._unshare is None:
            return
        # unshare waits for process 1, which the kernel ends last in its namespace.
        self._unshare.wait(timeout=PATIENCE_SECONDS)
        for pipe in (self._unshare.stdin, self._unshare.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _process(self) -> subprocess.Popen[str]:
        if self._unshare is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._unshare

    def _read_reply(self, expected: str) -> None:
        stdout = self._process().stdout
        line = stdout.readline().strip() if stdout is not None else ""
        if line != expected:
            log = (self.directory / "init.log").read_text()
            raise RuntimeError(f"{self.name}: expected {expected!r}, got {line!r}\n{log}")

    # -- commands and processes ----------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        stdin: str | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host, as on its console, without the network."""
        return subprocess.run(
            ["nsenter", "-t", str(self._init), "-a", "--", *map(str, argv)],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=check,
            env=None if env is None else dict(env),
            timeout=60,
        )

    def processes(self) -> list[HostProcess]:
        """Return the host's process table without its process 1. Zombies have state ``Z``."""
        namespace = _namespace(self._init)
        return [p for p in _all_processes() if _namespace(p.pid) == namespace and p.inner_pid != 1]

    def find(self, *words: str) -> list[HostProcess]:
        """Return the running processes whose command line contains every one of ``words``."""
        alive = (p for p in self.processes() if p.state != "Z")
        return [p for p in alive if all(word in " ".join(p.argv) for word in words)]

    def local_path(self, host_path: str | Path) -> Path:
        """Return the path in the test's file system of a file on the host."""
        return Path(f"/proc/{self._init}/root") / str(host_path).lstrip("/")

    # -- sshd ---------------------------------------------------------------------------------

    def write_sshd_config(self) -> None:
        defaults = SSHD_CONFIG.format(directory=self.directory)
        settings = dict(line.split(" ", 1) for line in defaults.splitlines())
        lines = (f"{key} {value}\n" for key, value in {**settings, **self.sshd_options}.items())
        (self.directory / "sshd_config").write_text("".join(lines))

    def find_sshd(self) -> HostProcess | None:
        """Return the listening sshd, without its sessions; None if none is running."""
        inner = int(self.local_path("/run/sshd.pid").read_text())
        listeners = [p for p in self.processes() if p.inner_pid == inner and p.state != "Z"]
        return listeners[0] if listeners else None

    def find_sessions(self) -> list[HostProcess]:
        """Return sshd's processes that serve a connection."""
        listener = self.find_sshd()
        listener_pid = None if listener is None else listener.pid
        return [p for p in self.find("sshd") if p.pid != listener_pid]

    def signal_sshd(self, number: signal.Signals) -> None:
        listener = self.find_sshd()
        if listener is None:
            raise RuntimeError(f"no sshd listens on {self.name}")
        os.kill(listener.pid, number)

    def stop_sshd(self) -> None:
        """End the listener and wait until its port is closed; open sessions stay alive."""
        self.signal_sshd(signal.SIGKILL)
        wait_for(lambda: self.find_sshd() is None, f"end of sshd of {self.name}", seconds=10)

    def start_sshd(self, **options: str) -> None:
        """Start the listener, with further sshd_config ``options``, and wait for its banner."""
        self.sshd_options.update(options)
        self.write_sshd_config()
        self.send_commands("sshd")
        self.wait_for_replies()
        self.wait_for_banner()

    def restart_sshd(self, **options: str) -> None:
        self.stop_sshd()
        self.start_sshd(**options)

    def wait_for_banner(self) -> None:
        """Wait until sshd answers over the network."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                with socket.create_connection((self.address, 22), 1) as connection:
                    if connection.recv(4) == b"SSH-":
                        return
            except OSError:
                pass
            if time.monotonic() > deadline:
                log = (self.directory / "sshd.log").read_text()
                raise TimeoutError(f"no sshd on {self.name} within {PATIENCE_SECONDS:g} s\n{log}")
            time.sleep(0.02)

    def change_host_key(self) -> None:
        """Replace sshd's host key without updating known_hosts, like a reinstalled machine."""
        write_key(self.directory / "hostkey")
        self.restart_sshd()

    def skew_clock(self, seconds: int) -> None:
        """Offset the clock of every process of later sessions by ``seconds``."""
        library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
        self.restart_sshd(
            SetEnv=f"LD_PRELOAD={library} FAKETIME={seconds:+d} DONT_FAKE_MONOTONIC=1"
        )

    # -- network and disk ---------------------------------------------------------------------

    def set_link(self, state: str) -> None:
        """Unplug (``down``) or plug in (``up``) the host's cable."""
        subprocess.run(["ip", "link", "set", self.veth, state], check=True)

    def drop_packets(self, rule: str = "tcp dport 22") -> None:
        """Silently drop the packets that match ``rule`` in the host's firewall."""
        table = "add table inet bed"
        chain = "add chain inet bed input { type filter hook input priority 0 ; }"
        self.run(["nft", "-f", "-"], stdin=f"{table}\n{chain}\nadd rule inet bed input {rule} drop")

    def drop_percent(self, percent: float) -> None:
        """Drop this percentage of the packets that reach the host."""
        self.drop_packets(f"numgen random mod 1000 < {round(10 * percent)}")

    def limit_rate(self, rate: str, burst: str = "32kb") -> None:
        """Limit the cable to ``rate`` (in tc's syntax, ``10mbit``) in both directions."""
        bucket = ["root", "tbf", "rate", rate, "burst", burst, "latency", "200ms"]
        subprocess.run(["tc", "qdisc", "replace", "dev", self.veth, *bucket], check=True)
        self.run(["tc", "qdisc", "replace", "dev", "eth0", *bucket])

    def limit_switch_rate(self, rate: str, queue: str) -> None:
        """Limit traffic to the host at the switch's port, with a queue of ``queue`` bytes; more is
        dropped.

        Both are in tc's syntax.
        """
        # A smaller bucket would have to split packets, which have up to 64 KiB; this takes time.
        bucket = ["root", "tbf", "rate", rate, "burst", "96kb", "limit", queue]
        subprocess.run(["tc", "qdisc", "replace", "dev", self.veth, *bucket], check=True)

    def heal(self) -> None:
        """Undo all faults of the network: link, dropped packets, and limited rates."""
        self.set_link("up")
        self.run(["nft", "flush", "ruleset"])
        unshaped = ["tc", "qdisc", "del", "dev", self.veth, "root"]
        subprocess.run(unshaped, capture_output=True, check=False)
        self.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=False)

    def mount_small_disk(self, path: str | Path, megabytes: int) -> None:
        """Mount a file system of ``megabytes`` on ``path`` of this host."""
        self.run(["mkdir", "-p", path])
        self.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", path])

    def fill_disk(self, path: str | Path) -> None:
        """Write zeros to a file in ``path``, a :meth:`small_disk`, until it is full."""
        if self.run(["stat", "-f", "-c", "%T", path]).stdout.strip() != "tmpfs":
            raise ValueError(f"{path} of {self.name} is not a small disk of the bed")
        self.run(["dd", "if=/dev/zero", f"of={path}/filler", "bs=64k"], check=False)


def _all_processes() -> Iterator[HostProcess]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
                argv = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")[:-1]
            except OSError:
                continue
            lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            inner = int(lines["NSpid"].split()[-1])
            state = lines["State"].split()[0]
            yield HostProcess(int(entry.name), inner, tuple(argv), state)


def _namespace(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None
