"""Opening connections: the socket, the handshake, the host's key, our key.

A :class:`Dialer` opens the connections of one action. It reads keys once, tries again where a
burst of connections made sshd drop some, and keeps one connection to each jump host, through which
all hosts behind it are reached. An :class:`SshOpener` keeps those to hosts, too, from one program
to the next.
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
from flagscale.hosts.errors import HostError
from flagscale.hosts.executor import Closing, Endpoint
from flagscale.hosts.ssh import faults, known_hosts, proxy
from flagscale.hosts.ssh.connection import Connection
from flagscale.hosts.ssh.identities import Identities
from flagscale.hosts.ssh.packets import OrderlyPacketizer
from flagscale.hosts.ssh.ssh_config import SshConfig, SshTarget

# paramiko reports on a channel of ours, so that its tracebacks do not reach a user's terminal.
LOG_CHANNEL = "flagscale.transport.paramiko"
logging.getLogger(LOG_CHANNEL).addHandler(logging.NullHandler())
logging.getLogger(LOG_CHANNEL).propagate = False

_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")
# What a ProxyCommand that ended looks like from here.
_NO_GREETING = (errors.ConnectionDroppedError, errors.GreetingTimeoutError, errors.HandshakeError)
_lock_known_hosts = threading.Lock()


@dataclass(frozen=True)
class DialOptions:
    """Limits, in seconds, after which a host counts as unreachable.

    ``connect``: for the TCP connection; the user's ConnectTimeout wins. ``greeting``: for sshd's
    greeting and the key exchange. ``login``: for the answer to a key. ``lost``: without any sign
    of life on a connection in use. ``attempts``: connections tried where sshd drops them;
    ``pause`` is the mean wait before the second, and doubles.
    """

    connect: float = 10
    greeting: float = 20
    login: float = 20
    lost: float = 12
    attempts: int = 6
    pause: float = 0.2


class Dialer(Closing):
    """Opens connections. Thread-safe; a context manager."""

    def __init__(self, options: DialOptions | None = None) -> None:
        self.options = options or DialOptions()
        self._identities = Identities()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._kept: dict[SshTarget, Connection] = {}
        self._turns: dict[SshTarget, threading.Lock] = {}
        self._open: set[socket.socket | Connection] = set()

    def close(self) -> None:
        """Close every connection that is open or being opened; whoever waits for one fails.

        Where an interrupt cuts this short, another call closes the rest.
        """
        self._stopped.set()
        with self._lock:
            doomed = tuple(self._open)
            self._kept.clear()
        for thing in doomed:
            if isinstance(thing, Connection):
                thing.close()
            else:
                _shut(thing)
            self._forget(thing)
        self._identities.close()

    def connect(self, target: SshTarget) -> Connection:
        """Log in to a host, trying again where sshd drops connections.

        Raises a :class:`~.errors.HostError` that says what is wrong.
        """
        for attempt in range(1, self.options.attempts + 1):
            try:
                return self._connect_once(target)
            except HostError as error:
                last = attempt == self.options.attempts
                if not error.retryable or last or self._stopped.is_set():
                    raise
            # Full jitter: hosts of one burst come back at different times.
            self._stopped.wait(random.uniform(0, 2 * self.options.pause * 2 ** (attempt - 1)))
        raise HostError(target.name, "no attempt to connect was allowed")

    def kept(self, target: SshTarget) -> Connection:
        """The one connection to a host that is kept, opened where there is none that stands. Raises
        as :meth:`connect`."""
        with self._lock:
            turn = self._turns.setdefault(target, threading.Lock())
        with turn:
            found = self._kept.get(target)
            if found is None or not found.alive:
                found = self._kept[target] = self.connect(target)
            return found

    def _connect_once(self, target: SshTarget) -> Connection:
        if self._stopped.is_set():
            raise HostError(target.name, "the action was cancelled")
        sock = self._wire(target)
        transport: paramiko.Transport | None = None
        try:
            transport = self._handshake(sock, target)
            self._identities.log_in(transport, target)
        except BaseException as error:
            if transport is not None:
                transport.close()
            _shut(sock)
            self._forget(sock)
            if isinstance(error, _NO_GREETING) and isinstance(sock, proxy.ProxySocket):
                raise sock.ended or error from error.__cause__
            raise
        connection = Connection(target, transport, sock, self.options.lost)
        connection.on_close(lambda: self._forget(connection))
        with self._lock:
            self._open.discard(sock)
            if not self._stopped.is_set():
                self._open.add(connection)
                return connection
        connection.close()
        raise HostError(target.name, "the action was cancelled")

    def _forget(self, thing: socket.socket | Connection) -> None:
        with self._lock:
            self._open.discard(thing)

    # -- the wire -----------------------------------------------------------------------------

    def _wire(self, target: SshTarget) -> socket.socket:
        """Something to speak SSH over; a channel of a jump host passes for a socket."""
        if target.via is not None:
            return self._through(target, target.via)
        if target.proxy_command is not None:
            sock = proxy.start(target, target.proxy_command)
            with self._lock:
                self._open.add(sock)
            return sock
        return self._socket(target)

    def _socket(self, target: SshTarget) -> socket.socket:
        limit = target.connect_timeout or self.options.connect
        try:
            places = socket.getaddrinfo(target.address, target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failure = error if isinstance(error, OSError) else socket.gaierror(0, str(error))
            raise faults.opening_failed(target, failure, limit) from error
        failures: list[OSError] = []
        for family, kind, protocol, _, address in places:
            sock = socket.socket(family, kind, protocol)
            with self._lock:
                self._open.add(sock)
            try:
                _tune(sock, self.options.lost)
                sock.settimeout(limit)
                sock.connect(address)
                return sock
            except OSError as error:
                failures.append(error)
                self._forget(sock)
                sock.close()
        raise faults.opening_failed(target, failures[0], limit) from failures[0]

    def _through(self, target: SshTarget, via: SshTarget) -> socket.socket:
        jump = self.kept(via)
        limit = target.connect_timeout or self.options.connect
        try:
            channel = jump.transport.open_channel(
                "direct-tcpip", (target.address, target.port), ("127.0.0.1", 0), timeout=limit
            )
        except paramiko.ChannelException as error:
            raise errors.ChannelRefusedError(
                target.name, f"{via.name} cannot reach {target.endpoint} for us: {error.text}"
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            if jump.stands():
                raise faults.opening_failed(target, TimeoutError(), limit) from error
            raise faults.dropped(via) from error
        return channel  # type: ignore[return-value]

    # -- the handshake ------------------------------------------------------------------------

    def _handshake(self, sock: socket.socket, target: SshTarget) -> paramiko.Transport:
        limit, start = self.options.greeting, time.monotonic()
        keys = known_hosts.lookup(target.known_hosts, target.known_as)
        transport = paramiko.Transport(sock, packetizer_class=OrderlyPacketizer)
        try:
            transport.set_log_channel(LOG_CHANNEL)
            transport.banner_timeout = transport.handshake_timeout = limit
            transport.auth_timeout = self.options.login
            _prefer(transport, known_hosts.known_kinds(keys))
            try:
                transport.start_client(timeout=limit)
                if not transport.initial_kex_done:  # the time is over: paramiko returns in silence
                    raise faults.handshake_failed(target, None, limit, limit)
                offered = transport.get_remote_server_key()
            except (paramiko.SSHException, EOFError, OSError) as error:
                elapsed = time.monotonic() - start
                raise faults.handshake_failed(target, error, elapsed, limit) from error
            kind, blob = offered.get_name(), offered.asbytes()
            verdict, line = known_hosts.judge([*_revoked(target, kind, blob), *keys], kind, blob)
            if verdict is known_hosts.Verdict.UNKNOWN and target.remember_new_keys and line is None:
                _remember(target, kind, blob)
            elif verdict is not known_hosts.Verdict.KNOWN:
                raise faults.host_key_refused(target, verdict, kind, blob, line)
        except BaseException:
            transport.close()
            raise
        return transport


class SshOpener(Closing):
    """Reaches hosts by SSH; an :class:`~flagscale.hosts.executor.Opener`. A connection that broke
    is opened again."""

    def __init__(self, settings: Mapping[str, Any], options: DialOptions | None = None) -> None:
        """``settings["config"]`` is an SSH configuration in place of the user's."""
        given = settings.get("config")
        self._config = SshConfig.load(Path(given) if given else None)
        self._dialer = Dialer(options)

    def open(self, endpoint: Endpoint) -> Connection:
        target = self._config.target(
            endpoint.name, user=endpoint.user, port=endpoint.port, proxy=endpoint.proxy
        )
        return self._dialer.kept(target)

    def close(self) -> None:
        self._dialer.close()


