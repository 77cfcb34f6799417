"""Tests of training on real ranks: the command line, its files, and a process that dies."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import PATIENCE_SECONDS, wait_for

ROOT = Path(__file__).resolve().parents[4]
COMMAND = (sys.executable, "-m", "flagscale.cli", "bench", "training", "--models", "vgg19")

pytestmark = [pytest.mark.integration, pytest.mark.torch, pytest.mark.compiler]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Train on three ranks under three arms; return the output and the directory of the files."""
    directory = tmp_path_factory.mktemp("trials")
    arguments = "-r 3 --device cpu --arms ring,transpose -n 6 --block 3 -w 1 -b 4"
    # With this limit no step is repeated exactly, however late data is on a busy machine.
    arguments += " --arm bounded=fsccl,FSCCL_TAIL=bounded,FSCCL_TAIL_LIMIT=100,FSCCL_SHM=0"
    arguments += " --json all.json --csv steps.csv --report page.html"
    completed = subprocess.run(
        [*COMMAND, *arguments.split()],
        env=_environment(),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout, directory


def test_arms_alternate_and_reach_equal_losses(run: tuple[str, Path]) -> None:
    out, directory = run
    turns = [line.split(":") for line in out.splitlines() if " s a step" in line]
    rounds = [label.strip("# ") for label, _ in turns]
    assert rounds == ["warm-up"] * 3 + ["round 1"] * 3 + ["round 2"] * 3
    record = json.loads((directory / "all.json").read_text())
    (session,) = record["sessions"]
    ring, transpose, bounded = session["arms"]
    # The first of the three steps of each turn settles.
    assert ring["steps"]["step"] == [2, 3, 5, 6]
    # The algorithms add in different orders, so rounding differs.
    assert ring["steps"]["loss"] == pytest.approx(transpose["steps"]["loss"], rel=0.01)
    assert "losses of transpose and ring agree" in out
    assert all(arm["replicas_equal"] is True for arm in session["arms"])
    for arm in (ring, transpose, bounded):
        for seconds, exposed in zip(arm["steps"]["seconds"], arm["steps"]["exposed"], strict=True):
            assert 0 < exposed < seconds
        assert all(arm["steps"]["communication"])


@pytest.mark.parametrize(
    ("arm", "shares"),
    [
        # The share of the gradients that rank 0 sends to each rank: 2(n - 1)/n to the next
        # rank with ring, 2/n to every other rank with transpose.
        pytest.param(0, (0, 4 / 3, 0), id="ring"),
        pytest.param(1, (0, 2 / 3, 2 / 3), id="transpose"),
    ],
)
def test_bytes_between_ranks_match_the_algorithm(
    run: tuple[str, Path], arm: int, shares: tuple[float, ...]
) -> None:
    out, directory = run
    (session,) = json.loads((directory / "all.json").read_text())["sessions"]
    arm_record = session["arms"][arm]
    gradients = 4 * arm_record["parameters"]
    assert sum(arm_record["buckets"]) == gradients
    for rank, row in enumerate(arm_record["sent"]):
        sent = [row[(rank + k) % 3] / (6 * gradients) for k in range(3)]
        assert sent == pytest.approx(shares, rel=0.02, abs=1e-3)
    assert arm_record["counted_by"] == "fsccl"
    assert "ring and transpose: proved different: 50% of bytes" in out


def test_bounded_all_reduce_differs_by_its_datagrams(run: tuple[str, Path]) -> None:
    """Test that datagrams are counted, between the same pairs of ranks as with transpose."""
    out, directory = run
    (session,) = json.loads((directory / "all.json").read_text())["sessions"]
    arm_record = session["arms"][2]
    # Some of the six steps are exact, to learn the limits; lost data is sent again.
    step_bytes = 2 / 3 * 4 * arm_record["parameters"]
    for rank, row in enumerate(arm_record["datagrams"]):
        assert row[rank] == 0
        assert all(step_bytes < row[(rank + k) % 3] < 18 * step_bytes for k in (1, 2)), row
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
    record = json.loads((directory / "all.json").read_text())
    assert record["training"]["steps"] == 6
    assert {"date", "processor", "versions", "command"} <= record.keys()


def wait_for_workers(process: subprocess.Popen[Any], module: str) -> list[psutil.Process]:
    """Wait until ``process`` has two descendants that run ``module``, and return them."""

    def find_workers() -> list[psutil.Process]:
        workers = []
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if any(module in word for word in descendant.cmdline()):
                    workers.append(descendant)
        return workers if len(workers) == 2 else []

    workers: list[psutil.Process] = wait_for(find_workers, module)
    return workers


def test_killed_worker_ends_the_run_with_an_error(tmp_path: Path) -> None:
    arguments = "-r 2 --device cpu --arms gloo -n 100000 --block 100 -T 60"
    process = subprocess.Popen(
        [*COMMAND, *arguments.split(), "--json", str(tmp_path / "all.json")],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = wait_for_workers(process, "flagscale.bench.training.worker")
    workers[0].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "its process failed: SIGKILL" in err
    assert "error: training VGG-19/8, without traffic, failed" in err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []
    assert not (tmp_path / "all.json").exists()
