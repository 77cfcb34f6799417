"""From what sockets and paramiko raise to errors that say what is wrong. Pure."""

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
from flagscale.hosts.ssh.known_hosts import AUTHORITY, KnownKey, Verdict
from flagscale.hosts.ssh.ssh_config import SSH_PORT, SshTarget

_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


def opening_failed(target: SshTarget, error: OSError, seconds: float) -> HostError:
    """Why no TCP connection came about."""
    if isinstance(error, socket.gaierror):
        return errors.NameResolutionError(
            target.name,
            f"the name {target.address!r} does not resolve ({error.strerror})",
            hint="correct the hostfile, or give the alias a HostName in ~/.ssh/config",
        )
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return errors.ConnectTimeoutError(
            target.name,
            f"no answer from {target.endpoint} within {seconds:g} s: "
            "the machine is down, or a firewall drops the packets",
        )
    if error.errno in _NO_ROUTE:
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
        return dropped(target)
    return HostError(target.name, f"cannot connect to {target.endpoint}: {error}")


def dropped(target: SshTarget) -> HostError:
    return errors.ConnectionDroppedError(
        target.name,
        f"{target.route} closed the connection during its greeting, again and again",
        hint="sshd is overloaded, or MaxStartups or a ban list in its configuration is too tight",
    )


def handshake_failed(
    target: SshTarget, error: BaseException | None, elapsed: float, limit: float
) -> HostError:
    """Why a TCP connection did not become an SSH connection.

    ``elapsed`` and ``limit`` are seconds since it was opened and until we gave up: paramiko
    raises the same error for a host that closes the connection and for one that says nothing.
    """
    text = str(error or "")
    if error is None or elapsed >= 0.9 * limit:
        return errors.GreetingTimeoutError(
            target.name,
            f"{target.route} accepts connections and says nothing within {limit:g} s: "
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
    # The last one is what paramiko says of a connection that ended right after the key exchange.
    ended = ("banner", "Negotiation failed", "No existing session")
    if isinstance(error, (EOFError, OSError)) or any(words in text for words in ended):
        return dropped(target)
    return errors.HandshakeError(target.name, f"{target.route}: {text or type(error).__name__}")


def fingerprint(blob: bytes) -> str:
    """A key's fingerprint as ``ssh-keygen -l`` prints it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def host_key_refused(
    target: SshTarget, verdict: Verdict, kind: str, blob: bytes, line: KnownKey | None
) -> HostError:
    """An unknown, changed or revoked host key, with the way to correct known_hosts."""
    offered = f"{kind} {fingerprint(blob)}"
    file = target.known_hosts[0] if target.known_hosts else Path.home() / ".ssh" / "known_hosts"
    where = line.where if line else ""
    if verdict is Verdict.REVOKED:
        return errors.RevokedHostKeyError(
            target.name,
            f"the host key of {target.route}, {offered}, is revoked by {where}: whoever answers "
            "with it may be anybody",
            hint="give the host a new key",
        )
    if verdict is Verdict.CHANGED and line is not None:
        known = fingerprint(base64.b64decode(line.blob))
        remove = shlex.join(["ssh-keygen", "-f", where.rpartition(":")[0], "-R", target.known_as])
        return errors.ChangedHostKeyError(
            target.name,
            f"the host key of {target.route} has changed: it offers {offered}, and {where} has "
            f"{line.kind} {known}. The machine was reinstalled, or another one answers",
            hint=f"if it was reinstalled, run: {remove}\n  then: {_add(target, file, kind, blob)}",
        )
    more = ""
    if line is not None:
        more = f"; only a key of type {line.kind} is known ({where})"
        if line.marker == AUTHORITY:
            more = f"; {where} trusts a certificate authority, but certificates of hosts cannot be "
            more += "checked here, only keys"
    return errors.UnknownHostKeyError(
        target.name,
        f"the host key of {target.route}, {offered}, is not in {file}{more}",
        hint=f"compare the fingerprint, then run: {_add(target, file, kind, blob)}",
    )


def _add(target: SshTarget, file: Path, kind: str, blob: bytes) -> str:
    """The command that makes this key known."""
    if target.via is None and target.proxy_command is None and target.host_key_alias is None:
        port = [] if target.port == SSH_PORT else ["-p", str(target.port)]
        kind_name = {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(kind, "ecdsa")
        scan = shlex.join(["ssh-keyscan", "-t", kind_name, *port, target.address])
        return f"{scan} >> {shlex.quote(str(file))}"
    return f"echo {shlex.quote(known_hosts_line(target, kind, blob))} >> {shlex.quote(str(file))}"


def known_hosts_line(target: SshTarget, kind: str, blob: bytes) -> str:
    return f"{target.known_as} {kind} {base64.b64encode(blob).decode()}"
