"""Test of the example of the torch API, run by the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def test_example_checks_every_operation(tmp_path: Path) -> None:
    arguments = [
        "--config-path",
        "./examples/comm/conf",
        "--config-name",
        "torch_api",
        "action=test",
    ]
    completed = subprocess.run(
        [sys.executable, "run.py", *arguments, f"experiment.exp_dir={tmp_path / 'out'}"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("FLAGSCALE_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    for name in ("all_reduce", "reduce_scatter", "all_to_all_v", "scatter", "sendrecv", "objects"):
        assert f"ok: {name} on gloo, 2 ranks" in completed.stdout
