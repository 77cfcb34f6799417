"""Benchmark starting, querying and stopping a run on many hosts over SSH.

    python tools/bench/ssh_launch.py --rounds 7 --output docs/results/ssh_launch.json

The hosts are namespaces of this machine, each with a real sshd (tests/bed). Both sides share this
machine's cores, so the ratios are meaningful, not the seconds. Complete commands are measured, from
their start to the point that a user waits for:

- ``run``: ``action=run`` with its default preflight, until the script of every host has been
  started; ``run cold``: the same without the hosts' caches of an earlier preflight;
  ``run unchecked``: without a preflight;
- ``query`` and ``stop``: until they exit;
- ``bare``: as many hosts with nothing but paramiko, one connection and one command each, in a
  separate Python program. ``run``, ``query`` and ``stop`` may take 1.5 times as long;
- ``pdsh`` (if installed) and ``ssh+scp``: OpenSSH's programs create a directory, copy a file and
  start a command in the background, on one host after another.

Every round measures all of them in turn, so that load on the machine affects them equally;
``ssh+scp``, which takes longest, is measured once. CPU time is reported for both sides. It varies
least with other load. The exit code is 4 if 64 hosts exceed the limit, or if ``run`` is no faster
than pdsh or ssh and scp.
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
MAX_RATIO_TO_BARE = 1.5
MIN_CHECKED_HOSTS = 64
BARE_THREADS = 48
LIMITED_KINDS = ("run", "query", "stop")
COMPARED_TOOLS = ("pdsh", "ssh+scp")
_STARTED_PREFIX = "started on "
# SSH sessions exit shortly after their command. Only then their CPU time is complete.
_SESSION_EXIT_SECONDS = 0.3
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class CommandSample:
    """One measured command."""

    seconds: float
    """Wall-clock time."""
    cpu: float
    """CPU seconds of the command."""
    hosts_cpu: float
    """CPU seconds of all processes on the hosts."""


@dataclass
class SampleSeries:
    """All samples of one kind of command at one number of hosts."""

    samples: list[CommandSample] = field(default_factory=list)

    def ratio(self, base: SampleSeries) -> float:
        """Return the median ratio to another series, round by round.

        Load on the machine affects both samples of a round, so this is steadier than a ratio of
        medians.
        """
        pairs = zip(self.samples, base.samples, strict=False)
        return round(
            statistics.median(
                sample.seconds / base_sample.seconds for sample, base_sample in pairs
            ),
            2,
        )

    def summary(self, base: SampleSeries) -> dict[str, float]:
        seconds = [sample.seconds for sample in self.samples]
        return {
            "median_s": round(statistics.median(seconds), 3),
            "min_s": round(min(seconds), 3),
            "max_s": round(max(seconds), 3),
            "client_cpu_s": round(statistics.median(s.cpu for s in self.samples), 3),
            "hosts_cpu_s": round(statistics.median(s.hosts_cpu for s in self.samples), 2),
            "ratio_to_bare": self.ratio(base),
        }


def connect_bare(identity: str, known_hosts: str, addresses: Sequence[str]) -> None:
    """Open one connection and run one command per host: the minimum cost of SSH itself."""
    import paramiko

    keys = paramiko.HostKeys(known_hosts)
    key = paramiko.Ed25519Key.from_private_key_file(identity)

    def run_true(address: str) -> int:
        client = paramiko.SSHClient()
        client.get_host_keys().update(keys)
        client.connect(
            address, username="root", pkey=key, look_for_keys=False, allow_agent=False, timeout=30
        )
        with client:
            _, stdout, _ = client.exec_command("true")
            return int(stdout.channel.recv_exit_status())

    with ThreadPoolExecutor(min(BARE_THREADS, len(addresses))) as pool:
        if any(pool.map(run_true, addresses)):
            raise SystemExit("a host's `true` failed")


class SshLaunchBench:
    """Benchmarked commands on one set of test hosts.

    The job waits in ``before_start``, so that the launcher is measured, not 64 training programs on
    this machine's cores.
    """

    def __init__(self, bed: Any, lab: Any) -> None:
        self.bed = bed
        self.lab = lab
        self.environment = bed.environment()
        lab.configure(cmds={"before_start": "sleep 3600"})

    def measure(self, command: Callable[[], float]) -> CommandSample:
        """Measure ``command``, which returns its wall-clock seconds."""
        hosts_before, client_before = self._hosts_cpu(), _children_cpu()
        seconds = command()
        cpu = _children_cpu() - client_before
        time.sleep(_SESSION_EXIT_SECONDS)
        return CommandSample(seconds, cpu, self._hosts_cpu() - hosts_before)

    def _hosts_cpu(self) -> float:
        """Return the CPU seconds used by all processes of the hosts, including processes that have
        exited.
        """
        ticks = 0
        for host in self.bed.hosts:
            for entry in host.local_path("/proc").iterdir():
                if entry.name.isdigit():
                    try:
                        fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    except OSError:
                        continue
                    ticks += sum(map(int, fields[11:15]))  # proc(5): utime, stime, cutime, cstime
        return ticks / _TICKS_PER_SECOND

    def time_bare(self) -> float:
        command = [sys.executable, __file__, "--bare", str(self.bed.identity)]
        addresses = [host.address for host in self.bed.hosts]
        return self._time_command([*command, str(self.bed.known_hosts), *addresses])

    def clear_preflight_caches(self) -> None:
        """Remove the hosts' caches of earlier preflights."""
        for host in self.bed.hosts:
            for path in host.local_path("/root/.cache/flagscale/hosts").iterdir():
                path.unlink()

    def time_start(self, *overrides: str) -> float:
        """Return the seconds from the command until the last script has started.

        The launcher, which would then wait for the ranks, is killed.
        """
        start = time.monotonic()
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
        log = ""
        for line in launcher.stderr or ():
            log += line
            if line.startswith(_STARTED_PREFIX):
                break
        else:
            raise SystemExit(f"the run did not start:\n{log}")
        seconds = time.monotonic() - start
        watchdog.cancel()
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        return seconds

    def time_action(self, name: str) -> float:
        return self._time_command(self.lab.command(f"action={name}"), cwd=self.lab.root)

    def time_pdsh(self) -> float:
        arguments = f"-F {self.bed.ssh_config} %h"
        environment = {**self.environment, "PDSH_SSH_ARGS": arguments}
        hosts = ",".join(self.bed.names)
        command = ["pdsh", "-R", "ssh", "-f", str(BARE_THREADS), "-w", hosts, "true"]
        return self._time_command(command, env=environment)

    def time_ssh_and_scp(self) -> float:
        start = time.monotonic()
        options = ["-F", str(self.bed.ssh_config)]
        script = self.lab.root / "program.py"
        for name in self.bed.names:
            self._time_command(["ssh", *options, "-n", name, "mkdir -p /tmp/job"])
            self._time_command(["scp", *options, "-q", str(script), f"{name}:/tmp/job/script"])
            self._time_command(
                ["ssh", *options, "-n", "-f", name, "true </dev/null >/dev/null 2>&1 &"]
            )
        return time.monotonic() - start

    def _time_command(self, command: Sequence[str], **options: Any) -> float:
        start = time.monotonic()
        process = subprocess.run(
            command,
            env=options.pop("env", self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            **options,
        )
        if process.returncode != 0:
            raise SystemExit(f"{command[:3]} ended with {process.returncode}\n{process.stderr}")
        return time.monotonic() - start


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def open_bench(hosts: int) -> Iterator[SshLaunchBench]:
    sys.path.insert(0, str(PROJECT / "tests"))
    from bed.lab import Bed  # type: ignore[import-not-found]
    from support.ssh_lab import ssh_lab  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory:
        bed_directory, shared_directory = Path(directory) / "bed", Path(directory) / "shared"
        bed_directory.mkdir()
        shared_directory.mkdir()
        with (
            Bed.open(bed_directory, hosts, shared=[shared_directory]) as bed,
            ssh_lab(bed, shared_directory / "lab") as lab,
        ):
            yield SshLaunchBench(bed, lab)


def measure_hosts(hosts: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measure all kinds of commands in turn, ``rounds`` times after one warm-up round."""
    series_by_kind: dict[str, SampleSeries] = {}
    with open_bench(hosts) as bench:
        kinds: dict[str, Callable[[], float]] = {
            "bare": bench.time_bare,
            "run": bench.time_start,
            "query": lambda: bench.time_action("query"),
            "stop": lambda: bench.time_action("stop"),
            "run unchecked": lambda: bench.time_start("experiment.runner.preflight=false"),
            "run cold": bench.time_start,
        }
        if shutil.which("pdsh"):
            kinds["pdsh"] = bench.time_pdsh
        for round_number in range(rounds + 1):
            for kind, command in kinds.items():
                if kind == "run cold":
                    bench.clear_preflight_caches()
                sample = bench.measure(command)
                if kind in ("run unchecked", "run cold"):
                    bench.time_action("stop")
                if round_number:
                    series_by_kind.setdefault(kind, SampleSeries()).samples.append(sample)
        series_by_kind["ssh+scp"] = SampleSeries([bench.measure(bench.time_ssh_and_scp)])
    return {kind: series.summary(series_by_kind["bare"]) for kind, series in series_by_kind.items()}


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the intercept and slope of the least-squares line."""
    host_counts, values = zip(*points, strict=True)
    slope = statistics.linear_regression(host_counts, values).slope if len(points) > 1 else 0.0
    return statistics.mean(values) - slope * statistics.mean(host_counts), slope


def project_medians(table: dict[int, dict[str, dict[str, float]]], hosts: int) -> dict[str, float]:
    """Extrapolate the measured medians to ``hosts`` hosts by a least-squares line."""
    medians = {}
    for kind in table[max(table)]:
        points = [(n, row[kind]["median_s"]) for n, row in table.items() if kind in row]
        intercept, slope = fit_line(points)
        medians[kind] = round(intercept + slope * hosts, 1)
    return medians


def main() -> int:
    if sys.argv[1:2] == ["--bare"]:
        connect_bare(sys.argv[2], sys.argv[3], sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--hosts",
        type=int,
        nargs="+",
        default=[1, 4, 16, 64],
        help="numbers of hosts (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    machine_facts = machine.describe_machine("flagscale", "paramiko", "hydra-core")
    table: dict[int, dict[str, dict[str, float]]] = {}
    headings = ("median", "min", "max", "cpu", "hosts", "ratio")
    print(f"{'hosts':>5}  {'kind':14} {' '.join(f'{head:>8}' for head in headings)}")
    for hosts in options.hosts:
        table[hosts] = measure_hosts(hosts, options.rounds)
        for kind, row in table[hosts].items():
            numbers = " ".join(f"{value:8.2f}" for value in row.values())
            print(f"{hosts:5}  {kind:14} {numbers}", flush=True)
    print(format_markdown(table))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        record = build_record(machine_facts, table, options.rounds)
        options.output.write_text(json.dumps(record, indent=2) + "\n")
    largest = max(table)
    exceeded = list(check_limits(table[largest])) if largest >= MIN_CHECKED_HOSTS else []
    for message in exceeded:
        print(f"on {largest} hosts {message}", file=sys.stderr)
    return 4 if exceeded else 0


def format_markdown(table: dict[int, dict[str, dict[str, float]]]) -> str:
    """Format the documentation's table: seconds of ``bare``, and all other kinds as multiples of
    it.
    """
    kinds = [kind for kind in table[max(table)] if kind != "bare"]
    lines = [f"| Hosts | bare | {' | '.join(kinds)} |", "|---" * (len(kinds) + 2) + "|"]
    for hosts, row in table.items():
        ratios = " | ".join(f"{row[kind]['ratio_to_bare']:.2f}" for kind in kinds)
        lines.append(f"| {hosts} | {row['bare']['median_s']:.2f} s | {ratios} |")
    return "\n".join(lines)


def check_limits(row: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield a message for each limit that a number of hosts exceeds."""
    for kind in LIMITED_KINDS:
        if row[kind]["ratio_to_bare"] > MAX_RATIO_TO_BARE:
            yield f"{kind} misses {MAX_RATIO_TO_BARE} times a bare fan-out"
    for tool in COMPARED_TOOLS:
        if tool in row and row["run"]["median_s"] >= row[tool]["median_s"]:
            yield f"run is no faster than {tool}"


def build_record(
    machine_facts: dict[str, Any], table: dict[int, dict[str, dict[str, float]]], rounds: int
) -> dict[str, Any]:
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr.strip()
    machine_facts["versions"]["ssh"] = ssh
    return {
        **machine_facts,
        "hosts_are": "namespaces of this machine, whose cores serve both sides",
        "rounds": rounds,
        "limit": MAX_RATIO_TO_BARE,
        "hosts": {str(hosts): row for hosts, row in table.items()},
        "seconds_a_host": {kind: fit_slopes(table, kind) for kind in table[max(table)]},
        "projection_1000": project_medians(table, 1000),
    }


def fit_slopes(table: dict[int, dict[str, dict[str, float]]], kind: str) -> dict[str, float]:
    """Fit how wall-clock and CPU seconds of a kind of command grow per host."""
    slopes = {}
    for name in ("median_s", "client_cpu_s", "hosts_cpu_s"):
        points = [(hosts, row[kind][name]) for hosts, row in table.items() if kind in row]
        slopes[name] = round(fit_line(points)[1], 4)
    return slopes


if __name__ == "__main__":
    sys.exit(main())
