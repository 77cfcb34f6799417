"""Conversion of socket and paramiko errors to :class:`HostError` with a diagnosis. Pure
functions."""

from __future__ import annotations

import base64
import errno
import hashlib
import shlex
import socket
from pathlib import Path

from paramiko.ssh_exception import IncompatiblePeer

from flagscale.hosts import errors
from flagscale.hosts.errors import HostError
from flagscale.hosts.ssh.known_hosts import AUTHORITY_MARKER, HostKeyStatus, KnownKey
from flagscale.hosts.ssh.ssh_config import SSH_PORT, SshTarget

_NO_ROUTE_ERRNOS = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


def connect_error(target: SshTarget, error: OSError, timeout_seconds: float) -> HostError:
    """Return the error for a TCP connection that could not be opened within ``timeout_seconds``."""
    if isinstance(error, socket.gaierror):
        return errors.NameResolutionError(
            target.name,
            f"the name {target.address!r} does not resolve ({error.strerror})",
            hint="correct its name, or give the alias a HostName in ~/.ssh/config",
        )
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return errors.ConnectTimeoutError(
            target.name,
            f"no answer from {target.endpoint} within {timeout_seconds:g} s: "
            "the machine is down, or a firewall drops the packets",
        )
    if error.errno in _NO_ROUTE_ERRNOS:
        return errors.NoRouteError(
            target.name,
            f"no route to {target.endpoint} ({error.strerror}): "
            "the machine is off, unplugged, or on another network",
        )
    if error.errno == errno.ECONNREFUSED:
        return errors.ConnectionRefusedByHostError(
            target.name,
            f"nothing listens on {target.address} port {target.port}: sshd is not running there, "
            "or the port is wrong",
        )
    if error.errno == errno.ECONNRESET:
        return dropped_error(target)
    return HostError(target.name, f"cannot connect to {target.endpoint}: {error}")


def dropped_error(target: SshTarget) -> HostError:
    return errors.ConnectionDroppedError(
        target.name,
        f"{target.route} closed the connection during the SSH handshake, repeatedly",
        hint="sshd is overloaded, or MaxStartups or a ban list in its configuration is too tight",
    )


def handshake_error(
    target: SshTarget, error: BaseException | None, elapsed_seconds: float, timeout_seconds: float
) -> HostError:
    """Return the error for a TCP connection on which the SSH handshake failed.

    ``elapsed_seconds`` is the time since the handshake began and ``timeout_seconds`` its timeout:
    paramiko raises the same error for a host that closes the connection and for one that sends
    nothing.
    """
    text = str(error or "")
    if error is None or elapsed_seconds >= 0.9 * timeout_seconds:
        return errors.SshTimeoutError(
            target.name,
            f"{target.route} accepts connections but sends nothing within {timeout_seconds:g} s: "
            "sshd is stopped, or the machine is out of memory or disk",
        )
    if isinstance(error, IncompatiblePeer):
        return errors.HandshakeError(target.name, f"{target.route}: no algorithm in common: {text}")
    if "Indecipherable" in text or "Invalid SSH banner" in text:
        return errors.HandshakeError(
            target.name,
            f"what listens on {target.route} is not an SSH server: {text}",
            hint="check the port",
        )
    # The last one is paramiko's message for a connection that ended right after the key exchange.
    closed_messages = ("banner", "Negotiation failed", "No existing session")
    if isinstance(error, (EOFError, OSError)) or any(words in text for words in closed_messages):
        return dropped_error(target)
    return errors.HandshakeError(target.name, f"{target.route}: {text or type(error).__name__}")


def key_fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint in the format of ``ssh-keygen -l``."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def host_key_error(
    target: SshTarget, status: HostKeyStatus, kind: str, blob: bytes, line: KnownKey | None
) -> HostError:
    """Return the error for an unknown, changed or revoked host key, with the command that corrects
    known_hosts.
    """
    offered_key = f"{kind} {key_fingerprint(blob)}"
    file = target.known_hosts[0] if target.known_hosts else Path.home() / ".ssh" / "known_hosts"
    location = line.location if line else ""
    if status is HostKeyStatus.REVOKED:
        return errors.RevokedHostKeyError(
            target.name,
            f"the host key of {target.route}, {offered_key}, is revoked by {location}: whoever "
            "answers with it may be anybody",
            hint="give the host a new key",
        )
    if status is HostKeyStatus.CHANGED and line is not None:
        known_fingerprint = key_fingerprint(base64.b64decode(line.blob))
        add = _add_key_command(target, file, kind, blob)
        remove = shlex.join(
            ["ssh-keygen", "-f", location.rpartition(":")[0], "-R", target.known_hosts_name]
        )
        return errors.ChangedHostKeyError(
            target.name,
            f"the host key of {target.route} has changed: it offers {offered_key}, and {location} "
            f"has {line.kind} {known_fingerprint}. The machine was reinstalled, or another one "
            "answers",
            hint=f"if it was reinstalled, run: {remove}\n  then: {add}",
        )
    details = ""
    if line is not None:
        details = f"; only a key of type {line.kind} is known ({location})"
        if line.marker == AUTHORITY_MARKER:
            details = (
                f"; {location} trusts a certificate authority, but certificates of hosts cannot be "
            )
            details += "checked here, only keys"
    return errors.UnknownHostKeyError(
        target.name,
        f"the host key of {target.route}, {offered_key}, is not in {file}{details}",
        hint=f"compare the fingerprint, then run: {_add_key_command(target, file, kind, blob)}",
    )


def _add_key_command(target: SshTarget, file: Path, kind: str, blob: bytes) -> str:
    """Return the shell command that adds this key to known_hosts."""
    if target.via is None and target.proxy_command is None and target.host_key_alias is None:
        port = [] if target.port == SSH_PORT else ["-p", str(target.port)]
        kind_name = {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(kind, "ecdsa")
        scan = shlex.join(["ssh-keyscan", "-t", kind_name, *port, target.address])
        return f"{scan} >> {shlex.quote(str(file))}"
    return f"echo {shlex.quote(known_hosts_line(target, kind, blob))} >> {shlex.quote(str(file))}"


def known_hosts_line(target: SshTarget, kind: str, blob: bytes) -> str:
    return f"{target.known_hosts_name} {kind} {base64.b64encode(blob).decode()}"
