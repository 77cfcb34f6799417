"""The sockets of the coordinator and of the agents that talk to it. Nothing here waits.

An unauthenticated peer learns a random number and nothing else: whoever does not prove within a
few seconds that it knows the run's secret is hung up on, and no more than a few may try at once.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from flagscale.launch.liveness.protocol import Channel, Message, ProtocolError

ADMISSION_SECONDS = 5.0
MAX_UNAUTHENTICATED = 64
MAX_UNAUTHENTICATED_BYTES = 256
FIRST_RETRY_SECONDS = 0.1
RETRY_SECONDS = 1.0
_READ_BYTES = 1 << 16


class Connection:
    """A socket and its channel."""

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        self.socket = sock
        self.channel = channel
        self.since = time.monotonic()
        self.host: int | None = None
        self.closed = False
        self._pending = b""
        self._received = 0
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> list[Message]:
        """The messages that have come; closes the connection at its end or at any fault."""
        messages: list[Message] = []
        try:
            while data := self.socket.recv(_READ_BYTES):
                self._received += len(data)
                messages += self.channel.receive(data)
                if not self.channel.ready and self._received > MAX_UNAUTHENTICATED_BYTES:
                    break
            self.close()
        except BlockingIOError:
            pass
        except (OSError, ProtocolError, RecursionError):
            self.close()
        return messages

    def flush(self) -> None:
        """Send what can be sent now."""
        if self.closed:
            return
        self._pending += self.channel.take()
        try:
            while self._pending:
                self._pending = self._pending[self.socket.send(self._pending) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.socket.close()


class Server:
    """The coordinator's end: listens, admits the run's agents, keeps one connection a host.

    Raises :class:`OSError` when the port is taken."""

    def __init__(self, secret: bytes, port: int, selector: selectors.BaseSelector) -> None:
        self._secret = secret
        self._selector = selector
        self._connections: list[Connection] = []
        self._by_host: dict[int, Connection] = {}
        self._listener = _listen(port)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        selector.register(self._listener, selectors.EVENT_READ)

    def poll(self, now: float) -> Iterator[tuple[int, Message]]:
        """Messages of hosts, in order. To be called whenever a socket is ready and often."""
        self._forget()
        self._accept()
        for connection in list(self._connections):
            for message in connection.read():
                host = message.get("host")
                if isinstance(host, int) and connection.host is None:
                    self._introduce(connection, host)
                if connection.host is not None:
                    yield connection.host, message
            late = now - connection.since > ADMISSION_SECONDS
            if late and not connection.channel.ready:
                connection.close()
            connection.flush()
        self._forget()

    def send(self, host: int | None, message: Message) -> None:
        """To one host, or to all. A host that is not there will say hello again."""
        wanted = self._by_host if host is None else {host} & self._by_host.keys()
        for number in list(wanted):
            self._by_host[number].channel.send(message)
            self._by_host[number].flush()

    def connected(self) -> bool:
        return bool(self._by_host)

    def close(self) -> None:
        self._selector.unregister(self._listener)
        self._listener.close()
        for connection in self._connections:
            self._drop(connection)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: whoever knocks may try again.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    return
                raise
            unauthenticated = [c for c in self._connections if not c.channel.ready]
            if len(unauthenticated) >= MAX_UNAUTHENTICATED:
                unauthenticated[0].close()
                self._forget()
            connection = Connection(sock, Channel(self._secret, server=True))
            self._connections.append(connection)
            self._selector.register(sock, selectors.EVENT_READ)

    def _introduce(self, connection: Connection, host: int) -> None:
        old = self._by_host.get(host)
        if old is not None:
            old.close()
        connection.host = host
        self._by_host[host] = connection

    def _forget(self) -> None:
        for connection in [c for c in self._connections if c.closed]:
            self._drop(connection)
        self._connections = [c for c in self._connections if not c.closed]
        self._by_host = {h: c for h, c in self._by_host.items() if not c.closed}

    def _drop(self, connection: Connection) -> None:
        unregister(self._selector, connection.socket)
        connection.close()


class Client:
    """An agent's end: connects, and connects again after a loss."""

    def __init__(
        self, secret: bytes, address: tuple[str, int], selector: selectors.BaseSelector
    ) -> None:
        self._secret = secret
        self._address = address
        self._selector = selector
        self._connection: Connection | None = None
        self._connecting: socket.socket | None = None
        self._connecting_since = 0.0
        self._try_at = 0.0
        self._wait = FIRST_RETRY_SECONDS
        self._known: list[tuple[int, tuple[object, ...]]] = []
        self._targets: list[tuple[int, tuple[object, ...]]] = []
        self.fresh = False
        """Whether a connection has come about since this was last set to False."""

    def poll(self, now: float) -> list[Message]:
        """The messages that have come. Connects where there is no connection."""
        if self._connection is None:
            self._connect(now)
            return []
        was_ready = self._connection.channel.ready
        messages = self._connection.read()
        self._connection.flush()
        if self._connection.channel.ready and not was_ready:
            self.fresh = True
        late = now - self._connection.since > ADMISSION_SECONDS
        if self._connection.closed or (late and not self._connection.channel.ready):
            self._hang_up(now)
        return messages

    @property
    def ready(self) -> bool:
        return self._connection is not None and self._connection.channel.ready

    def send(self, message: Message) -> None:
        """Send, where there is a connection: a message that is lost is said again in the next
        hello."""
        if self._connection is not None and self.ready:
            self._connection.channel.send(message)
            self._connection.flush()

    def close(self) -> None:
        self._hang_up(0.0)
        if self._connecting is not None:
            unregister(self._selector, self._connecting)
            self._connecting.close()

    def _hang_up(self, now: float) -> None:
        if self._connection is not None:
            unregister(self._selector, self._connection.socket)
            self._connection.close()
        self._connection = None
        self._try_at = now + self._wait

    def _connect(self, now: float) -> None:
        if self._connecting is not None:
            self._finish(now)
        elif now >= self._try_at:
            self._try_at = now + self._wait
            self._wait = min(2 * self._wait, RETRY_SECONDS)
            # Looked up once: behind a cut link a name server would keep the agent waiting.
            self._known = self._known or _resolve(self._address)
            self._targets = self._targets or list(self._known)
            if self._targets:
                family, target = self._targets.pop(0)
                self._connecting = socket.socket(family, socket.SOCK_STREAM)
                self._connecting.setblocking(False)
                self._connecting_since = now
                # Wakes up whoever waits on the selector, by success and by failure.
                self._selector.register(self._connecting, selectors.EVENT_WRITE)
                with suppress(OSError):
                    self._connecting.connect_ex(target)
                self._finish(now)

    def _finish(self, now: float) -> None:
        """Take up a connection that has been made; give up one that has failed."""
        sock = self._connecting
        if sock is None:
            return
        fault = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            sock.getpeername()
        except OSError:
            if fault or now - self._connecting_since > ADMISSION_SECONDS:
                unregister(self._selector, sock)
                sock.close()
                self._connecting = None
            return
        self._connecting, self._wait = None, FIRST_RETRY_SECONDS
        unregister(self._selector, sock)
        self._connection = Connection(sock, Channel(self._secret, server=False))
        self._connection.flush()
        self._selector.register(sock, selectors.EVENT_READ)


def unregister(selector: selectors.BaseSelector, sock: socket.socket) -> None:
    """Forget a socket that may be closed already, which the selector knows by its object."""
    for key in list(selector.get_map().values()):
        if key.fileobj is sock:
            selector.unregister(sock)
            return


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return _bound(socket.AF_INET6, port)
    return _bound(socket.AF_INET, port)


def _bound(family: int, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", port))
        listener.listen(256)
    except OSError:
        listener.close()
        raise
    return listener


def _resolve(address: tuple[str, int]) -> list[tuple[int, tuple[object, ...]]]:
    """Where to connect to; nothing while the name is not known."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(int(family), tuple(target)) for family, _, _, _, target in found]
