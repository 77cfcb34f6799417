"""Tests that input and output of programs on hosts are transferred unchanged.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
import os
import shlex
import signal

import pytest
from bed.lab import Bed
from support.ssh_hosts import connect
from support.waiting import wait_for

from flagscale.hosts import errors as e
from flagscale.hosts.ssh.connection import SshConnection
from flagscale.hosts.ssh.ssh_config import SshConfig

pytestmark = pytest.mark.integration

HOSTILE = [
    "",
    " two  spaces ",
    'it\'s "quoted"',
    "$HOME `id` $(id) ${PATH}",
    "line\nbreak\r\ttab",
    "a,b;c&d|e>f<g",
    "*?[a-z]{1,2}~",
    "-n",
    "--",
    "!history \\ back\\\\slash",
    "naïve 机器学习 🚀",
    "x" * 60_000,
]


@pytest.mark.bed(hosts=1)
def test_arguments_and_input_arrive_as_they_are(bed: Bed, config: SshConfig) -> None:
    show = "import sys, json; print(json.dumps([sys.argv[1:], sys.stdin.buffer.read().hex()]))"
    data = bytes(range(256)) * 8
    with connect(config.target("h00")) as connection:
        result = connection.run(["python3", "-c", show, *HOSTILE], stdin=data)
        printf_result = connection.run(["printf", r"%s\0", *HOSTILE])
        script = f"#!/bin/bash\n# a comment\nprintf '%s\\0' {shlex.join(HOSTILE)}\n# the end"
        script_result = connection.run_script(script)
        assert json.loads(result.text) == [HOSTILE, data.hex()]
        assert printf_result.text.split("\0") == [*HOSTILE, ""]
        assert script_result.text.split("\0") == [*HOSTILE, ""]
        assert connection.run(["sh", "-c", "echo err >&2; exit 7"]).error_text == "err\n"
        for wrong in ([], ["a\0b"], ["x" * 200_000]):
            with pytest.raises(ValueError, match=r"needs|NUL|too long"):
                connection.run(wrong)


@pytest.mark.bed(hosts=1)
def test_exit_statuses(bed: Bed, config: SshConfig) -> None:
    def status(connection: SshConnection, script: str) -> int:
        result = connection.run_script(script)
        assert result.exit_status == connection.run(["bash", "-c", script]).exit_status
        return result.exit_status

    with connect(config.target("h00")) as connection:
        assert status(connection, "") == 0
        assert status(connection, "exit 41") == 41
        assert status(connection, "set -e\nfalse\nexit 3") == 1
        assert status(connection, "kill -9 $BASHPID") == 137
        assert status(connection, "no-such-command") == 127
        killed = connection.run(["bash", "-c", "kill -TERM $$"])
        assert killed.exit_status == 128 + signal.SIGTERM
        assert connection.run(["true"]).exit_status == 0
        # Line numbers in messages are the script's own, and its stdin is empty.
        failed = connection.run_script("\n\nno-such-command; cat; echo end")
        assert "line 3" in failed.error_text
        assert failed.text == "end\n"
        # They shared one session; the script that ended it got an error, the next a new session.
        assert len(bed["h00"].find("bash", "turn")) == 1
        with pytest.raises(e.ConnectionLostError, match="was killed"):
            connection.run_script("kill -9 $$")
        assert connection.run_script("echo again").text == "again\n"


@pytest.mark.bed(hosts=1)
def test_secrets_stay_out_of_the_process_table(bed: Bed, config: SshConfig) -> None:
    secret = "correct-horse-battery"
    script = f"export TOKEN={shlex.quote(secret)}\nsleep 300 </dev/null >/dev/null 2>&1 &\n"
    with connect(config.target("h00")) as connection:
        assert connection.run_script(script).ok
    # The job goes on without the connection.
    job = wait_for(lambda: [p for p in bed[0].processes() if p.argv[:1] == ("sleep",)])[0]
    assert job.environment()["TOKEN"] == secret
    assert bed[0].find(secret) == []


@pytest.mark.bed(hosts=1)
def test_a_script_that_was_cut_off_does_not_run(bed: Bed, config: SshConfig) -> None:
    from flagscale.hosts.ssh.connection import LOGIN_SHELL_LINE, encode_script

    encoded_script = encode_script("t", "touch /tmp/one\ntouch /tmp/two\n")
    with connect(config.target("h00")) as connection:
        for end in range(0, len(encoded_script)):
            if end % 7 == 0 or end > len(encoded_script) - 6:
                connection.run(["sh", "-c", LOGIN_SHELL_LINE], stdin=encoded_script[:end])
        assert connection.run(["ls", "/tmp/one", "/tmp/two"]).text == ""
        connection.run(["sh", "-c", LOGIN_SHELL_LINE], stdin=encoded_script)
        assert connection.run(["ls", "/tmp/one", "/tmp/two"]).text == "/tmp/one\n/tmp/two\n"


@pytest.mark.bed(hosts=1)
def test_much_data_both_ways_and_output_as_it_comes(bed: Bed, config: SshConfig) -> None:
    data = os.urandom(6_000_000)
    with connect(config.target("h00")) as connection:
        # cat writes while it reads: whoever sent everything first would wait for ever.
        assert connection.run(["cat"], stdin=data).stdout == data
        # A command need not read its input.
        assert connection.run(["true"], stdin=data).exit_status == 0
        noisy = "head -c 3000000 /dev/zero >&2; head -c 3000000 /dev/zero"
        both_results = connection.run(["sh", "-c", noisy])
        assert (len(both_results.stdout), len(both_results.stderr)) == (3_000_000, 3_000_000)
        chunks: list[bytes] = []

        def on_stdout(chunk: bytes) -> None:
            chunks.append(chunk)
            if chunk:
                (bed[0].local_path("/tmp/go")).touch()

        wait = "echo first; until [ -e /tmp/go ]; do sleep 0.05; done; echo second"
        result = connection.run(["sh", "-c", wait], on_stdout=on_stdout)
        assert result.stdout == b""
        assert b"".join(chunks) == b"first\nsecond\n"


@pytest.mark.bed(hosts=1)
def test_files_travel_as_input_and_output(bed: Bed, config: SshConfig) -> None:
    data = os.urandom(1_500_000)
    back: list[bytes] = []
    with connect(config.target("h00")) as connection:
        remote = "/tmp/it's a\nfile"
        connection.run(["sh", "-c", 'cat >"$1"', "sh", remote], stdin=data)
        connection.run(["cat", remote], on_stdout=back.append)
    assert b"".join(back) == data


@pytest.mark.bed(hosts=1)
def test_a_process_left_behind_does_not_hold_the_command(bed: Bed, config: SshConfig) -> None:
    with connect(config.target("h00")) as connection:
        result = connection.run(["sh", "-c", "sleep 300 & echo started; exit 5"], timeout=None)
    assert (result.exit_status, result.text) == (5, "started\n")
    wait_for(lambda: len(bed[0].find("sleep", "300")) == 1)


@pytest.mark.bed(hosts=1)
def test_a_time_limit_ends_the_wait_and_not_the_connection(bed: Bed, config: SshConfig) -> None:
    with connect(config.target("h00")) as connection:
        with pytest.raises(e.CommandTimeoutError, match="Its last output: so far") as caught:
            connection.run(["sh", "-c", "echo so far; exec sleep 300"], timeout=5)
        assert caught.value.exit_code == 3
        assert connection.run(["echo", "on"]).text == "on\n"
        connection.check_alive()


@pytest.mark.bed(hosts=["chatty", "closed"], root="private", users=["trainer"])
def test_login_shells_that_talk_or_refuse(bed: Bed, config: SshConfig) -> None:
    bed["chatty"].local_path("/root/chatty").write_text("echo Welcome; echo to the cluster >&2\n")
    bed["chatty"].run(["mount", "--bind", "/root/chatty", "/root/.bashrc"])
    with connect(config.target("chatty")) as connection:
        result = connection.run(["echo", "answer"])
        assert (result.text, result.error_text) == ("answer\n", "")
    accounts = bed["closed"].local_path("/etc/passwd")
    accounts.write_text(accounts.read_text().replace(":/bin/sh\n", ":/usr/sbin/nologin\n"))
    with (
        connect(config.target("closed", user="trainer")) as connection,
        pytest.raises(e.LoginShellError, match="not available") as caught,
    ):
        connection.run(["true"])
    assert caught.value.exit_code == 3


READING_STARTUP_FILES = {
    "a-line": "read -r answer",
    "several-lines": "read -r a; read -r b; read -r c",
    "some-bytes": "head -c 300 >/dev/null",
    "whatever-has-arrived": "dd bs=64K count=1 >/dev/null 2>&1",
    "nothing-but-slow": "sleep 6",
}


@pytest.mark.parametrize("startup_file", READING_STARTUP_FILES.values(), ids=READING_STARTUP_FILES)
@pytest.mark.bed(hosts=1, root="private")
def test_startup_files_that_read_stdin(bed: Bed, config: SshConfig, startup_file: str) -> None:
    """A script runs once, whatever part of it a startup file has read."""
    write_startup_file(bed, startup_file)
    lines = "\n".join(f"echo {n}" for n in range(100))
    with connect(config.target("h00")) as connection:
        for _ in range(2):
            result = connection.run_script(f"echo run >>/tmp/runs\n{lines}")
            assert result.text.split() == [str(n) for n in range(100)]
        assert connection.run(["cat", "/tmp/runs"]).text == "run\nrun\n"


@pytest.mark.bed(hosts=1, root="private")
def test_startup_file_that_reads_all_of_stdin_is_explained(bed: Bed, config: SshConfig) -> None:
    write_startup_file(bed, "echo Which project?; cat >/dev/null")
    with connect(config.target("h00")) as connection:
        for start in (
            lambda: connection.run_script("echo never", timeout=6),
            lambda: connection.run(["cat"], stdin=b"data", timeout=6),
        ):
            with pytest.raises(e.StartupFileError) as caught:
                start()
            assert str(caught.value).startswith(
                "h00: the login shell of root did not start anything in time: a startup file of "
                "the account, such as ~/.bashrc, takes too long, or reads standard input to its "
                "end. Its last output: Which project?"
            )
            assert "[[ $- == *i* ]] || return" in str(caught.value.hint)
        # A command without input gets its end, and so does the startup file.
        assert connection.run(["echo", "answer"]).text == "answer\n"


@pytest.mark.bed(hosts=1, root="private")
def test_input_arrives_after_the_startup_files(bed: Bed, config: SshConfig) -> None:
    write_startup_file(bed, "read -t 1 -N 1000000 -r everything")
    data = os.urandom(2_000_000)
    with connect(config.target("h00")) as connection:
        assert connection.run(["cat"], stdin=data).stdout == data


def write_startup_file(bed: Bed, text: str) -> None:
    """Replace root's .bashrc, which a login shell of bash reads."""
    bed[0].local_path("/root/startup").write_text(f"{text}\n")
    bed[0].run(["mount", "--bind", "/root/startup", "/root/.bashrc"])
