"""Tests of hardware checks over SSH, before a run and alone.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of one machine, so their real rates
depend on each other. A device type from outside (tests/outside/chip.py) reports the rates that a
file has, through its entry point; all else is real: workers, process groups and pairs of hosts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bed.lab import Bed
from support.health_lab import install_chip
from support.launch_lab import PROJECT
from support.ssh_lab import ssh_lab
from support.waiting import wait_for

from flagscale.launcher.layout import Layout

pytestmark = [pytest.mark.integration, pytest.mark.torch]

CHECK = "demo product"
HEALTHY: Mapping[str, Mapping[str, Any]] = {
    "h00": {"rate": 100}, "h01": {"rate": 101}, "h02": {"rate": 99.5}, "h03": {"rate": 100.5}
}  # fmt: skip


def run_health(bed: Bed, site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(PROJECT)])
    command = [sys.executable, "-c", "from flagscale.cli import main; main()", "health"]
    hosts = ["--hosts", ",".join(bed.names), "--ssh-config", str(bed.ssh_config)]
    return subprocess.run(
        [*command, *hosts, *words],
        cwd=site,
        env=bed.environment(COLUMNS="200", PYTHONPATH=path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.bed(hosts=4)
def test_slow_and_faulty_hosts_are_named(bed: Bed, tmp_path: Path) -> None:
    site = tmp_path / "site"
    slow = {"h02": {"rate": 80}, "h03": {"rate": 100, "fault": "its memory is broken"}}
    install_chip(site, {**HEALTHY, **slow})
    result = run_health(bed, site, "--json", "--page", "health.html")
    record = json.loads(result.stdout)
    assert result.returncode == 4, result.stdout + result.stderr
    # The exchange between hosts is measured, too. On a busy machine it may differ.
    findings = {
        (finding["host"], finding["check"]): finding["text"]
        for finding in record["findings"]
        if finding["severity"] == "sick" and finding["check"] in (CHECK, "device state")
    }
    assert findings == {
        ("h02", CHECK): "Demo device 0: 80 TFLOP/s, 20% below the median of 4 equal ones (100)",
        ("h03", "device state"): "Demo device 0: its memory is broken",
    }
    assert {"h02", "h03"} <= set(record["failing"])
    assert record["passes"] == 2
    assert {len(host["pairs"]) for host in record["hosts"]} == {2}
    assert all(pair["gb_per_second"] for host in record["hosts"] for pair in host["pairs"])
    page = (site / "health.html").read_text(encoding="utf-8")
    assert "80 (-20.0%)" in page and "its memory is broken" in page
    # Nothing of the workers is left.
    wait_for(lambda: not any(host.find("flagscale") for host in bed.hosts), seconds=20)


@pytest.mark.bed(hosts=4)
def test_run_does_not_start_on_a_sick_host(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    install_chip(site, {**HEALTHY, "h01": {"rate": 100, "fault": "its memory is broken"}})
    # The launcher has the package as well, so that the YAML can name the device.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(PROJECT)]))
    with ssh_lab(bed, tmp_path / "lab") as lab:
        lab.configure(
            light=False,
            runner={"health": "quick"},
            envs={"PYTHONPATH": str(site)},
            top={"train": {"system": {"device": "demo"}}},
        )
        result = lab.run_action("run", "experiment.runner.wait_for=none")
        assert result.returncode == 2, result.stdout + result.stderr
        assert "measuring the hardware of h[00-03]" in result.stderr
        assert "device state (h01): Demo device 0: its memory is broken" in result.stderr
        assert not Layout(lab.exp_dir).state.exists()
