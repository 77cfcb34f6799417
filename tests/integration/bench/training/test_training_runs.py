"""Real ranks that train: the command line, what it keeps, and how it ends when a process dies."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[4]
LINE = (sys.executable, "-m", "flagscale.cli", "bench", "training", "--models", "vgg19")

pytestmark = [pytest.mark.integration, pytest.mark.torch, pytest.mark.compiler]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run of three ranks under three arms printed, and where it kept everything."""
    directory = tmp_path_factory.mktemp("trials")
    words = "-r 3 --device cpu --arms ring,transpose -n 6 --block 3 -w 1 -b 4"
    # Whatever is late on a busy machine, nothing is repeated exactly.
    words += " --arm bounded=fsccl,FSCCL_TAIL=bounded,FSCCL_TAIL_LIMIT=100,FSCCL_SHM=0"
    words += " --json all.json --csv steps.csv --report page.html"
    done = subprocess.run(
        [*LINE, *words.split()],
        env=_environment(),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, directory


def test_arms_alternate_and_reach_equal_losses(run: tuple[str, Path]) -> None:
    out, directory = run
    turns = [line.split(":") for line in out.splitlines() if " s a step" in line]
    rounds = [where.strip("# ") for where, _ in turns]
    assert rounds == ["warm-up"] * 3 + ["round 1"] * 3 + ["round 2"] * 3
    kept = json.loads((directory / "all.json").read_text())
    (session,) = kept["sessions"]
    one, other, bounded = session["arms"]
    # Of each turn of three steps the first settles.
    assert one["steps"]["step"] == [2, 3, 5, 6]
    # Sums are rounded in other orders.
    assert one["steps"]["loss"] == pytest.approx(other["steps"]["loss"], rel=0.01)
    assert "losses of transpose and ring agree" in out
    assert all(arm["replicas_equal"] is True for arm in session["arms"])
    for arm in (one, other, bounded):
        for whole, exposed in zip(arm["steps"]["seconds"], arm["steps"]["exposed"], strict=True):
            assert 0 < exposed < whole
        assert all(arm["steps"]["communication"])


@pytest.mark.parametrize(
    ("arm", "shares"),
    [
        # Of the gradients, what rank 0 sends to each: 2(n - 1)/n to the next, or 2/n to every one.
        pytest.param(0, (0, 4 / 3, 0), id="ring"),
        pytest.param(1, (0, 2 / 3, 2 / 3), id="transpose"),
    ],
)
def test_bytes_between_ranks_match_the_algorithm(
    run: tuple[str, Path], arm: int, shares: tuple[float, ...]
) -> None:
    out, directory = run
    (session,) = json.loads((directory / "all.json").read_text())["sessions"]
    found = session["arms"][arm]
    gradients = 4 * found["parameters"]
    assert sum(found["buckets"]) == gradients
    for rank, row in enumerate(found["sent"]):
        sent = [row[(rank + k) % 3] / (6 * gradients) for k in range(3)]
        assert sent == pytest.approx(shares, rel=0.02, abs=1e-3)
    assert found["counted_by"] == "fsccl"
    assert "ring and transpose: proved different: 50% of bytes" in out


def test_bounded_all_reduce_differs_by_its_datagrams(run: tuple[str, Path]) -> None:
    """They go between the same pairs as those of transpose."""
    out, directory = run
    (session,) = json.loads((directory / "all.json").read_text())["sessions"]
    found = session["arms"][2]
    # Some of the six steps are exact, to learn from; what is lost is sent again.
    of_a_step = 2 / 3 * 4 * found["parameters"]
    for rank, row in enumerate(found["datagrams"]):
        assert row[rank] == 0
        assert all(of_a_step < row[(rank + k) % 3] < 18 * of_a_step for k in (1, 2)), row
    assert "transpose and bounded: proved different" in out


def test_output_files_contain_the_measurements(run: tuple[str, Path]) -> None:
    _, directory = run
    rows = list(csv.DictReader((directory / "steps.csv").read_text().splitlines()))
    assert [row["arm"] for row in rows] == [
        arm for arm in ("ring", "transpose", "bounded") for _ in range(4)
    ]
    page = (directory / "page.html").read_text()
    assert "<h2>VGG-19/8</h2>" in page
    for arm in ("ring", "transpose"):
        assert f"<caption>{arm}: MiB from rank to rank, counted by fsccl" in page
    kept = json.loads((directory / "all.json").read_text())
    assert kept["training"]["steps"] == 6
    assert {"date", "processor", "versions", "command"} <= kept.keys()


def _children(process: subprocess.Popen[Any], what: str) -> list[psutil.Process]:
    """Processes below one whose command line has a word, once there are two."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        below = psutil.Process(process.pid).children(recursive=True)
        found = [one for one in below if any(what in word for word in one.cmdline())]
        if len(found) == 2:
            return found
        time.sleep(0.1)
    raise TimeoutError(what)


def test_killed_process_ends_all_with_an_error(tmp_path: Path) -> None:
    words = "-r 2 --device cpu --arms gloo -n 100000 --block 100 -T 60"
    process = subprocess.Popen(
        [*LINE, *words.split(), "--json", str(tmp_path / "all.json")],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    found = _children(process, "flagscale.bench.training.worker")
    found[0].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "its process failed: SIGKILL" in err
    assert "error: training VGG-19/8, without traffic, failed" in err
    assert "Traceback" not in err
    _, left = psutil.wait_procs(found, timeout=10)
    assert left == []
    assert not (tmp_path / "all.json").exists()
