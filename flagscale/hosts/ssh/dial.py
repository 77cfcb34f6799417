"""Opening of SSH connections: socket, handshake, host key, login.

A :class:`Dialer` opens the connections of one command. It reads keys once, retries if a burst of
connections made sshd drop some, and keeps a single connection to each jump host, which all hosts
behind it share. An :class:`SshConnectionFactory` also reuses the connections to hosts from one
program to the next.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from flagscale.hosts import errors
from flagscale.hosts.connection import Closeable, Endpoint
from flagscale.hosts.errors import HostError
from flagscale.hosts.ssh import faults, known_hosts, proxy
from flagscale.hosts.ssh.connection import SshConnection
from flagscale.hosts.ssh.identities import Identities
from flagscale.hosts.ssh.packets import OrderlyPacketizer
from flagscale.hosts.ssh.ssh_config import SshConfig, SshTarget

# paramiko logs to a channel of this project, so that its tracebacks do not reach a user's terminal.
LOG_CHANNEL = "flagscale.transport.paramiko"
logging.getLogger(LOG_CHANNEL).addHandler(logging.NullHandler())
logging.getLogger(LOG_CHANNEL).propagate = False

_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")
# Errors that a ProxyCommand that ended causes on this side.
_PROXY_EXIT_ERRORS = (
    errors.ConnectionDroppedError,
    errors.SshTimeoutError,
    errors.HandshakeError,
)
_known_hosts_lock = threading.Lock()


@dataclass(frozen=True)
class DialOptions:
    """Timeouts after which a host counts as unreachable, and retries.

    ``connect_seconds`` is for the TCP connection; the user's ConnectTimeout takes precedence.
    ``handshake_seconds`` is for sshd's version string (paramiko: banner) and the key exchange,
    ``login_seconds`` for the reply to a key. After ``idle_limit_seconds`` of silence an established
    connection counts as lost. ``max_attempts`` is the number of connections tried while sshd drops
    them; ``first_pause_seconds`` is the mean wait before the second attempt, which doubles from
    attempt to attempt.
    """

    connect_seconds: float = 10
    handshake_seconds: float = 20
    login_seconds: float = 20
    idle_limit_seconds: float = 12
    max_attempts: int = 6
    first_pause_seconds: float = 0.2


class Dialer(Closeable):
    """Opens connections. Thread-safe; a context manager."""

    def __init__(self, options: DialOptions | None = None) -> None:
        self.options = options or DialOptions()
        self._identities = Identities()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._shared_connections: dict[SshTarget, SshConnection] = {}
        self._target_locks: dict[SshTarget, threading.Lock] = {}
        self._open: set[socket.socket | SshConnection] = set()

    def close(self) -> None:
        """Close every connection that is open or being opened, and make threads that wait for one
        fail.

        If an interrupt cuts this short, another call closes the remaining ones.
        """
        self._closed.set()
        with self._lock:
            open_items = tuple(self._open)
            self._shared_connections.clear()
        for item in open_items:
            if isinstance(item, SshConnection):
                item.close()
            else:
                _shut_down(item)
            self._forget(item)
        self._identities.close()

    def connect(self, target: SshTarget) -> SshConnection:
        """Log in to a host, retrying while sshd drops connections.

        Raises a :class:`~.errors.HostError` with the diagnosis.
        """
        for attempt in range(1, self.options.max_attempts + 1):
            try:
                return self._connect_once(target)
            except HostError as error:
                is_last_attempt = attempt == self.options.max_attempts
                if not error.retryable or is_last_attempt or self._closed.is_set():
                    raise
            # Full jitter: hosts of one burst retry at different times.
            self._closed.wait(
                random.uniform(0, 2 * self.options.first_pause_seconds * 2 ** (attempt - 1))
            )
        raise HostError(target.name, "no attempt to connect was allowed")

    def shared_connection(self, target: SshTarget) -> SshConnection:
        """Return the shared connection to a host, opening it if there is none that is alive. Raises
        as :meth:`connect`.
        """
        with self._lock:
            lock = self._target_locks.setdefault(target, threading.Lock())
        with lock:
            connection = self._shared_connections.get(target)
            if connection is None or not connection.alive:
                connection = self._shared_connections[target] = self.connect(target)
            return connection

    def _connect_once(self, target: SshTarget) -> SshConnection:
        if self._closed.is_set():
            raise HostError(target.name, "the action was cancelled")
        sock = self._open_stream(target)
        transport: paramiko.Transport | None = None
        try:
            transport = self._handshake(sock, target)
            self._identities.log_in(transport, target)
        except BaseException as error:
            if transport is not None:
                transport.close()
            _shut_down(sock)
            self._forget(sock)
            if isinstance(error, _PROXY_EXIT_ERRORS) and isinstance(sock, proxy.ProxySocket):
                raise sock.exit_error or error from error.__cause__
            raise
        connection = SshConnection(target, transport, sock, self.options.idle_limit_seconds)
        connection.on_close(lambda: self._forget(connection))
        with self._lock:
            self._open.discard(sock)
            if not self._closed.is_set():
                self._open.add(connection)
                return connection
        connection.close()
        raise HostError(target.name, "the action was cancelled")

    def _forget(self, item: socket.socket | SshConnection) -> None:
        with self._lock:
            self._open.discard(item)

    # -- the wire -----------------------------------------------------------------------------

    def _open_stream(self, target: SshTarget) -> socket.socket:
        """Open the byte stream for SSH. A channel of a jump host is used like a socket."""
        if target.via is not None:
            return self._open_jump_channel(target, target.via)
        if target.proxy_command is not None:
            sock = proxy.start_proxy(target, target.proxy_command)
            with self._lock:
                self._open.add(sock)
            return sock
        return self._open_socket(target)

    def _open_socket(self, target: SshTarget) -> socket.socket:
        timeout_seconds = target.connect_timeout or self.options.connect_seconds
        try:
            addresses = socket.getaddrinfo(target.address, target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failure = error if isinstance(error, OSError) else socket.gaierror(0, str(error))
            raise faults.connect_error(target, failure, timeout_seconds) from error
        failures: list[OSError] = []
        for family, kind, protocol, _, address in addresses:
            sock = socket.socket(family, kind, protocol)
            with self._lock:
                self._open.add(sock)
            try:
                _set_socket_timeouts(sock, self.options.idle_limit_seconds)
                sock.settimeout(timeout_seconds)
                sock.connect(address)
                return sock
            except OSError as error:
                failures.append(error)
                self._forget(sock)
                sock.close()
        raise faults.connect_error(target, failures[0], timeout_seconds) from failures[0]

    def _open_jump_channel(self, target: SshTarget, via: SshTarget) -> socket.socket:
        jump = self.shared_connection(via)
        timeout_seconds = target.connect_timeout or self.options.connect_seconds
        try:
            channel = jump.transport.open_channel(
                "direct-tcpip",
                (target.address, target.port),
                ("127.0.0.1", 0),
                timeout=timeout_seconds,
            )
        except paramiko.ChannelException as error:
            raise errors.ChannelRefusedError(
                target.name, f"{via.name} cannot reach {target.endpoint} for us: {error.text}"
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            if jump.survived_error():
                raise faults.connect_error(target, TimeoutError(), timeout_seconds) from error
            raise faults.dropped_error(via) from error
        return channel  # type: ignore[return-value]

    # -- the handshake ------------------------------------------------------------------------

    def _handshake(self, sock: socket.socket, target: SshTarget) -> paramiko.Transport:
        timeout_seconds, start_time = self.options.handshake_seconds, time.monotonic()
        keys = known_hosts.lookup_keys(target.known_hosts, target.known_hosts_name)
        # paramiko may send to a channel after closing it, upon which sshd ends the connection.
        transport = paramiko.Transport(sock, packetizer_class=OrderlyPacketizer)
        try:
            transport.set_log_channel(LOG_CHANNEL)
            transport.banner_timeout = transport.handshake_timeout = timeout_seconds
            transport.auth_timeout = self.options.login_seconds
            _prefer_key_types(transport, known_hosts.list_trusted_kinds(keys))
            try:
                transport.start_client(timeout=timeout_seconds)
                if not transport.initial_kex_done:  # timeout: paramiko returns without an error
                    raise faults.handshake_error(target, None, timeout_seconds, timeout_seconds)
                host_key = transport.get_remote_server_key()
            except (paramiko.SSHException, EOFError, OSError) as error:
                elapsed = time.monotonic() - start_time
                raise faults.handshake_error(target, error, elapsed, timeout_seconds) from error
            kind, blob = host_key.get_name(), host_key.asbytes()
            status, line = known_hosts.check_host_key(
                [*_find_revoked_key(target, kind, blob), *keys], kind, blob
            )
            # A host is new if known_hosts has no line about it at all. A line with another key type
            # or a certificate authority is no reason to accept an unknown key.
            is_new_host = status is known_hosts.HostKeyStatus.UNKNOWN and line is None
            if is_new_host and target.accept_new_host_keys:
                _append_known_host(target, kind, blob)
            elif status is not known_hosts.HostKeyStatus.KNOWN:
                raise faults.host_key_error(target, status, kind, blob, line)
        except BaseException:
            transport.close()
            raise
        return transport


class SshConnectionFactory(Closeable):
    """Factory of SSH connections; a :class:`~flagscale.hosts.connection.ConnectionFactory`. A
    broken connection is opened again.
    """

    def __init__(self, settings: Mapping[str, Any], options: DialOptions | None = None) -> None:
        """``settings["config"]`` is the path of an SSH configuration that replaces the user's."""
        config_path = settings.get("config")
        self._config = SshConfig.load(Path(config_path) if config_path else None)
        self._dialer = Dialer(options)

    def open(self, endpoint: Endpoint) -> SshConnection:
        target = self._config.target(
            endpoint.name, user=endpoint.user, port=endpoint.port, proxy=endpoint.proxy
        )
        return self._dialer.shared_connection(target)

    def close(self) -> None:
        self._dialer.close()


