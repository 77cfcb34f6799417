"""On CUDA the adapted Megatron does, bit by bit, what the original does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flagscale.patching.sources import Choice
from flagscale.patching.spec import Layout
from flagscale.patching.unpatch import unpatch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "integration" / "patching" / "tiny_training.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trees(at: Path) -> dict[str, Path]:
    """The original source and the adapted one, both made by the tool."""
    made = {}
    for name in ("original", "adapted"):
        (at / name / "backends").mkdir(parents=True)
        definition = at / name / "backends" / "Megatron-LM"
        if name == "adapted":
            definition.symlink_to(ROOT / "backends" / "Megatron-LM")
        else:
            definition.mkdir()
            text = (ROOT / "backends" / "Megatron-LM" / "backend.yaml").read_text()
            (definition / "backend.yaml").write_text(text)
        layout = Layout(at / name, "Megatron-LM")
        unpatch(layout, _source(), say=lambda line: None)
        made[name] = layout.tree
    return made


def _source() -> Choice:
    """What is installed, or the checkout that ``MEGATRON_SOURCE`` names."""
    given = os.environ.get("MEGATRON_SOURCE")
    return Choice(path=Path(given)) if given else Choice(kind="installed")


def test_training_is_bitwise_the_same(tmp_path: Path) -> None:
    settings = ("plain", "recompute", "bf16", "experts", "experts-alltoall")
    results = {}
    for name, tree in trees(tmp_path).items():
        # The original cannot route experts without Transformer Engine, on any device.
        names = settings if name == "adapted" else settings[:3]
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
        done = subprocess.run(
            [sys.executable, *launcher, str(PROGRAM), *names],
            env=os.environ | {"PYTHONPATH": str(tree), "NCCL_NVLS_ENABLE": "0"},
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT "))
        results[name] = json.loads(line.removeprefix("RESULT "))
        assert Path(results[name]["tree"]).is_relative_to(tree)
    for setting, run in results["original"]["runs"].items():
        assert results["adapted"]["runs"][setting] == run, setting
