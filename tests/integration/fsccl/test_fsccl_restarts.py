"""Stores that are used again: restarts by torch's elastic agent, repeated initialization in one
process, and files of an earlier run.

``FLAGSCALE_RESTARTS=N`` sets the number of restarts of each job, for more of them by hand.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.fsccl_ranks import ROOT
from support.waiting import PATIENCE_SECONDS

from flagscale.free_port import free_port

pytestmark = [pytest.mark.integration, pytest.mark.torch]
JOB = Path(__file__).with_name("restarting_job.py")
STORES = Path(__file__).with_name("reused_stores.py")
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "FSCCL_DEVICE": "cpu",
    "FSCCL_SOCKET_IFNAME": "lo",
    # torch's store looks up the host name of every client. A name server may not answer.
    "RES_OPTIONS": "timeout:1 attempts:1",
}


def run_programs(
    commands: Sequence[Sequence[str]], directory: Path, limit: float = PATIENCE_SECONDS
) -> list[str]:
    """Run programs concurrently, and return what each has printed.

    Raises:
        AssertionError: a program fails, or takes more than ``limit`` seconds.
    """
    # Files, because nobody would read the pipe of the second program.
    files = [directory / f"output{i}" for i in range(len(commands))]
    programs = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **ENVIRONMENT},
            stdout=file.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command, file in zip(commands, files, strict=True)
    ]
    try:
        for program, file in zip(programs, files, strict=True):
            code = program.wait(limit)
            assert code == 0, f"exit code {code}: {file.read_text()[-4000:]}"
    except subprocess.TimeoutExpired:
        outputs = "\n\n".join(file.read_text()[-4000:] for file in files)
        raise AssertionError(f"no end within {limit:g} s: {outputs}") from None
    finally:
        for program in programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)  # with its ranks
                program.wait()
    return [file.read_text() for file in files]


@pytest.mark.parametrize(
    ("rendezvous", "nodes", "restarts"),
    [
        pytest.param("static", 1, 3, id="static"),
        pytest.param("c10d", 1, 3, id="c10d"),
        pytest.param("c10d", 2, 2, id="c10d-two-nodes", marks=pytest.mark.slow),
    ],
)
def test_job_recovers_from_killed_ranks(
    built_extension: None, tmp_path: Path, rendezvous: str, nodes: int, restarts: int
) -> None:
    restarts = int(os.environ.get("FLAGSCALE_RESTARTS", restarts))
    port = free_port()
    commands = [
        [str(JOB), rendezvous, *map(str, (nodes, node, port, restarts, 1))] for node in range(nodes)
    ]
    for output in run_programs(commands, tmp_path, PATIENCE_SECONDS + 10 * restarts):
        assert output.splitlines()[-1] == "recovered", output[-4000:]


def test_default_group_is_initialized_many_times(built_extension: None, tmp_path: Path) -> None:
    run_programs([[str(STORES), "agent"]], tmp_path)


def test_file_store_of_killed_runs_is_used_again(built_extension: None, tmp_path: Path) -> None:
    run_programs([[str(STORES), "file", str(tmp_path / "store")]], tmp_path)
