"""Tests of jobs whose launcher was started in a hostile environment, without torch.

Hang-ups, output that cannot be written, modules that shadow the standard library, and options of
the user's shell.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from contextlib import suppress
from typing import Any

import pytest
from support.launch_lab import Lab, rank_processes, wait_for_line
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.hosts import processes

pytestmark = pytest.mark.integration


def configure_command(lab: Lab, script: str, **experiment: Any) -> None:
    """Make the lab's experiment run a script in bash as its only rank."""
    lab.configure(
        "",
        task={"type": "command", "command": ["bash", "-c", script]},
        runner={"nproc_per_node": 1, "preflight": False},
        **experiment,
    )


def run_in_shell(
    lab: Lab, redirection: str, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command line of the launcher with a redirection in bash's syntax."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "bash", *lab.command(*words)],
        cwd=lab.root,
        env={**lab.environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


# -- hang-up --------------------------------------------------------------------------------------


def test_an_ignored_hang_up_ends_neither_launcher_nor_agent_nor_ranks(lab: Lab) -> None:
    go = lab.root / "go"
    configure_command(lab, f"echo works; while [[ ! -e {go} ]]; do sleep 0.1; done")
    process = subprocess.Popen(
        ["nohup", *lab.command("action=test")],
        cwd=lab.root,
        env=lab.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lab.started.append(process)
    wait_for(lambda: lab.layout.state.exists() and "works" in lab.output())
    ranks = rank_processes(lab.state())
    members = [member.pid for member in lab.run_processes()]
    for pid in (process.pid, *members):
        with suppress(ProcessLookupError):  # a `sleep` of the program
            os.kill(pid, signal.SIGHUP)
    assert not processes.wait_until(lambda: process.poll() is not None, 1.5)
    assert rank_processes(lab.state()) == ranks != {}
    go.touch()
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert process.returncode == 0, output


def test_a_hang_up_that_was_not_ignored_ends_the_foreground_run(lab: Lab) -> None:
    configure_command(lab, "echo works; sleep 600")
    process = lab.start("test")
    wait_for_line(process, "works")  # the launcher shows it, and handles signals by now
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 128 + signal.SIGHUP
    lab.wait_until_ended(20)


# -- output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "redirection", "note"),
    [
        pytest.param("test", ">/dev/full", "stdout cannot be written: No space left", id="full"),
        pytest.param("test", ">&- 2>&-", "", id="closed"),
        pytest.param("test", "2>/dev/full", "", id="full-stderr"),
        pytest.param("test", "> >(exec true)", "Broken pipe", id="no-reader"),
        pytest.param("run", ">/dev/full", "No space left", id="full-in-the-background"),
    ],
)
def test_output_that_cannot_be_written_does_not_end_the_job(
    lab: Lab, action: str, redirection: str, note: str
) -> None:
    configure_command(lab, 'for i in {1..20}; do echo "line $i"; done; sleep 1; echo done')
    result = run_in_shell(lab, redirection, f"action={action}")
    assert result.returncode == 0, result.stderr
    lab.wait_until_ended(20)
    assert "localhost:0: done" in lab.output()
    assert lab.run_action("query").stdout.count("completed") >= 1
    assert "Traceback" not in result.stdout + result.stderr
    assert note in result.stderr
    assert result.stderr.count("cannot be written") == bool(note)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"PYTHONIOENCODING": "ascii"}, id="ascii"),
        pytest.param({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, id="C"),
    ],
)
def test_output_that_cannot_be_encoded_is_escaped(lab: Lab, environment: dict[str, str]) -> None:
    configure_command(lab, r"printf 'loss \xe2\x86\x93 \xff\n'; echo done")
    result = run_in_shell(lab, "", "action=test", **environment)
    assert result.returncode == 0, result.stderr
    assert "localhost:0: done" in result.stdout
    assert "localhost:0: loss \\u2193 \\ufffd\n" in result.stdout


def test_a_full_disk_below_a_query_is_an_error_without_a_traceback(lab: Lab) -> None:
    configure_command(lab, "echo done")
    assert lab.run_action("test").returncode == 0
    result = run_in_shell(lab, ">/dev/full", "action=query")
    assert result.returncode == 1
    assert result.stderr == "error: stdout: No space left on device\n"


# -- modules --------------------------------------------------------------------------------------

SHADOWS = ("random", "queue", "token", "types", "torch", "selectors", "runpy", "typing")
IMPORTS_HELPER = """
import helper, random
print("helper", helper.VALUE, "random of", random.__file__)
"""


def test_modules_in_the_working_directory_do_not_shadow_the_standard_library(lab: Lab) -> None:
    programs = lab.root / "programs"
    programs.mkdir()
    (programs / "helper.py").write_text("VALUE = 7\n", encoding="utf-8")
    (programs / "train.py").write_text(IMPORTS_HELPER, encoding="utf-8")
    lab.configure(
        "",
        light=True,
        task={"type": "train", "backend": "megatron", "entrypoint": str(programs / "train.py")},
        runner={"nproc_per_node": 1, "preflight": False},
    )
    for name in SHADOWS:
        (lab.root / f"{name}.py").write_text("raise SystemExit('shadowed')\n", encoding="utf-8")
    result = lab.run_action("test")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"helper 7 random of {random.__file__}\n" in result.stdout


# -- options of the user's shell ------------------------------------------------------------------


def test_before_start_has_the_commands_of_the_users_start_file(lab: Lab) -> None:
    start_file = lab.root / "bash_env"
    start_file.write_text("module() { export LOADED=$2; }\n")
    configure_command(lab, 'echo "loaded $LOADED"', cmds={"before_start": "module load cuda"})
    result = subprocess.run(
        lab.command("action=test"),
        cwd=lab.root,
        env={**lab.environment(), "BASH_ENV": str(start_file)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "localhost:0: loaded cuda" in result.stdout


def test_options_of_the_users_shell_do_not_reach_scripts_and_programs(lab: Lab) -> None:
    start_file = lab.root / "bash_env"
    start_file.write_text("set -e; shopt -s failglob; echo from the start file\n")
    configure_command(lab, 'echo "options $-"; ls /nowhere/*; echo done')
    environment = {
        "SHELLOPTS": "errexit:noclobber:noglob:xtrace",
        "BASHOPTS": "failglob:nullglob:nocasematch",
        "BASH_ENV": str(start_file),
    }
    arguments = {"cwd": lab.root, "env": {**lab.environment(), **environment}}
    result = subprocess.run(
        lab.command("action=test"), **arguments, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "localhost:0: options hBc\n" in result.stdout
    assert "localhost:0: done" in result.stdout
    for action in ("query", "stop"):
        command = lab.command(f"action={action}")
        assert subprocess.run(command, **arguments, check=False).returncode == 0
    # The same script, started by hand.
    result = subprocess.run(
        ["bash", str(lab.state().hosts[0].script)],
        **arguments,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "localhost:0: done" in result.stdout
