"""The adapted Megatron on CUDA gives bitwise the same results as the original."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flagscale.patching.sources import SourceOptions
from flagscale.patching.spec import BackendLayout
from flagscale.patching.unpatch import unpatch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "integration" / "patching" / "tiny_training.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_trees(at: Path) -> dict[str, Path]:
    """Return the trees of the original and of the adapted source, both made by the patch tool."""
    by_name = {}
    for name in ("original", "adapted"):
        (at / name / "backends").mkdir(parents=True)
        definition = at / name / "backends" / "Megatron-LM"
        if name == "adapted":
            definition.symlink_to(ROOT / "backends" / "Megatron-LM")
        else:
            definition.mkdir()
            text = (ROOT / "backends" / "Megatron-LM" / "backend.yaml").read_text()
            (definition / "backend.yaml").write_text(text)
        layout = BackendLayout(at / name, "Megatron-LM")
        unpatch(layout, _choose_source(), report_step=lambda line: None)
        by_name[name] = layout.tree
    return by_name


def _choose_source() -> SourceOptions:
    """Return the installed source, or the checkout ``MEGATRON_SOURCE``."""
    checkout = os.environ.get("MEGATRON_SOURCE")
    return SourceOptions(path=Path(checkout)) if checkout else SourceOptions(kind="installed")


def test_training_is_bitwise_the_same(tmp_path: Path) -> None:
    settings = ("plain", "recompute", "bf16", "experts", "experts-alltoall")
    results = {}
    for name, tree in make_trees(tmp_path).items():
        # The original cannot route experts without Transformer Engine, on any device.
        names = settings if name == "adapted" else settings[:3]
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
        process = subprocess.run(
            [sys.executable, *launcher, str(PROGRAM), *names],
            env=os.environ | {"PYTHONPATH": str(tree), "NCCL_NVLS_ENABLE": "0"},
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        (line,) = (x for x in process.stdout.splitlines() if x.startswith("RESULT "))
        results[name] = json.loads(line.removeprefix("RESULT "))
        assert Path(results[name]["tree"]).is_relative_to(tree)
    for setting, run in results["original"]["runs"].items():
        assert results["adapted"]["runs"][setting] == run, setting
