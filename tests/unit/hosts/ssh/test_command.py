"""Tests of the command line that a login shell receives, with real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.hosts.errors import ProxyCommandError
from flagscale.hosts.ssh.connection import LOGIN_SHELL_LINE, encode_script
from flagscale.hosts.ssh.exchange import (
    MARKER,
    MAX_LINE_BYTES,
    MarkerFilter,
    command_line,
)
from flagscale.hosts.ssh.proxy import expand_tokens
from flagscale.hosts.ssh.ssh_config import SshTarget

words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


SHELLS = [shell for shell in ("sh", "bash", "zsh", "fish", "tcsh") if shutil.which(shell)]


@pytest.mark.parametrize("shell", SHELLS)
def test_login_shells_preserve_arguments(shell: str) -> None:
    argv = ["printf", r"%s\0", "", "a'b\"c", "$HOME `id`", "*", "é"]
    if shell != "tcsh":  # tcsh cannot quote a newline
        argv.append("x\ny")
    result = subprocess.run([shell, "-c", command_line(argv)], capture_output=True, check=True)
    assert result.stdout == MARKER + b"".join(argument.encode() + b"\0" for argument in argv[2:])
    assert result.stderr == MARKER


@settings(max_examples=25, deadline=None)
@given(st.lists(words, min_size=1, max_size=5))
def test_any_arguments_are_preserved(arguments: list[str]) -> None:
    line = command_line(["printf", r"%s\0", *arguments])
    result = subprocess.run(["sh", "-c", line], capture_output=True, check=True)
    assert result.stdout == MARKER + b"".join(argument.encode() + b"\0" for argument in arguments)


@settings(max_examples=25, deadline=None)
@given(words)
def test_any_value_in_a_script_is_preserved(value: str) -> None:
    script = "cat <<'the end of it'\n" + value.replace("\r", "") + "\nthe end of it"
    result = subprocess.run(
        ["sh", "-c", LOGIN_SHELL_LINE],
        input=encode_script("t", script),
        capture_output=True,
        check=True,
    )
    assert result.stdout == MARKER + value.replace("\r", "").encode() + b"\n\2t 0\3"
    assert result.stderr == MARKER + b"\2t\3"


@pytest.mark.parametrize("shell", SHELLS)
def test_one_script_after_another_in_shells_of_their_own(shell: str) -> None:
    scripts = [("a", "x=1; umask 077; exit 3"), ("b", 'echo "$x$(umask)"; cat'), ("c", "")]
    input_data = b"".join(encode_script(*script_and_token) for script_and_token in scripts)
    result = subprocess.run(
        [shell, "-c", LOGIN_SHELL_LINE], input=input_data, capture_output=True, check=True
    )
    ends = result.stdout.removeprefix(MARKER)
    assert ends == b"\2a 3\3" + f"{_umask():04o}\n".encode() + b"\2b 0\3\2c 0\3"
    assert result.stderr == MARKER + b"\2a\3\2b\3\2c\3"


LOST_PARTS = {
    "header": lambda sent: sent[1:].split(b"\n", 1)[1],
    "part-of-the-header": lambda sent: sent[8:],
    "middle-of-a-line": lambda sent: sent[50:],
    "all-but-the-end": lambda sent: sent[-7:],
    "all": lambda sent: b"",
    "nothing": lambda sent: sent,
}


@pytest.mark.parametrize("lose", LOST_PARTS.values(), ids=LOST_PARTS)
def test_a_script_that_is_sent_twice_runs_once(lose: Callable[[bytes], bytes]) -> None:
    """Start-up files may have read a part of the first copy."""
    sent = encode_script(
        "t", "echo one\nflagscale run 5\necho two; echo 'a last line\nwithout end'"
    )
    other = encode_script("u", "echo three")
    result = subprocess.run(
        ["sh", "-c", LOGIN_SHELL_LINE],
        input=lose(sent) + sent + other,
        env={"PATH": f"/nonexistent:{os.environ['PATH']}"},
        capture_output=True,
        check=True,
    )
    output = b"one\ntwo\na last line\nwithout end\n"
    assert result.stdout == MARKER + output + b"\2t 0\3three\n\2u 0\3"


def _umask() -> int:
    current_umask = os.umask(0o022)
    os.umask(current_umask)
    return current_umask


def test_unsendable_commands_are_rejected() -> None:
    room = MAX_LINE_BYTES - len(command_line(["echo", "x"]))
    assert len(command_line(["echo", "x" * (room + 1)])) == MAX_LINE_BYTES
    for argv, message in (([], "name"), (["a\0"], "NUL"), (["echo", "x" * (room + 2)], "too long")):
        with pytest.raises(ValueError, match=message):
            command_line(argv)
    with pytest.raises(ValueError, match="NUL"):
        encode_script("t", "\0")


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(1, 7))
def test_output_before_the_marker_is_dropped(noise: bytes, output: bytes, step: int) -> None:
    noise = noise.replace(b"\x02", b"")
    stream, marker_filter = noise + MARKER + output, MarkerFilter()
    filtered = b"".join(
        marker_filter.feed(stream[i : i + step]) for i in range(0, len(stream), step)
    )
    assert (filtered, bytes(marker_filter.preamble), marker_filter.marker_seen) == (
        output,
        noise,
        True,
    )


def test_proxy_command_tokens() -> None:
    target = SshTarget("alias", "10.0.0.1", "me", 2222)
    assert expand_tokens(target, "nc %h %p # %r@%n 100%%") == "nc 10.0.0.1 2222 # me@alias 100%"
    with pytest.raises(ProxyCommandError, match="unknown token '%x'"):
        expand_tokens(target, "nc %x")
    with pytest.raises(ProxyCommandError, match="has no place in a ProxyCommand"):
        expand_tokens(SshTarget("a", "$(reboot)", "me"), "nc %h")
