"""A backend that one host has and the other lacks, found before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bed.lab import Bed

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.integration, pytest.mark.torch]

_PACKAGE = """\
from flagscale.comm.base import CommBackend
class Fast(CommBackend):
    name, summary, devices = "?", "a stranger's", ("cpu", "cuda")
    def unavailable(self, device): return None
"""


def test_the_host_without_the_backend_is_named(bed: Bed, tmp_path: Path) -> None:
    info = tmp_path / "site" / "fastlib-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastlib\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flagscale.comm_backends]\nfast = fastlib:Fast\n")
    (info.parent / "fastlib.py").write_text(_PACKAGE)
    (tmp_path / "hostfile").write_text("h00 slots=1\nh01 slots=1\n")
    words = ["--config-path", "./examples/comm/conf", "--config-name", "torch_api", "action=check"]
    words += [f"experiment.exp_dir={tmp_path / 'out'}", "experiment.runner.nnodes=2"]
    words += [f"experiment.runner.hostfile={tmp_path / 'hostfile'}"]
    words += [
        "experiment.runner.nproc_per_node=1",
        f"experiment.runner.ssh_config={bed.ssh_config}",
    ]
    words += ["train.system.distributed_backend=fast"]
    words += [f"++experiment.envs.node_specific.h00.PYTHONPATH={info.parent}"]
    done = subprocess.run(
        [sys.executable, "run.py", *words],
        cwd=ROOT,
        env=bed.environment(PYTHONPATH=str(info.parent), COLUMNS="300"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    rows = {}
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if cells[0] == "communication":
            rows[cells[1]] = cells[2:]
    assert rows["h00"] == ["ok", "fast"]
    assert rows["h01"][0] == "FAILS"
    found = "train.system.distributed_backend: 'fast' is not a known backend"
    assert found in rows["h01"][1]
