"""Test of an experiment from YAML that trains under two arms in turn and resumes each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
COMMAND = (sys.executable, "-m", "flagscale.cli", "bench", "training")
YAML = """
experiment:
  exp_name: tiny
  exp_dir: runs
  task: {type: train}
  runner: {nproc_per_node: 2}
train:
  system: {use_distributed_optimizer: false, num_workers: 0}
  model: {num_layers: 1, hidden_size: 64, num_attention_heads: 4, seq_length: 16, lr: 0.001,
          max_position_embeddings: 16, micro_batch_size: 1, global_batch_size: 4, train_iters: 90,
          lr_decay_style: constant}
  data: {mock_data: true, vocab_size: 1000}
"""

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch, pytest.mark.compiler]


def test_experiment_trains_under_every_arm(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(YAML)
    arguments = "--config-name train --arms ring,tree --steps 6 --block 3 --settle 1"
    completed = subprocess.run(
        [*COMMAND, *arguments.split(), "--json", "all.json", "--report", "page.html"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (session,) = json.loads((tmp_path / "all.json").read_text())["sessions"]
    assert (session["model"]["title"], session["ranks"]) == ("tiny", 2)
    for arm in session["arms"]:
        # There are two turns of three steps, and the first step of each settles.
        # The second turn continues the first one.
        assert arm["steps"]["step"] == [2, 3, 5, 6]
        assert arm["steps"]["round"] == [1, 1, 2, 2]
        assert arm["settling"]["step"] == [1, 4]
        assert all(arm["steps"]["seconds"])
    ring_losses, tree_losses = (arm["steps"]["loss"] for arm in session["arms"])
    assert ring_losses == pytest.approx(tree_losses, rel=1e-4)
    assert ring_losses[-1] < ring_losses[0]
    assert "tiny, none: losses of tree and ring agree" in completed.stdout
    kept_line = next(line for line in completed.stdout.splitlines() if "runs are kept in" in line)
    directory = Path(kept_line.rsplit(" ", 1)[1], "none", "ring")
    assert sorted(path.name for path in (directory / "checkpoints").glob("iter_*"))
    assert "tiny" in (tmp_path / "page.html").read_text()
