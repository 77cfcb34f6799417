"""Completion in real shells: the printed script, sourced, completes a line."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.needs import require_program
from support.waiting import PATIENCE_SECONDS

PROJECT = Path(__file__).resolve().parents[3]
KEY = "flagscale run conf/train.yaml experiment.runner.wait_for"

pytestmark = pytest.mark.integration


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment with a program `flagscale`, for a directory with an experiment."""
    program = tmp_path / "bin" / "flagscale"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m flagscale.cli "$@"\n')
    program.chmod(0o755)
    (tmp_path / "conf").symlink_to(PROJECT / "examples/llama3/conf")
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(PROJECT), "TERM": "dumb"}


def run_shell(command: list[str], directory: Path, environment: dict[str, str]) -> str:
    result = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout


def type_line(
    command: list[str], setup: str, line: str, expected: str, directory: Path, env: dict[str, str]
) -> str:
    """Type a line and a tab in an interactive shell, until its output has a text."""
    process, terminal = pty.fork()
    if not process:
        os.chdir(directory)
        os.execvpe(command[0], command, {**env, "COLUMNS": "160", "PS1": "> ", "LINES": "40"})
    output, typed = "", ""
    try:
        os.write(terminal, f"{setup}\necho rea''dy\n".encode())
        deadline = time.monotonic() + PATIENCE_SECONDS
        while expected not in output.partition("\nready")[2] and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.5)[0]:
                output += os.read(terminal, 1 << 16).decode(errors="replace").replace("\r", "\n")
            if not typed and "\nready" in output:
                typed = f"{line}\t"
                os.write(terminal, typed.encode())
    finally:
        os.close(terminal)
        os.waitpid(process, 0)
    return output


def test_bash_completes_words_and_values(tmp_path: Path, environment: dict[str, str]) -> None:
    lines = [
        "flagscale sto",
        f"{KEY}=r",
        "flagscale run conf/train.yaml train=1",
        "flagscale run con",
        "~/bin/flagscale sto",
    ]
    calls = "\n".join(f"complete_line {line!r}" for line in lines)
    program = f"""\
eval "$(flagscale completion bash)"
complete_line() {{
    COMP_LINE=$1 COMP_POINT=${{#1}} COMP_WORDS=("${{1%% *}}")
    _flagscale 2>/dev/null
    echo "${{COMPREPLY[*]}}"
}}
{calls}
"""
    environment["HOME"] = str(tmp_path)
    output = run_shell(["bash", "--norc", "-c", program], tmp_path, environment)
    assert output.splitlines() == ["stop", "ready", "1b", "conf/", "stop"]


def test_bash_completes_at_a_terminal(tmp_path: Path, environment: dict[str, str]) -> None:
    setup = 'eval "$(flagscale completion bash)"'
    shell = ["bash", "--norc", "--noprofile", "-i"]
    output = type_line(shell, setup, f"{KEY}=r", "wait_for=ready ", tmp_path, environment)
    assert "wait_for=ready " in output


def test_zsh_completes_at_a_terminal(tmp_path: Path, environment: dict[str, str]) -> None:
    shell = [require_program("shells", "zsh"), "-f", "-i"]
    setup = 'autoload -Uz compinit && compinit -u -D; eval "$(flagscale completion zsh)"'
    for line, expected in ((f"{KEY}=r", "wait_for=ready "), ("flagscale s", "end this run, and")):
        output = type_line(shell, setup, line, expected, tmp_path, environment)
        assert expected in output


def test_fish_completes_with_descriptions(tmp_path: Path, environment: dict[str, str]) -> None:
    fish = require_program("shells", "fish")
    program = "flagscale completion fish | source; complete -C 'flagscale sto'; complete -C '%s='"
    command = [fish, "--no-config", "-c", program % KEY]
    output = run_shell(command, tmp_path, {**environment, "HOME": str(tmp_path)})
    assert output.splitlines()[0] == "stop\tend this run, and nothing else"
    values = re.findall(r"wait_for=(\w+)", output)
    assert sorted(values) == ["joined", "none", "ready", "step"]
