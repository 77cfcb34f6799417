"""Fixtures with Megatron adapted once for all tests, and helpers that run programs on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("tiny_training.py")
ONE_RANK = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}
"""The variables that torchrun sets for one rank."""


def make_project(root: Path) -> Path:
    """Create a project root that contains only Megatron's definition."""
    (root / "backends").mkdir(parents=True)
    (root / "backends" / "Megatron-LM").symlink_to(ROOT / "backends" / "Megatron-LM")
    return root


def run_tool(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of the patch tools as a user does."""
    command = [sys.executable, str(ROOT / "tools" / "patch" / f"{name}.py"), *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron as the tool adapts it."""
    root = make_project(tmp_path_factory.mktemp("project"))
    result = run_tool("unpatch", "--root", str(root), "--source", "installed")
    assert result.returncode == 0, result.stdout + result.stderr
    return root / "third_party" / "Megatron-LM"


def run_python(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with ``tree`` first on its path."""
    settings = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.fixture
def train(tree: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that trains the tiny model and returns the results that the last rank
    printed.

    Its arguments are the number of ranks and the names of settings.
    """

    def run(ranks: int, *settings: str) -> dict[str, Any]:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
        if ranks == 1:  # torchrun takes seconds to import torch
            process = run_python(tree, str(PROGRAM), *settings, **ONE_RANK)
        else:
            process = run_python(tree, *launcher, str(PROGRAM), *settings)
        assert process.returncode == 0, process.stderr[-4000:]
        (line,) = (x for x in process.stdout.splitlines() if x.startswith("RESULT "))
        result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
        assert Path(result["tree"]).is_relative_to(tree)
        return result

    return run
