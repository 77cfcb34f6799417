"""Tests of how the processes of a benchmark react to signals and to the end of their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_CLEANUP_PROGRAM = """\
import os, signal, sys
from flagscale.hosts.workers.children import unwind_on_signal
from flagscale.cli_errors import run_command

def work():
    with unwind_on_signal():
        try:
            os.kill(os.getpid(), signal.{first})
        finally:
            os.kill(os.getpid(), signal.{second})
            print("cleaned up")
    return 0

sys.exit(run_command(work))
"""

_PARENT_PROGRAM = """\
import sys
from flagscale.bench.starters.local import run_local_ranks

sleeper = "import os, time; os.write(1, f'{os.getpid():9}'.encode()); time.sleep(600)"
sys.exit(run_local_ranks([sys.executable, "-c", sleeper], 2))
"""


_STOPPED_RANK_PROGRAM = """\
import sys
from flagscale.bench.starters.local import run_local_ranks

rank = "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 19); time.sleep(600)"
sys.exit(run_local_ranks([sys.executable, "-c", rank], 2, stopped_limit_seconds=0.5))
"""


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ("SIGTERM", "SIGTERM", 143),
        ("SIGTERM", "SIGHUP", 143),
        ("SIGHUP", "SIGINT", 129),
        ("SIGINT", "SIGTERM", 130),
    ],
    ids=["twice", "timeout-and-terminal", "terminal-and-ctrl-c", "ctrl-c-and-stop"],
)
def test_second_signal_does_not_interrupt_cleanup(first: str, second: str, code: int) -> None:
    program = _CLEANUP_PROGRAM.format(first=first, second=second)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout, result.stderr, result.returncode) == ("cleaned up\n", "", code)


def test_ignored_signals_stay_ignored() -> None:
    program = _CLEANUP_PROGRAM.format(first="SIGHUP", second="SIGHUP")
    result = subprocess.run(
        ["nohup", sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.stdout, result.returncode) == ("cleaned up\n", 0)


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT_PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        try:
            ranks = [process.stdout.read(9).strip() for _ in range(2)]
            assert all(rank.isdigit() and Path(f"/proc/{rank}").exists() for rank in ranks)
        finally:
            process.send_signal(signal.SIGKILL)
        # End of file arrives once no process holds the write end any more.
        assert process.stdout.read() == ""


def test_stopped_rank_ends_all_ranks() -> None:
    """A rank may be stopped while it starts, which the other ranks cannot detect."""
    result = subprocess.run(
        [sys.executable, "-c", _STOPPED_RANK_PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (1, "error: rank 1 is stopped: all are ended\n")
