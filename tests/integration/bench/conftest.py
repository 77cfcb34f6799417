"""Running the real command with real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "flagscale.cli", "bench", "collectives")


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str


Bench = Callable[..., Done]


@pytest.fixture(scope="session")
def bench() -> Bench:
    """Run the benchmark's command line, under a launcher's words where given."""

    def run(
        *words: str | Path,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Done:
        command = [*launcher, *COMMAND, *words]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))}
        done = subprocess.run(
            [str(word) for word in command],
            env={**clean, "OMP_NUM_THREADS": "1", **(environment or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
