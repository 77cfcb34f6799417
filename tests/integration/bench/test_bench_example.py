"""The example of the torch API, run by the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def test_every_operation_of_the_example_is_right(tmp_path: Path) -> None:
    words = ["--config-path", "./examples/comm/conf", "--config-name", "torch_api", "action=test"]
    done = subprocess.run(
        [sys.executable, "run.py", *words, f"experiment.exp_dir={tmp_path / 'out'}"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("FLAGSCALE_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("all_reduce", "reduce_scatter", "all_to_all_v", "scatter", "sendrecv", "objects"):
        assert f"ok: {name} on gloo, 2 ranks" in done.stdout