def _set_socket_timeouts(sock: socket.socket, idle_limit_seconds: float) -> None:
    """Set the kernel's timeouts so that it ends the connection after ``idle_limit_seconds`` of
    silence.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": max(1, int(idle_limit_seconds / 3)),
        "TCP_KEEPINTVL": max(1, int(idle_limit_seconds / 3)),
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(idle_limit_seconds * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has every option
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _find_revoked_key(target: SshTarget, kind: str, blob: bytes) -> list[known_hosts.KnownKey]:
    """Return the line of the user's RevokedHostKeys that names the key, as a list of at most
    one."""
    if target.revoked_keys is None:
        return []
    try:
        location = known_hosts.find_revoked(target.revoked_keys, blob)
    except known_hosts.UnreadableError as error:
        message = f"no host is trusted while the list of revoked keys cannot be read: {error}"
        raise errors.HostKeyError(target.name, message) from error
    if location is None:
        return []
    encoded = base64.b64encode(blob).decode()
    return [known_hosts.KnownKey(kind, encoded, known_hosts.REVOKED_MARKER, location)]


def _prefer_key_types(transport: paramiko.Transport, kinds: list[str]) -> None:
    """Prefer key types that known_hosts has, in case the server has several keys."""
    security = transport.get_security_options()
    preferred: list[str] = []
    for kind in kinds:
        preferred += _RSA_SIGNATURES if kind == "ssh-rsa" else (kind,)
    supported = tuple(security.key_types)
    preferred_supported = [kind for kind in preferred if kind in supported]
    security.key_types = (
        *preferred_supported,
        *(kind for kind in supported if kind not in preferred_supported),
    )


def _append_known_host(target: SshTarget, kind: str, blob: bytes) -> None:
    """Append a new host's key to known_hosts, if the user's configuration allows it."""
    if not target.known_hosts:
        return
    path = target.known_hosts[0]
    with _known_hosts_lock:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(faults.known_hosts_line(target, kind, blob) + "\n")
        except OSError as error:
            message = f"its new host key cannot be written to {path}: {error.strerror}"
            raise HostError(target.name, message) from error


def _shut_down(sock: socket.socket) -> None:
    """Wake up threads that read from the socket or wait for it to connect, then close it."""
    with contextlib.suppress(OSError, AttributeError, TypeError, EOFError):
        # fails if the socket is not connected, or is no real socket
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
