"""Fixture that runs the command line of the benchmark with real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS

COMMAND = (sys.executable, "-m", "flagscale.cli", "bench", "collectives")


@dataclass(frozen=True)
class BenchResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Bench = Callable[..., BenchResult]


@pytest.fixture(scope="session")
def bench() -> Bench:
    """Return a function that runs ``flagscale bench collectives``.

    Its ``launcher`` is the command that starts the benchmark, such as mpirun's.
    """

    def run(
        *arguments: str | Path,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> BenchResult:
        command = [*launcher, *COMMAND, *arguments]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))}
        completed = subprocess.run(
            [str(word) for word in command],
            env={**inherited, "OMP_NUM_THREADS": "1", **(environment or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        return BenchResult(completed.returncode, completed.stdout, completed.stderr)

    return run
