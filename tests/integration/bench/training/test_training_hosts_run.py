"""Training on hosts, with traffic between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bed.lab import Bed

from flagscale.bench.traffic import environment
from flagscale.bench.traffic.spec import Environment, Pattern, Probe, TrafficHost, flows_between

ROOT = Path(__file__).resolve().parents[4]

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]


def _loud(bed: Bed, path: Path) -> None:
    """Keep an environment of traffic between all hosts of the bed."""
    environment.write_environment(
        Environment(
            hosts=tuple(TrafficHost(host.name, host.address) for host in bed.hosts),
            flows=flows_between(len(bed.hosts), "all"),
            pattern=Pattern(rate=250e6, load=50e6, burst=64 << 10),
            probe=Probe("echo", 4096),
        ),
        path,
    )


def test_models_train_on_hosts_under_traffic(bed: Bed, tmp_path: Path) -> None:
    _loud(bed, tmp_path / "loud.json")
    for host in bed.hosts:
        host.bottleneck("250mbit", "256kb")
    (tmp_path / "hostfile").write_text("h00 slots=1\nh01 slots=1\n")
    line = "--hosts-file hostfile --device cpu --models vgg19 --arms gloo -n 3 --block 3 -w 1"
    line += " --environment loud.json --json all.json --report page.html"
    line += " --env GLOO_SOCKET_IFNAME=eth0"
    done = subprocess.run(
        [sys.executable, "-m", "flagscale.cli", "bench", "training", *line.split()],
        env=bed.environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "all.json").read_text())
    quiet, loud = kept["sessions"]
    assert [quiet["setting"], loud["setting"]] == ["none", "loud"]
    assert quiet["hosts"] == loud["hosts"] == ["h00", "h01"]
    # Of two ranks each sends the other all gradients once in each of 3 steps, and some control.
    for session in (quiet, loud):
        (arm,) = session["arms"]
        assert arm["counted_by"] == "the kernel, by connection"
        for row, other in ((0, 1), (1, 0)):
            assert 0.999 <= arm["sent"][row][other] / (3 * 4 * arm["parameters"]) < 1.1
    # Traffic makes it slower, and teaches nothing.
    assert quiet["arms"][0]["steps"]["loss"] == loud["arms"][0]["steps"]["loss"]
    assert quiet["before"] is None
    assert loud["before"]["ratio"] >= 1
    assert loud["after"]["low"] <= loud["after"]["high"]
    slowdown = [row["slowdown"] for row in kept["summary"]]
    assert slowdown[0] is None
    assert slowdown[1]["value"] > 0
    assert "time a step by setting" in (tmp_path / "page.html").read_text()
    # Neither ranks nor flows are left, and nothing of theirs on disk.
    for host in bed.hosts:
        assert not host.find("flagscale.")
        assert not [*host.path("/tmp").glob("flagscale-*")]