def _tune(sock: socket.socket, lost: float) -> None:
    """Have the kernel end the connection when the other side is silent for ``lost`` seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": max(1, int(lost / 3)),
        "TCP_KEEPINTVL": max(1, int(lost / 3)),
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(lost * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has every one
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _revoked(target: SshTarget, kind: str, blob: bytes) -> list[known_hosts.KnownKey]:
    """The line by which the user's RevokedHostKeys names the key, if it does."""
    if target.revoked_keys is None:
        return []
    try:
        where = known_hosts.revoked(target.revoked_keys, blob)
    except known_hosts.UnreadableError as error:
        what = f"no host is trusted while the list of revoked keys cannot be read: {error}"
        raise errors.HostKeyError(target.name, what) from error
    if where is None:
        return []
    encoded = base64.b64encode(blob).decode()
    return [known_hosts.KnownKey(kind, encoded, known_hosts.REVOKED, where)]


def _prefer(transport: paramiko.Transport, kinds: list[str]) -> None:
    """Ask for a key of a type that known_hosts has, where the server has several."""
    security = transport.get_security_options()
    wanted: list[str] = []
    for kind in kinds:
        wanted += _RSA_SIGNATURES if kind == "ssh-rsa" else (kind,)
    able = tuple(security.key_types)
    first = [kind for kind in wanted if kind in able]
    security.key_types = (*first, *(kind for kind in able if kind not in first))


def _remember(target: SshTarget, kind: str, blob: bytes) -> None:
    """Write a new host's key down, where the user's configuration says so."""
    if not target.known_hosts:
        return
    path = target.known_hosts[0]
    with _lock_known_hosts:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(faults.known_hosts_line(target, kind, blob) + "\n")
        except OSError as error:
            what = f"its new host key cannot be written to {path}: {error.strerror}"
            raise HostError(target.name, what) from error


def _shut(sock: socket.socket) -> None:
    """Wake whoever reads the socket or waits for it to connect, then close it."""
    with contextlib.suppress(OSError, AttributeError, TypeError, EOFError):
        sock.shutdown(socket.SHUT_RDWR)  # fails where it is not connected, or no real socket
    sock.close()
