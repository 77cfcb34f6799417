"""fsccl over many rounds of groups that come and go, of drawn operations, and of killed ranks."""

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


def soak(result: Path, *words: str, seconds: float) -> list[dict[str, Any]]:
    """Its rounds; fails where one was wrong."""
    command = [sys.executable, str(SOAK), "--seconds", f"{seconds:g}", "--json", str(result)]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=seconds + 120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rounds: list[dict[str, Any]] = json.loads(result.read_text())["rounds"]
    return rounds


def test_ranks_live_and_die(built: None, tmp_path: Path) -> None:
    rounds = soak(tmp_path / "soak.json", "--rounds", "4", "--round", "1", seconds=60)
    assert {one["killed"] is None for one in rounds} == {True, False}, "both kinds are drawn"
    assert sum(one["operations"] for one in rounds) > 80
    assert sum(one["groups"] for one in rounds) > 10


@pytest.mark.slow
def test_a_minute_of_it(built: None, tmp_path: Path) -> None:
    rounds = soak(tmp_path / "soak.json", "--seed", "2", seconds=60)
    assert len(rounds) > 5
