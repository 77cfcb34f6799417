"""Tests of a command's exit code after a broken pipe of its own output, or of another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = """
import os, sys
from flagscale.cli_errors import run_command

def tell():
    while True:
        print("line")

def write_elsewhere():
    reading, writing = os.pipe()
    os.close(reading)
    os.write(writing, b"word")

sys.exit(run_command({name}))
"""


def run(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WORK.replace("{name}", name)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_closed_output_is_not_an_error() -> None:
    process = run("tell")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


def test_other_broken_pipes_are_errors() -> None:
    process = run("write_elsewhere")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert b"BrokenPipeError" in errors
