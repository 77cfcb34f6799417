"""Count how often one slow host of eight is named, and a healthy one.

    python tools/bench/slow_hosts.py --output docs/results/slow-hosts-cpu.json

The hosts are namespaces of this machine, each with a real sshd (tests/bed), and each with its own
share of the machine's cores, which the kernel enforces (cgroup v1, ``cpu.cfs_quota_us``). A slow
host has 80 % of the others' share.

- ``check``: ``flagscale health --full`` measures the hosts, by turns with one slow host and without
  any. Its windows of 2 s are as much time of a core here as those of the quick check, 0.3 s, are on
  a host with a core of its own.
- ``run``: the hosts train a tiny Llama-3 with one rank each. One host after another is slow until
  the run names it, then no host is slow for as long as the same number of detections takes. Only
  ranks have shares of the cores. The agent of the first host does more work than the others, which
  is little on a host with many cores and much here.

The output is written after each round. The exit code is 4 if a slow host was not named, or a
healthy one was. Needs root.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flagscale.bench import machine
from flagscale.files import write_json

PROJECT = Path(__file__).resolve().parents[2]
_HOSTS = 8
_SLOWED_TO = 0.8
_CORES = 0.16
"""Share of each host in the cores of this machine."""
_PERIOD_MICROSECONDS = 20_000
# Other programs on this machine get what the hosts leave.
_CPU_WEIGHT = 20_000
_CGROUPS = Path("/sys/fs/cgroup/cpu")
_NAMED_SECONDS = 120.0
_POLL_SECONDS = 0.5
_SETTLE_SECONDS = 20.0
"""Time of the first reports, which contain warm-up and in which no straggler is looked for."""


class CpuShares:
    """Shares of hosts in the cores of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    @contextmanager
    def open(cls, bed: Any) -> Iterator[CpuShares]:
        """Give each host of a bed a control group of its own, without a limit."""
        directory = _CGROUPS / f"slow-hosts-{os.getpid()}"
        directory.mkdir()
        (directory / "cpu.shares").write_text(str(_CPU_WEIGHT))
        try:
            for host in bed.hosts:
                (directory / host.name).mkdir()
                for process in host.processes():
                    (directory / host.name / "cgroup.procs").write_text(str(process.pid))
            yield cls(directory)
        finally:
            for group in [*directory.glob("*/"), directory]:
                _remove_group(group)

    def exempt_launchers(self, bed: Any) -> None:
        """Take all processes but those of ranks out of their hosts' limits."""
        group = self._directory / "launchers"
        group.mkdir()
        for host in bed.hosts:
            for process in host.processes():
                if not _is_rank(process.pid):
                    (group / "cgroup.procs").write_text(str(process.pid))

    def limit(self, host: str, fraction: float = 1.0) -> None:
        """Limit a host to a fraction of the share that healthy hosts have."""
        group = self._directory / host
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
        quota = _CORES * _PERIOD_MICROSECONDS * fraction
        (group / "cpu.cfs_quota_us").write_text(str(round(quota)))

    def lift(self, host: str) -> None:
        """Remove the limit of a host."""
        (self._directory / host / "cpu.cfs_quota_us").write_text("-1")


def _is_rank(pid: int) -> bool:
    """Return whether a process is a rank, or a child of one."""
    return b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()


