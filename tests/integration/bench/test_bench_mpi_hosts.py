"""Tests of the benchmarks on two hosts, started by a real mpirun over SSH.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bed.lab import Bed
from support.needs import require_program

COMMAND = (sys.executable, "-m", "flagscale.cli", "bench")

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

_SHORT = "allr -d fp32 -b 1K -e 1K -n 2 -w 1 -c"


def _make_mpirun_environment(bed: Bed, directory: Path, name: str) -> dict[str, str]:
    """Return an environment whose ``mpirun`` is the program ``name``."""
    program = require_program("mpi", name)
    (directory / "bin").mkdir()
    wrapper = directory / "bin" / "mpirun"
    wrapper.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    wrapper.chmod(0o755)
    return bed.environment(
        PATH=f"{directory / 'bin'}:{os.environ['PATH']}",
        OMP_NUM_THREADS="1",
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        # The hosts do not know this machine by its name.
        HYDRA_IFACE="br0",
    )


def _run(environment: dict[str, str], directory: Path, *arguments: str | Path) -> str:
    completed = subprocess.run(
        [str(word) for word in arguments],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.parametrize(
    ("name", "launcher"), [("mpirun.openmpi", "OpenMPI"), ("mpirun.mpich", "MPICH")]
)
def test_mpirun_reaches_two_hosts(bed: Bed, tmp_path: Path, name: str, launcher: str) -> None:
    environment = _make_mpirun_environment(bed, tmp_path, name)
    launch_options = [
        "--starter",
        "mpirun",
        "--ssh-config",
        bed.ssh_config,
        "--hosts",
        "h00",
        "h01",
    ]
    line = [
        *_SHORT.split(),
        "-r",
        "2",
        *launch_options,
        "--json",
        "out.json",
        "--mpi-log-dir",
        "logs",
    ]
    out = _run(environment, tmp_path, *COMMAND, "collectives", *line)
    assert "2 ranks on 2 hosts: h00 [0] 1 x " in out
    assert f"started by {launcher}" in out
    assert json.loads((tmp_path / "out.json").read_text())["results"][0]["wrong"] == 0
    logs = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert any("algbw(GB/s)" in path.read_text() for path in logs)


def test_mpich_hosts_command(bed: Bed, tmp_path: Path) -> None:
    """Test that mpirun itself can start the ranks on its hosts."""
    environment = _make_mpirun_environment(bed, tmp_path, "mpirun.mpich")
    environment["HYDRA_LAUNCHER_EXTRA_ARGS"] = f"-F {bed.ssh_config}"
    mpirun = ["mpirun", "-np", "2", "-hosts", "h00:1,h01:1", *COMMAND, "groups"]
    out = _run(environment, tmp_path, *mpirun, "--groups", "2", "--repeats", "1", "--arms", "warm")
    assert "# h00 [0], h01 [1]; started by MPICH" in out
    assert "  warm       2     1  " in out
