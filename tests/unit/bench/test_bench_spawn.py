"""What a benchmark's processes do when they are told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_CLEANS_UP = """\
import os, signal, sys
from flagscale.bench.spawn import interruptible
from flagscale.cli_errors import guard

def work():
    with interruptible():
        try:
            os.kill(os.getpid(), signal.{first})
        finally:
            os.kill(os.getpid(), signal.{second})
            print("cleaned up")
    return 0

sys.exit(guard(work))
"""

_SPAWNS = """\
import sys
from flagscale.bench.spawn import spawn

sleeper = "import os, time; os.write(1, f'{os.getpid():9}'.encode()); time.sleep(600)"
sys.exit(spawn([sys.executable, "-c", sleeper], 2))
"""


_STOPS = """\
import sys
from flagscale.bench.spawn import spawn

rank = "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 19); time.sleep(600)"
sys.exit(spawn([sys.executable, "-c", rank], 2, patience=0.5))
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
def test_a_second_signal_does_not_disturb_the_end(first: str, second: str, code: int) -> None:
    program = _CLEANS_UP.format(first=first, second=second)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("cleaned up\n", "", code)


def test_what_was_started_to_ignore_a_signal_ignores_it() -> None:
    program = _CLEANS_UP.format(first="SIGHUP", second="SIGHUP")
    done = subprocess.run(
        ["nohup", sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("cleaned up\n", 0)


def test_ranks_end_with_what_started_them(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SPAWNS],
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
        # Its end comes when nobody holds the other end any more.
        assert process.stdout.read() == ""


def test_a_rank_that_is_stopped_ends_all() -> None:
    """As one does that is stopped while it starts, of which no other rank can tell."""
    done = subprocess.run(
        [sys.executable, "-c", _STOPS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "error: rank 1 is stopped: all are ended\n")