def _remove_group(group: Path) -> None:
    """Move the processes of a control group to the root group, and remove it."""
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # it has ended
                (_CGROUPS / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


def count_in_checks(
    bed: Any, shares: CpuShares, rounds: int, rng: random.Random
) -> Iterator[dict[str, Any]]:
    """Check the hosts by turns with and without a slow one, ``rounds`` times each. Yield the counts
    so far.
    """
    from flagscale.config.schema import Runner
    from flagscale.health.judgement import Severity
    from flagscale.health.session import HealthSession, HealthTarget
    from flagscale.hosts.hostfile import Host
    from flagscale.launcher.runners import endpoints

    runner = Runner(hosts=tuple(bed.names), ssh_config=bed.ssh_config)
    handle = endpoints.make_handle(runner, [Host(name) for name in bed.names])
    targets = [HealthTarget(name, "cpu") for name in bed.names]
    counts = _Counts()
    with endpoints.open_hosts(handle, bed.names) as connections:
        for _ in range(rounds):
            with HealthSession(connections, targets) as session:
                # Without limits, because the start of torch is not what is measured.
                for name in bed.names:
                    shares.lift(name)
                session.start(range(len(targets)))
                for victim in (rng.choice(bed.names), None):
                    for name in bed.names:
                        shares.limit(name, _SLOWED_TO if name == victim else 1.0)
                    judgement = session.measure(full=True).judgement
                    sick = judgement.hosts_with(Severity.SICK)
                    findings = [f"{bed.names[f.host]}: {f.text}" for f in judgement.findings]
                    counts.add(victim, {bed.names[number] for number in sick}, findings)
                    yield counts.to_json()


def count_in_run(
    bed: Any, shares: CpuShares, rounds: int, rng: random.Random
) -> Iterator[dict[str, Any]]:
    """Train on the hosts, and slow one after another; then train as long without a slow one. Yield
    the counts so far.
    """
    from support.ssh_lab import ssh_lab  # type: ignore[import-not-found]
    from support.training_lab import (  # type: ignore[import-not-found]
        LLAMA,
        PROGRAM,
        train_sections,
    )

    counts, durations = _Counts(), list[float]()
    shared = bed.directory.parent / "shared"
    with ssh_lab(bed, shared / "lab") as lab:
        train = train_sections(None, logging={"log_interval": 5})
        train["model"] = {**LLAMA["model"], "global_batch_size": _HOSTS, "train_iters": 1_000_000}
        lab.configure(
            light=False,
            task={"entrypoint": str(PROGRAM)},
            top={"train": train},
            runner={"start_timeout": 240},
        )
        for name in bed.names:
            shares.lift(name)
        result = lab.run_action("run", timeout=300)
        if result.returncode:
            raise SystemExit(f"the run did not start\n{result.stderr}")
        shares.exempt_launchers(bed)
        for name in bed.names:
            shares.limit(name)
        time.sleep(_SETTLE_SECONDS)
        for _ in range(rounds):
            victim = rng.choice(bed.names)
            start = time.time()
            shares.limit(victim, _SLOWED_TO)
            named: set[str] = set()
            while victim not in named and time.time() - start < _NAMED_SECONDS:
                time.sleep(_POLL_SECONDS)
                named |= _named_since(lab, start)
            durations.append(round(time.time() - start, 1))
            counts.add(victim, named, [])
            yield {**counts.to_json(), "seconds": durations}
            shares.limit(victim)
            while _named_now(lab) and time.time() - start < 2 * _NAMED_SECONDS:
                time.sleep(_POLL_SECONDS)
        median = sorted(durations)[len(durations) // 2]
        for _ in range(rounds):
            start = time.time()
            time.sleep(median)
            counts.add(None, _named_since(lab, start), [])
            yield {**counts.to_json(), "seconds": durations}
        lab.run_action("stop", timeout=120)


def _straggler_events(lab: Any) -> list[Any]:
    from support.training_lab import read_events_of_ranks

    return sorted(
        (event for event in read_events_of_ranks(lab) if event.event == "stragglers"),
        key=lambda event: event.time,
    )


def _named_since(lab: Any, start: float) -> set[str]:
    """Return the hosts that the run has named as stragglers since this time."""
    events = [event for event in _straggler_events(lab) if event.time >= start]
    return {str(row["host"]) for event in events for row in event.get("stragglers")}


def _named_now(lab: Any) -> bool:
    events = _straggler_events(lab)
    return bool(events and events[-1].get("stragglers"))


class _Counts:
    """Decisions about slow and about healthy hosts."""

    def __init__(self) -> None:
        self._slow_rounds = self._named = self._false_alarms = self._healthy_rounds = 0
        self._mistakes: list[dict[str, Any]] = []

    def add(self, victim: str | None, named: set[str], findings: list[str]) -> None:
        """Count a round with this slow host, or without one, in which these hosts were named."""
        others = named - {victim}
        self._named += victim in named
        self._slow_rounds += victim is not None
        self._healthy_rounds += victim is None
        self._false_alarms += bool(others)
        if others or (victim is not None and victim not in named):
            self._mistakes.append({"slow": victim, "named": sorted(named), "findings": findings})
        print(f"slow: {victim or 'none'}; named: {', '.join(sorted(named)) or 'none'}", flush=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "slow": self._slow_rounds,
            "named": self._named,
            "healthy_rounds": self._healthy_rounds,
            "false_alarms": self._false_alarms,
            "mistakes": self._mistakes,
        }


_PARTS = {"check": count_in_checks, "run": count_in_run}


def main() -> int:
    """Count, and return 4 if there was a mistake."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--only", choices=_PARTS, help="one of the parts; default: both")
    parser.add_argument("--seed", type=int, default=0, help="of the slow hosts; default: 0")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    sys.path.insert(0, str(PROJECT / "tests"))
    from bed.lab import Bed  # type: ignore[import-not-found]

    record: dict[str, Any] = {
        **machine.describe_machine("flagscale", "torch"),
        "hosts": _HOSTS,
        "cores_per_host": _CORES,
        "slowed_to": _SLOWED_TO,
    }
    for name in [options.only] if options.only else _PARTS:
        rng = random.Random(options.seed)
        with tempfile.TemporaryDirectory() as directory:
            bed_directory, shared = Path(directory) / "bed", Path(directory) / "shared"
            bed_directory.mkdir()
            shared.mkdir()
            with (
                Bed.open(bed_directory, _HOSTS, shared=[shared]) as bed,
                CpuShares.open(bed) as shares,
            ):
                for counts in _PARTS[name](bed, shares, options.rounds, rng):
                    record[name] = counts
                    if options.output:
                        write_json(options.output, record)
    parts = [record[name] for name in _PARTS if name in record]
    return 4 if any(part["mistakes"] for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
