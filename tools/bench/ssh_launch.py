"""How long the launcher takes to start, query and stop a run on many hosts over SSH.

    python tools/bench/ssh_launch.py --rounds 7 --output docs/results/ssh_launch.json

The hosts are namespaces of this machine, each with a real sshd (tests/bed), so this machine's
cores serve both sides: the ratios count, not the seconds. What is measured is whole commands, from
their start to what a user waits for:

- ``run``: ``action=run`` as it is by default, with the preflight, until the script of every host
  has been started; ``run cold``: the first one, where hosts have kept nothing of an earlier
  preflight; ``run unchecked``: without a preflight;
- ``query`` and ``stop``: until they end;
- ``bare``: the same number of hosts with nothing but paramiko, one connection and one command
  each, in a Python program of its own. ``run``, ``query`` and ``stop`` may take 1.5 times as long;
- ``pdsh`` (where it is installed) and ``ssh+scp``: a directory made, a file copied and a command
  started in the background on one host after another, by OpenSSH's programs.

Every round measures all of them in turn, so that a busy moment meets them alike; ``ssh+scp``, which
takes longest, once. CPU time is told of both sides, and is what a busy machine changes least.
Exits with 4 where 64 hosts miss the limit, or ``run`` is no faster than pdsh or ssh and scp.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.bench import machine

PROJECT = Path(__file__).resolve().parents[2]
LIMIT = 1.5
LIMITED_HOSTS = 64
BARE_THREADS = 48
LIMITED = ("run", "query", "stop")
OTHERS = ("pdsh", "ssh+scp")
_STARTED = "started on "
# Sessions end and are counted a moment after the command that they served.
_SETTLING_SECONDS = 0.3
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Sample:
    """One command: seconds that it took, and seconds of CPU of this side and of the hosts."""

    seconds: float
    cpu: float
    hosts_cpu: float


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
            "hosts_cpu_s": round(statistics.median(s.hosts_cpu for s in self.samples), 2),
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


class Bench:
    """Commands for one bed of hosts. The job waits in ``before_start``, so that what is measured
    is the launcher, not 64 training programs on this machine's cores."""

    def __init__(self, bed: Any, lab: Any) -> None:
        self.bed = bed
        self.lab = lab
        self.environment = bed.environment()
        lab.configure(cmds={"before_start": "sleep 3600"})

    def measured(self, work: Callable[[], float]) -> Sample:
        """One sample of ``work``, which returns the seconds that count."""
        hosts, own = self._hosts_cpu(), _children_cpu()
        seconds = work()
        cpu = _children_cpu() - own
        time.sleep(_SETTLING_SECONDS)
        return Sample(seconds, cpu, self._hosts_cpu() - hosts)

    def _hosts_cpu(self) -> float:
        """Seconds of CPU that the processes of all hosts have taken, ended ones among them."""
        ticks = 0
        for host in self.bed.hosts:
            for entry in host.path("/proc").iterdir():
                if entry.name.isdigit():
                    try:
                        fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    except OSError:
                        continue
                    ticks += sum(map(int, fields[11:15]))  # proc(5): utime, stime, cutime, cstime
        return ticks / _TICKS

    def bare(self) -> float:
        words = [sys.executable, __file__, "--bare", str(self.bed.identity)]
        addresses = [host.address for host in self.bed.hosts]
        return self._run([*words, str(self.bed.known_hosts), *addresses])

    def forget(self) -> None:
        """Remove what hosts have kept of earlier preflights."""
        for host in self.bed.hosts:
            for path in host.path("/root/.cache/flagscale/hosts").iterdir():
                path.unlink()

    def run(self, *overrides: str) -> float:
        """From the command to the last script's start; the launcher, which would wait for the
        ranks from then on, is ended."""
        began = time.monotonic()
        launcher = subprocess.Popen(
            self.lab.command("action=run", *overrides),
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
        return seconds

    def action(self, name: str) -> float:
        return self._run(self.lab.command(f"action={name}"), cwd=self.lab.root)

    def pdsh(self) -> float:
        arguments = f"-F {self.bed.ssh_config} %h"
        environment = {**self.environment, "PDSH_SSH_ARGS": arguments}
        hosts = ",".join(self.bed.names)
        words = ["pdsh", "-R", "ssh", "-f", str(BARE_THREADS), "-w", hosts, "true"]
        return self._run(words, env=environment)

    def ssh_and_scp(self) -> float:
        began = time.monotonic()
        options = ["-F", str(self.bed.ssh_config)]
        script = self.lab.root / "program.py"
        for name in self.bed.names:
            self._run(["ssh", *options, "-n", name, "mkdir -p /tmp/job"])
            self._run(["scp", *options, "-q", str(script), f"{name}:/tmp/job/script"])
            self._run(["ssh", *options, "-n", "-f", name, "true </dev/null >/dev/null 2>&1 &"])
        return time.monotonic() - began

    def _run(self, words: Sequence[str], **more: Any) -> float:
        began = time.monotonic()
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
        return time.monotonic() - began


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def open_bench(hosts: int) -> Iterator[Bench]:
    sys.path.insert(0, str(PROJECT / "tests"))
    from bed.lab import Bed  # type: ignore[import-not-found]
    from support.ssh_lab import ssh_lab  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory:
        top, shared = Path(directory) / "bed", Path(directory) / "shared"
        top.mkdir()
        shared.mkdir()
        with Bed.open(top, hosts, shared=[shared]) as bed, ssh_lab(bed, shared / "lab") as lab:
            yield Bench(bed, lab)


def measure(hosts: int, rounds: int) -> dict[str, dict[str, float]]:
    """All kinds at one number of hosts, in turn, ``rounds`` times after one that warms up."""
    found: dict[str, Series] = {}
    with open_bench(hosts) as bench:
        kinds: dict[str, Callable[[], float]] = {
            "bare": bench.bare,
            "run": bench.run,
            "query": lambda: bench.action("query"),
            "stop": lambda: bench.action("stop"),
            "run unchecked": lambda: bench.run("experiment.runner.preflight=false"),
            "run cold": bench.run,
        }
        if shutil.which("pdsh"):
            kinds["pdsh"] = bench.pdsh
        for number in range(rounds + 1):
            for kind, work in kinds.items():
                if kind == "run cold":
                    bench.forget()
                sample = bench.measured(work)
                if kind in ("run unchecked", "run cold"):
                    bench.action("stop")
                if number:
                    found.setdefault(kind, Series()).samples.append(sample)
        found["ssh+scp"] = Series([bench.measured(bench.ssh_and_scp)])
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
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    about = machine.facts("flagscale", "paramiko", "hydra-core")
    table: dict[int, dict[str, dict[str, float]]] = {}
    heads = ("median", "min", "max", "cpu", "hosts", "ratio")
    print(f"{'hosts':>5}  {'kind':14} {' '.join(f'{head:>8}' for head in heads)}")
    for hosts in options.hosts:
        table[hosts] = measure(hosts, options.rounds)
        for kind, row in table[hosts].items():
            numbers = " ".join(f"{value:8.2f}" for value in row.values())
            print(f"{hosts:5}  {kind:14} {numbers}", flush=True)
    print(markdown(table))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        record = report(about, table, options.rounds)
        options.output.write_text(json.dumps(record, indent=2) + "\n")
    most = max(table)
    failed = list(failures(table[most])) if most >= LIMITED_HOSTS else []
    for text in failed:
        print(f"on {most} hosts {text}", file=sys.stderr)
    return 4 if failed else 0


def markdown(table: dict[int, dict[str, dict[str, float]]]) -> str:
    """The documentation's table: seconds of ``bare``, and the others as multiples of it."""
    kinds = [kind for kind in table[max(table)] if kind != "bare"]
    lines = [f"| Hosts | bare | {' | '.join(kinds)} |", "|---" * (len(kinds) + 2) + "|"]
    for hosts, row in table.items():
        ratios = " | ".join(f"{row[kind]['ratio_to_bare']:.2f}" for kind in kinds)
        lines.append(f"| {hosts} | {row['bare']['median_s']:.2f} s | {ratios} |")
    return "\n".join(lines)


def failures(row: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """What a number of hosts takes too long for."""
    for kind in LIMITED:
        if row[kind]["ratio_to_bare"] > LIMIT:
            yield f"{kind} misses {LIMIT} times a bare fan-out"
    for other in OTHERS:
        if other in row and row["run"]["median_s"] >= row[other]["median_s"]:
            yield f"run is no faster than {other}"


def report(
    about: dict[str, Any], table: dict[int, dict[str, dict[str, float]]], rounds: int
) -> dict[str, Any]:
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr.strip()
    about["versions"]["ssh"] = ssh
    return {
        **about,
        "hosts_are": "namespaces of this machine, whose cores serve both sides",
        "rounds": rounds,
        "limit": LIMIT,
        "hosts": {str(hosts): row for hosts, row in table.items()},
        "seconds_a_host": {kind: slope(table, kind) for kind in table[max(table)]},
        "projection_1000": projection(table, 1000),
    }


def slope(table: dict[int, dict[str, dict[str, float]]], kind: str) -> dict[str, float]:
    """How a kind grows with the number of hosts: seconds, and CPU seconds of both sides."""
    figures = {}
    for name in ("median_s", "client_cpu_s", "hosts_cpu_s"):
        points = [(hosts, row[kind][name]) for hosts, row in table.items() if kind in row]
        figures[name] = round(line_through(points)[1], 4)
    return figures


if __name__ == "__main__":
    sys.exit(main())
