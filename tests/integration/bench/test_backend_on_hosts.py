"""Tests of backends on hosts: the preflight finds one that is missing; the example runs.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bed.lab import Bed

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.integration, pytest.mark.torch]

_FAST_BACKEND = """\
from flagscale.comm.base import CommBackend
class Fast(CommBackend):
    name, summary, devices = "?", "a quick one", ("cpu", "cuda")
    def explain_unavailable(self, device): return None
"""


def _launch(bed: Bed, directory: Path, *arguments: str, **environment: str) -> Any:
    """Run the example of the torch API on two hosts."""
    (directory / "hostfile").write_text("h00 slots=1\nh01 slots=1\n")
    runner_settings = {
        **{"nnodes": 2, "nproc_per_node": 1, "hostfile": directory / "hostfile"},
        "ssh_config": bed.ssh_config,
    }
    words = ["--config-path", "./examples/comm/conf", "--config-name", "torch_api", *arguments]
    words += [f"experiment.runner.{name}={value}" for name, value in runner_settings.items()]
    return subprocess.run(
        [sys.executable, "run.py", *words, f"experiment.exp_dir={directory / 'out'}"],
        cwd=ROOT,
        env=bed.environment(COLUMNS="300", **environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_host_without_the_backend_is_named(bed: Bed, tmp_path: Path) -> None:
    package_metadata = tmp_path / "site" / "fastlib-1.0.dist-info"
    package_metadata.mkdir(parents=True)
    (package_metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fastlib\nVersion: 1.0\n"
    )
    (package_metadata / "entry_points.txt").write_text(
        "[flagscale.comm_backends]\nfast = fastlib:Fast\n"
    )
    (package_metadata.parent / "fastlib.py").write_text(_FAST_BACKEND)
    words = ["action=check", "train.system.distributed_backend=fast"]
    words += [f"++experiment.envs.node_specific.h00.PYTHONPATH={package_metadata.parent}"]
    completed = _launch(bed, tmp_path, *words, PYTHONPATH=str(package_metadata.parent))
    assert completed.returncode == 2, completed.stdout + completed.stderr
    rows = {}
    for line in completed.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if cells[0] == "communication":
            rows[cells[1]] = cells[2:]
    assert rows["h00"] == ["ok", "fast"]
    assert rows["h01"][0] == "FAILS"
    message = "train.system.distributed_backend: 'fast' is not a known backend"
    assert message in rows["h01"][1]


@pytest.mark.slow
def test_example_checks_every_operation_on_two_hosts(bed: Bed, tmp_path: Path) -> None:
    option = "train.system.comm.socket_ifname=eth0"
    words = ["action=test", "train.system.distributed_backend=gloo", option]
    completed = _launch(bed, tmp_path, *words)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.count("ok: ") == 13
    assert "ok: permute on gloo, 2 ranks" in completed.stdout
