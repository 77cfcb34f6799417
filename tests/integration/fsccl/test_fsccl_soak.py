"""Soak tests of fsccl: random operations and groups, ranks that leave or are killed, restarts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fsccl_ranks import MAX_DELAY_SECONDS, ROOT

pytestmark = pytest.mark.torch
SOAK = ROOT / "tools" / "comm" / "soak.py"


def run_soak_tool(result: Path, *words: str, seconds: float) -> list[dict[str, Any]]:
    """Run the soak tool and return its rounds."""
    command = [sys.executable, str(SOAK), "--seconds", f"{seconds:g}", "--json", str(result)]
    command += ["--limit", str(MAX_DELAY_SECONDS)]
    process = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=seconds + 120, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr[-4000:]
    rounds: list[dict[str, Any]] = json.loads(result.read_text())["rounds"]
    return rounds


@pytest.mark.slow
def test_soak_tool_runs_a_few_rounds(built_extension: None, tmp_path: Path) -> None:
    rounds = run_soak_tool(tmp_path / "soak.json", "--rounds", "6", "--round", "0.5", seconds=90)
    kills = [kill for entry in rounds for kill in entry["kills"]]
    assert {kill["is_in_meeting"] for kill in kills} == {True, False}
    assert sum(entry["restarts"] for entry in rounds) == len(kills)
    assert [] in [entry["kills"] for entry in rounds], "expected rounds without a killed rank"
    assert sum(entry["operations"] for entry in rounds) > 80
    assert sum(entry["groups"] for entry in rounds) > 10
    assert sum(entry["leaves"] for entry in rounds) > 5
    assert sum(entry["reinitializations"] for entry in rounds) > 5


@pytest.mark.slow
def test_soak_tool_runs_for_a_minute(built_extension: None, tmp_path: Path) -> None:
    rounds = run_soak_tool(tmp_path / "soak.json", "--seed", "2", seconds=60)
    assert len(rounds) > 5
