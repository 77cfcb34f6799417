"""Soak tests of fsccl: short-lived groups, random operations and killed ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fsccl_ranks import ROOT

pytestmark = pytest.mark.torch
SOAK = ROOT / "tools" / "comm" / "soak.py"


def run_soak_tool(result: Path, *words: str, seconds: float) -> list[dict[str, Any]]:
    """Run the soak tool and return its rounds."""
    command = [sys.executable, str(SOAK), "--seconds", f"{seconds:g}", "--json", str(result)]
    process = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=seconds + 120, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr[-4000:]
    rounds: list[dict[str, Any]] = json.loads(result.read_text())["rounds"]
    return rounds


def test_soak_tool_runs_a_few_rounds(built_extension: None, tmp_path: Path) -> None:
    rounds = run_soak_tool(tmp_path / "soak.json", "--rounds", "4", "--round", "1", seconds=60)
    assert {entry["killed"] is None for entry in rounds} == {True, False}, (
        "expected rounds with and without a killed rank"
    )
    assert sum(entry["operations"] for entry in rounds) > 80
    assert sum(entry["groups"] for entry in rounds) > 10


@pytest.mark.slow
def test_soak_tool_runs_for_a_minute(built_extension: None, tmp_path: Path) -> None:
    rounds = run_soak_tool(tmp_path / "soak.json", "--seed", "2", seconds=60)
    assert len(rounds) > 5
