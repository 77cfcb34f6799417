"""Test of training on hosts with traffic between them.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

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


def _write_traffic_environment(bed: Bed, path: Path) -> None:
    """Write an environment with traffic between all hosts of the bed."""
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
    _write_traffic_environment(bed, tmp_path / "loud.json")
    for host in bed.hosts:
        host.limit_switch_rate("250mbit", "256kb")
    (tmp_path / "hostfile").write_text("h00 slots=1\nh01 slots=1\n")
    arguments = "--hosts-file hostfile --device cpu --models vgg19 --arms gloo -n 3 --block 3 -w 1"
    arguments += " --environment loud.json --json all.json --report page.html"
    arguments += " --env GLOO_SOCKET_IFNAME=eth0"
    completed = subprocess.run(
        [sys.executable, "-m", "flagscale.cli", "bench", "training", *arguments.split()],
        env=bed.environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    record = json.loads((tmp_path / "all.json").read_text())
    without_traffic, with_traffic = record["sessions"]
    assert [without_traffic["setting"], with_traffic["setting"]] == ["none", "loud"]
    assert without_traffic["hosts"] == with_traffic["hosts"] == ["h00", "h01"]
    # In each of 3 steps each rank sends all gradients to the other, and some control data.
    for session in (without_traffic, with_traffic):
        (arm,) = session["arms"]
        assert arm["counted_by"] == "the kernel, by connection"
        for sender, receiver in ((0, 1), (1, 0)):
            assert 0.999 <= arm["sent"][sender][receiver] / (3 * 4 * arm["parameters"]) < 1.1
    # Traffic changes the speed of training but not its losses.
    assert without_traffic["arms"][0]["steps"]["loss"] == with_traffic["arms"][0]["steps"]["loss"]
    assert without_traffic["before"] is None
    assert with_traffic["before"]["ratio"] >= 1
    assert with_traffic["after"]["low"] <= with_traffic["after"]["high"]
    slowdown = [sender["slowdown"] for sender in record["summary"]]
    assert slowdown[0] is None
    assert slowdown[1]["value"] > 0
    assert "time a step by setting" in (tmp_path / "page.html").read_text()
    # No rank or worker remains on a host, and none of their files.
    for host in bed.hosts:
        assert not host.find("flagscale.")
        assert not [*host.local_path("/tmp").glob("flagscale-*")]
