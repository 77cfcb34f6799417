"""Tests of the benchmarks of group creation and of backend agreement, with real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "flagscale.cli", "bench")

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def _run(*arguments: str | Path) -> str:
    completed = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.slow
def test_variants_alternate_in_fresh_processes(tmp_path: Path) -> None:
    result = tmp_path / "groups.json"
    out = _run(
        *("groups", "-r", "2", "--device", "cpu", "--repeats", "1", "--groups", "3"),
        *("--json", result),
    )
    assert "# bound: left out, only accelerators can be bound" in out
    assert "3 groups, warm against cold (the first communicator alone)" in out
    rows = json.loads(result.read_text())["results"]
    assert [(row["arm"], row["groups"]) for row in rows] == [("cold", 3), ("warm", 3)]
    assert all(row["samples"][0]["first"] > 0 for row in rows)


def test_agreement_runs_on_a_cpu(tmp_path: Path) -> None:
    result = tmp_path / "agreement.json"
    line = "-r 2 --device cpu --operations allr,allg,bcast -b 1K -e 1K -n 2 -w 1 --rounds 2"
    # The limit is so high that the times do not matter.
    out = _run("agreement", *line.split(), "--limit", "1e9", "--json", result)
    agreement = json.loads(result.read_text())
    assert [row["operation"] for row in agreement["rows"]] == [
        "all_reduce",
        "all_gather",
        "broadcast",
    ]
    assert all(row["definition"] == pytest.approx(1) for row in agreement["rows"])
    assert agreement["text"] in out
