"""Commands in hints fit how the user called the program, and where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flagscale.config.command_hints import action_command, make_command, unpatch_command
from flagscale.config.schema import PROJECT

FLAGSCALE, RUN = "/opt/bin/flagscale", "/src/run.py"
SCRIPT = f"{PROJECT}/tools/patch/unpatch.py"


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (FLAGSCALE, "`flagscale stop`"),
        ("/src/flagscale/cli.py", "`flagscale stop`"),
        ("", "`flagscale stop`"),
        (RUN, "action=stop"),
        ("run.py", "action=stop"),
    ],
)
def test_action_is_written_as_it_was_called(
    program: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert action_command("stop") == command


@pytest.mark.parametrize(
    ("program", "is_inside", "unpatch", "make"),
    [
        (FLAGSCALE, False, "flagscale unpatch", f"make -C {PROJECT} data"),
        (FLAGSCALE, True, "python tools/patch/unpatch.py", "make data"),
        (RUN, True, "python tools/patch/unpatch.py", "make data"),
        (RUN, False, f"python {SCRIPT}", f"make -C {PROJECT} data"),
    ],
)
def test_tools_can_be_called_from_the_current_directory(
    program: str,
    is_inside: bool,
    unpatch: str,
    make: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.chdir(PROJECT if is_inside else tmp_path)
    assert unpatch_command() == f"{unpatch} --backend Megatron-LM"
    assert make_command("data") == make
