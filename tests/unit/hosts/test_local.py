"""Tests of the connection to this machine: environment of programs, exit, timeouts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS

from flagscale.hosts import errors, processes
from flagscale.hosts.connection import Endpoint, HostConnection
from flagscale.hosts.local import LocalConnection, LocalConnectionFactory
from flagscale.status import RUN_ID_VARIABLE

HOSTILE = "a 'b' \"c\" $d `e` $(f)\n;g ü🦙"


@pytest.fixture
def local_connection() -> LocalConnection:
    return LocalConnectionFactory({}).open(Endpoint("localhost", "local"))


@pytest.mark.parametrize(
    ("script", "status", "stdout", "stderr"),
    [
        pytest.param("echo out; echo err >&2", 0, b"out\n", b"err\n", id="both-streams"),
        pytest.param("exit 7", 7, b"", b"", id="own-code"),
        pytest.param("kill -9 $$", 137, b"", b"", id="killed"),
        pytest.param("cat; echo after", 0, b"after\n", b"", id="nothing-on-its-stdin"),
        pytest.param(f"printf '%s' {'x' * 300_000} | wc -c", 0, b"300000\n", b"", id="long"),
        pytest.param("", 0, b"", b"", id="empty"),
    ],
)
def test_script_results(
    local_connection: LocalConnection, script: str, status: int, stdout: bytes, stderr: bytes
) -> None:
    result = local_connection.run_script(script)
    assert (result.exit_status, result.stdout, result.stderr) == (status, stdout, stderr)


def test_arguments_are_preserved(local_connection: LocalConnection) -> None:
    assert local_connection.run(["printf", "%s|", HOSTILE, ""]).text == f"{HOSTILE}||"
    chunks: list[bytes] = []
    data = os.urandom(3_000_000)
    result = local_connection.run(["cat"], stdin=data, on_stdout=chunks.append)
    assert (b"".join(chunks), result.stdout, result.exit_status) == (data, b"", 0)
    # It ends without reading its input.
    assert local_connection.run(["true"], stdin=data).ok


def test_scripts_are_hidden_from_the_process_table(local_connection: LocalConnection) -> None:
    command_line = local_connection.run_script("secret=s3cr3t; tr '\\0' ' ' </proc/$$/cmdline").text
    assert "bash" in command_line
    assert "s3cr3t" not in command_line


def test_timeout_ends_a_program(local_connection: LocalConnection) -> None:
    start_time = time.monotonic()
    with pytest.raises(errors.CommandTimeoutError, match="Its last output: so far"):
        # Time for bash to begin on a busy machine.
        local_connection.run_script("echo so far; exec sleep 600", timeout=10)
    assert time.monotonic() - start_time < PATIENCE_SECONDS


def test_programs_do_not_inherit_the_run_identity(
    local_connection: LocalConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_ID_VARIABLE, "outer")
    monkeypatch.setenv("KEPT", HOSTILE)
    assert (
        local_connection.run_script(f'printf %s "${{{RUN_ID_VARIABLE}-none}} $KEPT"').text
        == f"none {HOSTILE}"
    )


def test_missing_bash_is_a_host_error(
    local_connection: LocalConnection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.HostError, match="bash cannot be started: No such file"):
        local_connection.run_script("true")
    with pytest.raises(ValueError, match="NUL"):
        local_connection.run_script("a\0b")


def test_local_is_a_registered_connection_type(local_connection: LocalConnection) -> None:
    connection: HostConnection = local_connection
    assert isinstance(connection, LocalConnection)


def test_failure_before_exec_has_its_exit_status(local_connection: LocalConnection) -> None:
    """A busy machine may end the process only after its output has ended."""
    result, _ = local_connection.run_exec_script(
        "echo no >&2; exec >/dev/null 2>&1; sleep 0.3; exit 73"
    )
    assert (result.exit_status, result.text, result.error_text) == (73, "", "no\n")


TIED = """\
import signal, sys, time
from flagscale.hosts.local import LocalConnection
done, child = LocalConnection("here").run_exec_script("echo $$; exec sleep 600 >/dev/null 2>&1")
print(done.text.strip(), child.pid, child.poll(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_tied_program_ends_with_its_launcher(number: signal.Signals) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", TIED], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    script_pid, pid, exit_code = launcher.stdout.readline().split()
    assert (script_pid, exit_code) == (pid, "None")
    process = processes.identify_process(int(pid))
    assert process is not None
    launcher.send_signal(number)
    launcher.communicate()
    assert processes.wait_until(lambda: not processes.is_alive(process), 60)
