"""Tests of the benchmark in a real Slurm cluster of two hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bed.slurm import Slurm
from support.waiting import PATIENCE_SECONDS, wait_for

COMMAND = (sys.executable, "-m", "flagscale.cli", "bench", "collectives")

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

_SHORT_RUN = "allr -d fp32 -b 1K -e 1K -n 2 -w 1 -c"


def test_in_a_new_allocation_with_a_setup_script(bench: Any, slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "set up $HOME;'.sh"
    script.write_text(f'echo "$(hostname) $SLURM_LOCALID" >>{tmp_path}/setup.txt\ncat\n')
    result = tmp_path / "result.json"
    line = f"{_SHORT_RUN} -r 2 -N 2 -S -u 2 --json {result}"
    completed = bench(
        *line.split(), "--slurm-setup-script", script, environment=slurm.environment(), cwd=tmp_path
    )
    assert completed.code == 0, completed.err
    # The script runs once on each host, before any rank starts.
    assert sorted((tmp_path / "setup.txt").read_text().split("\n")) == ["", "h00 0", "h01 0"]
    assert "# Slurm job " in completed.out
    assert "2 ranks on 2 hosts: h00 [0] 1 x " in completed.out
    assert "started by Slurm" in completed.out
    assert json.loads(result.read_text())["results"][0]["wrong"] == 0
    slurm.wait_until_no_jobs()


def test_in_an_existing_job(bench: Any, slurm: Slurm, tmp_path: Path) -> None:
    def run(line: str) -> Any:
        return bench(*line.split(), environment=slurm.environment(), cwd=tmp_path)

    with slurm.allocation(nodes=2, tasks=2) as job:
        completed = run(f"{_SHORT_RUN} -r 2 -N 2 -S --slurm-job-id {job}")
        assert completed.code == 0, completed.err
        assert f"# Slurm job {job}\n" in completed.out
        # A job of the user is not cancelled.
        assert slurm.list_jobs() == [job]
        completed = run(f"{_SHORT_RUN} -r 3 -N 3 -S --slurm-job-id {job}")
        assert (completed.code, completed.err.count("the job has 2 hosts, but -N requests 3")) == (
            2,
            1,
        )
    slurm.wait_until_no_jobs()
    completed = run(f"allr -r 2 -S --slurm-job-id {job}")
    assert completed.code == 2
    assert f"error: --slurm-job-id {job}: the job " in completed.err
    completed = bench(
        *("allr", "-r", "2", "-S"), environment=slurm.environment(SLURM_JOB_ID=job), cwd=tmp_path
    )
    assert f"error: SLURM_JOB_ID {job}: the job " in completed.err


def test_slurm_errors_and_exit_codes(bench: Any, slurm: Slurm, tmp_path: Path) -> None:
    def run(line: str, *arguments: str | Path, **environment: str) -> Any:
        variables = slurm.environment(**environment)
        return bench(*line.split(), *arguments, environment=variables, cwd=tmp_path)

    completed = run(f"{_SHORT_RUN} -r 3 -N 3 -S --slurm-wait 1")
    assert completed.code == 3
    assert (
        "error: Slurm has not allocated 3 hosts for 3 ranks within 1 s: salloc: error: "
        in completed.err
    )
    script = tmp_path / "setup.sh"
    script.write_text("exit 7\n")
    completed = run(f"{_SHORT_RUN} -r 2 -N 2 -S", "--slurm-setup-script", script)
    assert completed.code == 1
    assert f"error: --slurm-setup-script {script} failed; nothing was measured" in completed.err
    # An error that only the ranks can detect is printed once and keeps its exit code.
    completed = run(f"{_SHORT_RUN} -r 2 -N 2 -S --backend mpi")
    assert completed.code == 2
    assert completed.err.count("'mpi' cannot be used here") == 1
    slurm.wait_until_no_jobs()


def test_interrupted_run_cancels_its_allocation(slurm: Slurm, tmp_path: Path) -> None:
    result = tmp_path / "part.json"
    line = f"allr -r 2 -N 2 -S -d fp32 -b 1K -e 30000 -i 4 -n 3 --json {result}"
    process = subprocess.Popen(
        [*COMMAND, *line.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=slurm.environment(OMP_NUM_THREADS="1"),
    )
    wait_for(result.exists)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_SECONDS) == 128 + signal.SIGTERM
    slurm.wait_until_no_jobs()
    assert not [p for host in slurm.bed.hosts for p in host.find("flagscale.bench")]
