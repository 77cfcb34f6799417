"""Reports of the ranks' exit, which look like a crash, are left out of a stopped run's end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.launcher.show.stopped_output import without_torchrun_report

TABLE = """\
Traceback (most recent call last):
  File "/a/torch/distributed/run.py", line 1, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
/a/toy.py FAILED
------------------------------------------------------------
Failures:
[0]:
  rank      : 0 (local_rank: 0)
============================================================
"""
SIGNAL = """\
Traceback (most recent call last):
  File "/a/torch/distributed/run.py", line 1, in <module>
torch.distributed.elastic.multiprocessing.api.SignalException: Process 5 got signal: 15
"""
COMMAND = """\
flagscale: 2 rank(s) of this host failed
Failures:
[0]:
  time      : 2026-11-26T23:42:26
  host      : node1
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 31543)
[1]:
  rank      : 1 (local_rank: 1)

"""
LOG = "W1126 17:45:23.73 72 /a/torch/distributed/elastic/agent/api.py:1] Received 15 death signal\n"
OTHER = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: x\n'


def label(text: str, prefix: str = "node1: ") -> list[str]:
    return [prefix + line for line in text.splitlines()]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        pytest.param(LOG + TABLE, "", id="table"),
        pytest.param(LOG + SIGNAL, "", id="signal"),
        pytest.param(f"{LOG}{TABLE}flagscale: ended\n", "flagscale: ended\n", id="end-of-the-run"),
        pytest.param(f"{COMMAND}flagscale: ended\n", "flagscale: ended\n", id="command"),
        pytest.param(f"Failures:\n{COMMAND}[0]: a\n", "Failures:\n[0]: a\n", id="own-lines"),
        pytest.param(OTHER, OTHER, id="other-traceback"),
        pytest.param(f"{OTHER}{SIGNAL}after\n", f"{OTHER}after\n", id="both"),
        pytest.param(
            "Traceback (most recent call last):\n  cut\n",
            "Traceback (most recent call last):\n  cut\n",
            id="cut",
        ),
    ],
)
def test_report_of_torchrun_is_left_out(text: str, kept: str) -> None:
    assert list(without_torchrun_report(label(text))) == label(kept)


@pytest.mark.parametrize("text", [TABLE, SIGNAL, OTHER, LOG])
def test_lines_of_ranks_are_kept(text: str) -> None:
    lines = label(text, "node1:3: ")
    assert list(without_torchrun_report(lines)) == lines


def test_line_of_a_rank_inside_a_report_is_kept() -> None:
    lines = label(TABLE)
    assert list(without_torchrun_report([*lines[:3], "node1:0: saved", *lines[3:]])) == [
        "node1:0: saved"
    ]


@given(st.lists(st.text(alphabet="abc :=T\n\x1b", max_size=20), max_size=8))
def test_other_lines_are_unchanged(texts: list[str]) -> None:
    assert list(without_torchrun_report(texts)) == texts


PROGRAM = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"


@pytest.mark.torch
@pytest.mark.integration
def test_report_of_a_real_torchrun_is_left_out(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)]
    process = subprocess.Popen(
        [*command, str(tmp_path / "up")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    wait_for((tmp_path / "up").exists)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert "Traceback" in errors
    rest = list(without_torchrun_report(label(errors)))
    assert not any("Traceback" in line or "torch" in line for line in rest)
