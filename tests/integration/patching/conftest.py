"""Megatron adapted once for all tests here, and a way to run programs on it."""

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


def project(at: Path) -> Path:
    """A project root that holds only Megatron's definition."""
    (at / "backends").mkdir(parents=True)
    (at / "backends" / "Megatron-LM").symlink_to(ROOT / "backends" / "Megatron-LM")
    return at


def tool(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of the patch tools as a user does."""
    command = [sys.executable, str(ROOT / "tools" / "patch" / f"{name}.py"), *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron as the tool adapts it."""
    root = project(tmp_path_factory.mktemp("project"))
    done = tool("unpatch", "--root", str(root), "--source", "installed")
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "third_party" / "Megatron-LM"


def python(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
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
    """Train the tiny model in some settings on some ranks; returns what the last rank printed."""

    def run(ranks: int, *settings: str) -> dict[str, Any]:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
        done = python(tree, *launcher, str(PROGRAM), *settings)
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT "))
        result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
        assert Path(result["tree"]).is_relative_to(tree)
        return result

    return run
