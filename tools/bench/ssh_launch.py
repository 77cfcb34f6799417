"""How long the launcher takes to start, query and stop a run on many hosts over SSH.

    python tools/bench/ssh_launch.py --hosts 1 2 4 8 16 32 64 --output docs/results/ssh_launch.json

The hosts are namespaces of this machine, each with a real sshd (tests/bed), so this machine's
cores serve both sides: the ratios count, not the seconds. What is measured is whole commands, from
their start to what a user waits for:

- ``run``: until the script of every host has been started (``run+preflight``: with the checks that
  precede a run by default); ``query`` and ``stop``: until they end;
- ``bare``: the same number of hosts with nothing but paramiko, one connection and one command
  each, in a Python program of its own. ``run``, ``query`` and ``stop`` may take 1.5 times as long;
- ``pdsh`` (where it is installed) and ``ssh+scp``: a directory made, a file copied and a command
  started in the background on one host after another, by OpenSSH's programs.

Every round measures all of them in turn, so that a busy moment meets them alike. Exits with 4
where the limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
LIMIT = 1.5
BARE_THREADS = 48
MEASURED = ("run", "query", "stop")
_STARTED = "started on "


@dataclass
class Sample:
    """One command: seconds that it took, and seconds of CPU of this side."""

    seconds: float
    cpu: float


@dataclass
class Series:
    """All samples of one kind at one number of hosts."""

    samples: list[Sample] = field(default_factory=list)

    def ratio(self, base: Series) -> float:
        """To another series, round by round: a busy moment meets both, so it tells more than a
        ratio of medians."""
        pairs = zip(self.samples, base.samples, strict=False)
        return round(statistics.median(own.seconds / other.seconds for own, other in pairs), 2)

    def summary(self, base: Series) -> dict[str, float]:
        seconds = [sample.seconds for sample in self.samples]
        return {
            "median_s": round(statistics.median(seconds), 3),
            "min_s": round(min(seconds), 3),
            "max_s": round(max(seconds), 3),
            "client_cpu_s": round(statistics.median(s.cpu for s in self.samples), 3),
            "ratio_to_bare": self.ratio(base),
        }


def bare(identity: str, known_hosts: str, addresses: Sequence[str]) -> None:
    """One connection and one command a host, and nothing else: what SSH itself costs."""
    import paramiko

    keys = paramiko.HostKeys(known_hosts)
    key = paramiko.Ed25519Key.from_private_key_file(identity)

    def one(address: str) -> int:
        client = paramiko.SSHClient()
        client.get_host_keys().update(keys)
        client.connect(
            address, username="root", pkey=key, look_for_keys=False, allow_agent=False, timeout=30
        )
        with client:
            _, stdout, _ = client.exec_command("true")
            return int(stdout.channel.recv_exit_status())

    with ThreadPoolExecutor(min(BARE_THREADS, len(addresses))) as pool:
        if any(pool.map(one, addresses)):
            raise SystemExit("a host's `true` failed")


def timed(work: Callable[[], None]) -> Sample:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    work()
    seconds = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(seconds, cpu)


class Bench:
    """Commands for one bed of hosts. The job waits in ``before_start``, so that what is measured
    is the launcher, not 64 training programs on this machine's cores."""

    def __init__(self, bed: Any, lab: Any) -> None:
        self.bed = bed
        self.lab = lab
        self.environment = bed.environment()
        lab.configure(cmds={"before_start": "sleep 3600"})

    def bare(self) -> None:
        words = [sys.executable, __file__, "--bare", str(self.bed.identity)]
        addresses = [host.address for host in self.bed.hosts]
        self._run([*words, str(self.bed.known_hosts), *addresses])

    def run(self, *, preflight: bool) -> Sample:
        """From the command to the last script's start; the launcher, which would wait for the
        ranks from then on, is ended."""
        words = self.lab.command("action=run", f"experiment.runner.preflight={preflight}")
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        launcher = subprocess.Popen(
            words,
            cwd=self.lab.root,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        watchdog = threading.Timer(120, launcher.kill)
        watchdog.start()
        said = ""
        for line in launcher.stderr or ():
            said += line
            if line.startswith(_STARTED):
                break
        else:
            raise SystemExit(f"the run did not start:\n{said}")
        seconds = time.monotonic() - began
        watchdog.cancel()
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Sample(seconds, cpu)

    def action(self, name: str) -> None:
        self._run(self.lab.command(f"action={name}"), cwd=self.lab.root)

    def pdsh(self) -> None:
        arguments = f"-F {self.bed.ssh_config} %h"
        environment = {**self.environment, "PDSH_SSH_ARGS": arguments}
        hosts = ",".join(self.bed.names)
        words = ["pdsh", "-R", "ssh", "-f", str(BARE_THREADS), "-w", hosts, "true"]
        self._run(words, env=environment)

    def ssh_and_scp(self) -> None:
        options = ["-F", str(self.bed.ssh_config)]
        script = self.lab.root / "program.py"
        for name in self.bed.names:
            self._run(["ssh", *options, "-n", name, "mkdir -p /tmp/job"])
            self._run(["scp", *options, "-q", str(script), f"{name}:/tmp/job/script"])
            self._run(["ssh", *options, "-n", "-f", name, "true </dev/null >/dev/null 2>&1 &"])

    def _run(self, words: Sequence[str], **more: Any) -> None:
        done = subprocess.run(
            words,
            env=more.pop("env", self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            **more,
        )
        if done.returncode != 0:
            raise SystemExit(f"{words[:3]} ended with {done.returncode}\n{done.stderr}")


@contextmanager
def open_bench(hosts: int) -> Iterator[Bench]:
    sys.path.insert(0, str(PROJECT / "tests"))
    from bed.lab import Bed  # type: ignore[import-not-found]
    from ssh_lab import ssh_lab  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory:
        top, shared = Path(directory) / "bed", Path(directory) / "shared"
        top.mkdir()
        shared.mkdir()
        with Bed.open(top, hosts, shared=[shared]) as bed, ssh_lab(bed, shared / "lab") as lab:
            yield Bench(bed, lab)


def measure(hosts: int, rounds: int) -> dict[str, dict[str, float]]:
    """All kinds at one number of hosts, in turn, ``rounds`` times after one that warms up."""
    found: dict[str, Series] = {}

    def add(kind: str, sample: Sample, number: int) -> None:
        if number:
            found.setdefault(kind, Series()).samples.append(sample)

    with open_bench(hosts) as bench:
        for number in range(rounds + 1):
            add("bare", timed(bench.bare), number)
            add("run", bench.run(preflight=False), number)
            add("query", timed(lambda: bench.action("query")), number)
            add("stop", timed(lambda: bench.action("stop")), number)
            add("run+preflight", bench.run(preflight=True), number)
            bench.action("stop")
            if shutil.which("pdsh"):
                add("pdsh", timed(bench.pdsh), number)
        add("ssh+scp", timed(bench.ssh_and_scp), 1)
    return {kind: series.summary(found["bare"]) for kind, series in found.items()}


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line."""
    xs, ys = zip(*points, strict=True)
    slope = statistics.linear_regression(xs, ys).slope if len(points) > 1 else 0.0
    return statistics.mean(ys) - slope * statistics.mean(xs), slope


def projection(table: dict[int, dict[str, dict[str, float]]], hosts: int) -> dict[str, float]:
    """What a line through the measured medians gives for ``hosts``."""
    made = {}
    for kind in table[max(table)]:
        points = [(n, row[kind]["median_s"]) for n, row in table.items() if kind in row]
        start, slope = line_through(points)
        made[kind] = round(start + slope * hosts, 1)
    return made


def main() -> int:
    if sys.argv[1:2] == ["--bare"]:
        bare(sys.argv[2], sys.argv[3], sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    table: dict[int, dict[str, dict[str, float]]] = {}
    print(f"{'hosts':>5}  {'kind':14} {'median':>8} {'min':>8} {'max':>8} {'cpu':>8} {'ratio':>6}")
    for hosts in options.hosts:
        table[hosts] = measure(hosts, options.rounds)
        for kind, row in table[hosts].items():
            numbers = " ".join(f"{row[k]:8.2f}" for k in ("median_s", "min_s", "max_s"))
            cpu, ratio = row["client_cpu_s"], row["ratio_to_bare"]
            print(f"{hosts:5}  {kind:14} {numbers} {cpu:8.2f} {ratio:6.2f}", flush=True)
    most = max(table)
    missed = [kind for kind in MEASURED if table[most][kind]["ratio_to_bare"] > LIMIT]
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report(table, options.rounds), indent=2) + "\n")
    for kind in missed:
        print(f"{kind} on {most} hosts misses {LIMIT} times a bare fan-out", file=sys.stderr)
    return 4 if missed else 0


def report(table: dict[int, dict[str, dict[str, float]]], rounds: int) -> dict[str, Any]:
    import paramiko

    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", "tools/bench/ssh_launch.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores ({platform.machine()}), which serve both sides",
        "load": [round(load, 1) for load in os.getloadavg()],
        "versions": {
            "python": platform.python_version(),
            "paramiko": paramiko.__version__,
            "ssh": ssh,
            "kernel": platform.release(),
        },
        "rounds": rounds,
        "limit": LIMIT,
        "hosts": {str(hosts): row for hosts, row in table.items()},
        "projection_1000": projection(table, 1000),
    }


if __name__ == "__main__":
    sys.exit(main())
