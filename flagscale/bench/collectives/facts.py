"""What a rank knows about its machine, and the header that rank 0 makes of all of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import torch

from flagscale import __version__
from flagscale.bench.collectives.patterns import Groups
from flagscale.bench.collectives.records import allowed_environment
from flagscale.bench.collectives.spec import Average, BenchSpec
from flagscale.bench.machine import hardware
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry


@dataclass(frozen=True)
class Facts:
    """One rank's part of the header."""

    rank: int
    host: str
    pid: int
    device: str
    place: str
    """The device as torch names it."""
    error: str | None = None
    exit_code: int = 0


def versions() -> dict[str, str]:
    """Of everything whose version a result depends on."""
    own = {"flagscale": __version__, "torch": torch.__version__}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {**own, "python": platform.python_version(), **cuda}


def topology(facts: Sequence[Facts]) -> str:
    """``8 ranks on 2 hosts: a [0-3] 4 x NVIDIA H200, b [4-7] 4 x NVIDIA H200``."""
    hosts: dict[str, list[Facts]] = {}
    for fact in facts:
        hosts.setdefault(fact.host, []).append(fact)
    places = []
    for host, ranks in hosts.items():
        names = {f.device for f in ranks}
        devices = ", ".join(f"{sum(f.device == n for f in ranks)} x {n}" for n in sorted(names))
        places.append(f"{host} [{folded([f.rank for f in ranks])}] {devices}")
    count, many = len(facts), len(hosts)
    return (
        f"{count} rank{'s' if count > 1 else ''} on {many} host{'s' if many > 1 else ''}: "
        + "; ".join(places)
    )


def folded(ranks: Sequence[int]) -> str:
    """``0-3,6`` of 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


_AVERAGES: dict[Average, str] = {
    **{"rank0": "of rank 0", "mean": "mean over ranks"},
    **{"min": "least of ranks", "max": "most of ranks"},
}


def header(
    spec: BenchSpec,
    world: BenchWorld,
    facts: Sequence[Facts],
    backends: Sequence[str],
    groups: Groups,
) -> list[str]:
    """The lines about how a run was measured, without their comment sign."""
    size = "1e9" if spec.output.unit == "GB" else "2**30"
    clock = "time to issue" if spec.cpu_time else "wall clock / iterations"
    loop = spec.iterations
    known = _backend_versions(backends)
    measured = [
        " ".join(filter(None, (backend, known.get(backend), _options(spec, name))))
        for name, backend in zip(spec.backends, backends, strict=True)
    ]
    lines = [
        " ".join(f"{name} {version}" for name, version in versions().items()),
        f"backend {', '.join(measured)}; {topology(facts)}; started by {world.launcher}",
        f"unit {spec.output.unit}/s = {size} bytes a second; time: {clock}, "
        f"{_AVERAGES[spec.average]}; percentiles: of each iteration's slowest rank",
        f"{loop.measured} iterations after {loop.warmup}"
        + (f", {loop.replays} times" if loop.replays else "")
        + (f", {loop.aggregated} operations each" if loop.aggregated > 1 else "")
        + (f"; checked: {spec.check.mode}, seed {spec.check.seed}" if spec.check.mode else ""),
    ]
    if len(groups) > 1 or len(groups[0]) != world.size:
        shown = " ".join(f"[{folded(group)}]" for group in groups[:8])
        lines.append(f"{len(groups)} groups at once: {shown}{' ...' if len(groups) > 8 else ''}")
    return lines


def _options(spec: BenchSpec, name: str) -> str:
    values = spec.options_of(name)
    return f"({', '.join(f'{name}={value}' for name, value in values.items())})" if values else ""


def _backend_versions(backends: Sequence[str]) -> dict[str, str]:
    """Of those that have one of their own."""
    found = {name: registry.backend(name).version() for name in backends}
    return {name: version for name, version in found.items() if version}


def rank_lines(facts: Sequence[Facts]) -> list[str]:
    """nccl-tests' list of devices."""
    return [
        f"Rank {f.rank:>2} Group  0 Pid {f.pid:>6} on {f.host:>10} device {f.place} {f.device}"
        for f in facts
    ]


def about(spec: BenchSpec, facts: Sequence[Facts], backends: Sequence[str]) -> dict[str, Any]:
    """What a JSON file says about how its results came about."""
    loop = spec.iterations
    return {
        "config": {
            "prog": spec.prog,
            "command": list(spec.command),
            "backends": list(backends),
            "options": {found.name: dict(found.values) for found in spec.options},
            "ranks": len(facts),
            "iterations": asdict(loop),
            "average": spec.average,
            "timing": "cpu" if facts[0].place == "cpu" else spec.timing,
            "check": spec.check.mode,
            "seed": spec.check.seed,
            "bandwidth_unit": "1e9 bytes per second",
        },
        "environment": {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {**versions(), **_backend_versions(backends)},
            **hardware(),
            "topology": topology(facts),
            "devices": sorted({f.device for f in facts}),
            "variables": allowed_environment(os.environ),
        },
    }
