"""Tests of output: control characters of other programs, and streams that fail now and then."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE_SECONDS

from flagscale.output_streams import escape_controls

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("loss\t1.0\nnext", "loss\t1.0\nnext", id="lines"),
        pytest.param("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m", id="colors"),
        pytest.param("10 %\r20 %", "10 %\r20 %", id="progress-bar"),
        pytest.param("\x1b]0;title\x07", "\\x1b]0;title\\x07", id="title"),
        pytest.param("\x1b[2J\x1b[1;1H", "\\x1b[2J\\x1b[1;1H", id="cursor"),
        pytest.param("\x1b[31", "\\x1b[31", id="unfinished"),
        pytest.param("\x9b31m \x85", "\\x9b31m \\x85", id="8-bit"),
        pytest.param("a\x08b\x7f", "a\\x08b\\x7f", id="backspace"),
        pytest.param("abc\u202edef", "abc\\u202edef", id="right-to-left"),
        pytest.param("größe 模型 🦙", "größe 模型 🦙", id="letters"),
    ],
)
def test_controls_of_a_terminal_are_escaped(text: str, expected: str) -> None:
    assert escape_controls(text) == expected


@given(st.text())
def test_nothing_but_colors_begins_with_escape(text: str) -> None:
    escaped = escape_controls(text)
    without_colors = re.sub(r"\x1b\[[0-9;:]*m", "", escaped)
    assert re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", without_colors) is None
    assert escape_controls(escaped) == escaped


FULL_FOR_A_WHILE = """
import os, sys
from flagscale.cli_errors import run_command
from flagscale.output_streams import lossy_standard_streams

def work():
    pipe = os.dup(1)
    with lossy_standard_streams():
        for number in range(6):
            if number == 2:
                os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            if number == 4:
                os.dup2(pipe, 1)
            print("line", number)
    return 7

sys.exit(run_command(work))
"""


def test_lines_are_lost_only_while_they_cannot_be_written() -> None:
    result = subprocess.run(
        [sys.executable, "-c", FULL_FOR_A_WHILE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 7
    assert result.stdout == "line 0\nline 1\nline 4\nline 5\n"
    assert result.stderr.count("stdout cannot be written: No space left on device") == 1


PRINT_AND_WAIT = """
import sys
from flagscale.cli_errors import run_command

def work():
    print("printed")
    sys.stdin.read()
    return 0

sys.exit(run_command(work))
"""


def test_unbuffered_output_stays_unbuffered() -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-c", PRINT_AND_WAIT],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 30)
        assert ready, "nothing was printed before the end"
        assert process.stdout.readline() == b"printed\n"
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
