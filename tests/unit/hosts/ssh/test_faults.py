"""Tests of the conversion of socket and paramiko errors to messages."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest
from paramiko import SSHException
from paramiko.ssh_exception import IncompatiblePeer

from flagscale.errors import UnreachableError
from flagscale.hosts import errors
from flagscale.hosts.ssh import faults
from flagscale.hosts.ssh.known_hosts import HostKeyStatus, KnownKey
from flagscale.hosts.ssh.ssh_config import SshTarget

TARGET = SshTarget("node-1", "10.0.0.1", "me", 2222, known_hosts=(Path("/h/known hosts"),))
BEHIND = SshTarget("inner", "inner", "me", via=SshTarget("gate", "gate", "me"))


@pytest.mark.parametrize(
    ("error", "error_class", "expected_text"),
    [
        (socket.gaierror(-2, "Name not known"), errors.NameResolutionError, "does not resolve"),
        (
            TimeoutError(),
            errors.ConnectTimeoutError,
            "no answer from 10.0.0.1 port 2222 within 5 s",
        ),
        (OSError(errno.ETIMEDOUT, ""), errors.ConnectTimeoutError, "firewall"),
        (OSError(errno.EHOSTUNREACH, "No route"), errors.NoRouteError, "no route to 10.0.0.1"),
        (OSError(errno.ENETUNREACH, ""), errors.NoRouteError, "another network"),
        (
            ConnectionRefusedError(errno.ECONNREFUSED, ""),
            errors.ConnectionRefusedByHostError,
            "nothing listens on 10.0.0.1 port 2222",
        ),
        (ConnectionResetError(errno.ECONNRESET, ""), errors.ConnectionDroppedError, "MaxStartups"),
        (OSError(errno.EMFILE, "Too many open files"), errors.HostError, "Too many open files"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_connect_errors_are_classified(
    error: OSError, error_class: type[Exception], expected_text: str
) -> None:
    host_error = faults.connect_error(TARGET, error, 5)
    assert type(host_error) is error_class
    assert expected_text in str(host_error)
    assert str(host_error).startswith("node-1: ")


@pytest.mark.parametrize(
    ("error", "elapsed", "error_class", "expected_text"),
    [
        (None, 10, errors.SshTimeoutError, "sends nothing within 10 s"),
        (
            SSHException("Error reading SSH protocol banner"),
            9.9,
            errors.SshTimeoutError,
            "sshd is stopped",
        ),
        (
            SSHException("Error reading SSH protocol banner"),
            0.1,
            errors.ConnectionDroppedError,
            "MaxStartups",
        ),
        (EOFError(), 0.1, errors.ConnectionDroppedError, "closed the connection"),
        (ConnectionResetError(), 0.1, errors.ConnectionDroppedError, "closed the connection"),
        (
            SSHException("No existing session"),
            0.1,
            errors.ConnectionDroppedError,
            "closed the connection",
        ),
        (
            SSHException('Indecipherable protocol version "HTTP/1.1"'),
            0.1,
            errors.HandshakeError,
            'not an SSH server: Indecipherable protocol version "HTTP/1.1"',
        ),
        (IncompatiblePeer("no ciphers"), 0.1, errors.HandshakeError, "no algorithm in common"),
        (SSHException("what"), 0.1, errors.HandshakeError, "inner through gate: what"),
    ],
)
def test_handshake_errors_are_classified(
    error: Exception | None, elapsed: float, error_class: type[Exception], expected_text: str
) -> None:
    host_error = faults.handshake_error(BEHIND, error, elapsed, 10)
    assert type(host_error) is error_class
    assert expected_text in str(host_error)


def test_a_host_behind_another_gets_the_line_and_not_a_scan() -> None:
    error = faults.host_key_error(BEHIND, HostKeyStatus.UNKNOWN, "ssh-ed25519", b"key", None)
    assert isinstance(error, errors.UnknownHostKeyError)
    assert "echo 'inner ssh-ed25519 a2V5' >> " in str(error)
    assert "through gate" in str(error)


def test_hints_are_quoted_for_the_shell() -> None:
    line = KnownKey("ssh-ed25519", "b3RoZXI=", None, "/h/known hosts:7")
    error = faults.host_key_error(TARGET, HostKeyStatus.CHANGED, "ssh-ed25519", b"key", line)
    assert "ssh-keygen -f '/h/known hosts' -R '[10.0.0.1]:2222'" in str(error)
    assert "ssh-keyscan -t ed25519 -p 2222 10.0.0.1 >> '/h/known hosts'" in str(error)
    assert faults.key_fingerprint(b"other") in str(error)
    assert "/h/known hosts:7" in str(error)
    revoked = faults.host_key_error(TARGET, HostKeyStatus.REVOKED, "ssh-ed25519", b"key", line)
    assert isinstance(revoked, errors.RevokedHostKeyError)
    assert "is revoked by /h/known hosts:7" in str(revoked)
    authority = KnownKey("ssh-ed25519", "b3RoZXI=", "@cert-authority", "/h/k:1")
    unknown = faults.host_key_error(TARGET, HostKeyStatus.UNKNOWN, "ssh-rsa", b"key", authority)
    assert "/h/k:1 trusts a certificate authority" in str(unknown)


def all_error_classes(kind: type[errors.HostError]) -> list[type[errors.HostError]]:
    return [
        kind,
        *(subclass for child in kind.__subclasses__() for subclass in all_error_classes(child)),
    ]


def test_every_error_has_its_own_summary() -> None:
    kinds = [
        kind for kind in all_error_classes(errors.HostError) if kind is not errors.HostKeyError
    ]
    assert len({kind.summary for kind in kinds}) == len(kinds)
    for kind in kinds:
        error = kind("h", "what", hint="do that")
        assert isinstance(error, UnreachableError)
        assert error.exit_code == 3
        assert str(error) == "h: what\n  hint: do that"
    assert [kind for kind in kinds if kind.retryable] == [errors.ConnectionDroppedError]
