"""The sockets of the coordinator and of the agents that talk to it. Nothing here waits, and a call
costs what has come to pass, not what there is: a thousand agents may be connected.

An unauthenticated peer learns a random number and nothing else: whoever does not prove within a
few seconds that it knows the run's secret is hung up on, and only so many may try at once.
"""

from __future__ import annotations

import errno
import resource
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from flagscale.launcher.liveness.messages import FromHost, Order, decode, encode
from flagscale.launcher.liveness.protocol import Channel, ProtocolError

ADMISSION_SECONDS = 5.0
MAX_UNAUTHENTICATED = 64
"""How many may try at once beside the run's own hosts, which may all come at the same moment."""
MAX_UNAUTHENTICATED_BYTES = 256
FIRST_RETRY_SECONDS = 0.1
RETRY_SECONDS = 1.0
_READ_BYTES = 1 << 16
_BACKLOG = 4096  # the kernel takes as many as it likes
_ACCEPTS = 128  # before those who are known are heard again
# After a try that failed for want of descriptors: the port would call again at once.
_BREATH_SECONDS = 0.5
_OWN_FILES = 128  # what an agent opens beside its connections

Ready = Iterable[tuple[selectors.SelectorKey, int]]
"""What a selector's ``select`` gave."""


class Peer:
    """The other end of a connection. The selector knows it as long as it is open, by ``data`` or
    by itself."""

    def __init__(
        self,
        sock: socket.socket,
        channel: Channel,
        selector: selectors.BaseSelector,
        data: object = None,
    ) -> None:
        self.channel = channel
        self.since = time.monotonic()
        self.host: int | None = None
        self.closed = False
        self._socket = sock
        self._selector = selector
        self._data = self if data is None else data
        self._events = selectors.EVENT_READ
        self._pending = b""
        self._received = 0
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(sock, self._events, self._data)
        self.flush()

    def read(self) -> list[bytes]:
        """The messages that have come; closes the connection at its end or at any fault."""
        try:
            data = self._socket.recv(_READ_BYTES)
            self._received += len(data)
            messages = self.channel.receive(data)
        except BlockingIOError:
            return []
        except (OSError, ProtocolError):
            self.close()
            return []
        if not data or (not self.channel.ready and self._received > MAX_UNAUTHENTICATED_BYTES):
            self.close()
        self.flush()
        return messages

    def send(self, payload: bytes) -> None:
        self.channel.send(payload)
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now; the selector tells when the rest can."""
        if self.closed:
            return
        self._pending += self.channel.take()
        try:
            while self._pending:
                self._pending = self._pending[self._socket.send(self._pending) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._pending else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._socket, events, self._data)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._socket)
            self._socket.close()

    def late(self, now: float) -> bool:
        """Whether it should have proven by now who it is."""
        return not self.channel.ready and now - self.since > ADMISSION_SECONDS


class Server:
    """The coordinator's end: listens, admits the run's agents, keeps one connection a host.

    Raises :class:`OSError` when the port is taken."""

    def __init__(
        self, secret: bytes, port: int, selector: selectors.BaseSelector, hosts: int
    ) -> None:
        self._secret = secret
        self._selector = selector
        self._room = hosts + MAX_UNAUTHENTICATED
        self._peers: set[Peer] = set()
        self._unauthenticated: dict[Peer, None] = {}  # the oldest first
        self._by_host: dict[int, Peer] = {}
        self._listener = _listen(port)
        self._listener.setblocking(False)
        self._listening = False
        self._listen_at = 0.0
        self.port = int(self._listener.getsockname()[1])

    def poll(self, ready: Ready, now: float) -> Iterator[tuple[int, FromHost]]:
        """Messages of hosts, in order. To be called whenever a socket is ready and often."""
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept(now)
            elif isinstance(key.data, Peer) and not key.data.closed:
                yield from self._serve(key.data, events)
        while self._unauthenticated and (oldest := next(iter(self._unauthenticated))).late(now):
            self._drop(oldest)
        if not self._listening and now >= self._listen_at:
            self._listening = True
            self._selector.register(self._listener, selectors.EVENT_READ)

    def send(self, host: int | None, order: Order) -> None:
        """To one host, or to all. A host that is not there will say hello again."""
        payload = encode(order)
        peers = self._by_host.values() if host is None else filter(None, [self._by_host.get(host)])
        for peer in list(peers):
            peer.send(payload)
            if peer.closed:
                self._drop(peer)

    def connected(self) -> bool:
        return bool(self._by_host)

    def close(self) -> None:
        self._deafen(0.0)
        self._listener.close()
        for peer in list(self._peers):
            self._drop(peer)

    def _serve(self, peer: Peer, events: int) -> Iterator[tuple[int, FromHost]]:
        if events & selectors.EVENT_WRITE:
            peer.flush()
        payloads = peer.read() if events & selectors.EVENT_READ and not peer.closed else []
        if peer.channel.ready:
            self._unauthenticated.pop(peer, None)
        for message in filter(None, (decode(FromHost, payload) for payload in payloads)):
            host = self._introduce(peer, message.host) if peer.host is None else peer.host
            yield host, message
        if peer.closed:
            self._drop(peer)

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._deafen(now + _BREATH_SECONDS)
                    return
                raise
            if len(self._unauthenticated) >= self._room:
                self._drop(next(iter(self._unauthenticated)))
            peer = Peer(sock, Channel(self._secret, server=True), self._selector)
            self._peers.add(peer)
            self._unauthenticated[peer] = None

    def _deafen(self, until: float) -> None:
        """Whoever knocks has to wait."""
        if self._listening:
            self._listening, self._listen_at = False, until
            self._selector.unregister(self._listener)

    def _introduce(self, peer: Peer, host: int) -> int:
        old = self._by_host.get(host)
        if old is not None:
            self._drop(old)
        peer.host = host
        self._by_host[host] = peer
        return host

    def _drop(self, peer: Peer) -> None:
        peer.close()
        self._peers.discard(peer)
        self._unauthenticated.pop(peer, None)
        if peer.host is not None and self._by_host.get(peer.host) is peer:
            del self._by_host[peer.host]


class Client:
    """An agent's end: connects, and connects again after a loss."""

    def __init__(
        self, secret: bytes, address: tuple[str, int], selector: selectors.BaseSelector
    ) -> None:
        self._secret = secret
        self._address = address
        self._selector = selector
        self._peer: Peer | None = None
        self._connecting: socket.socket | None = None
        self._connecting_since = 0.0
        self._try_at = 0.0
        self._wait = FIRST_RETRY_SECONDS
        self._known: list[tuple[int, tuple[object, ...]]] = []
        self._targets: list[tuple[int, tuple[object, ...]]] = []
        self.fresh = False
        """Whether a connection has come about since this was last set to False."""

    def poll(self, ready: Ready, now: float) -> list[Order]:
        """The orders that have come. Connects where there is no connection. The selector knows
        this client's sockets by the client."""
        peer = self._peer
        if peer is None:
            self._connect(now)
            return []
        payloads: list[bytes] = []
        was_ready = peer.channel.ready
        for key, events in ready:
            if key.data is self and not peer.closed:
                peer.flush()
                payloads += peer.read() if events & selectors.EVENT_READ else []
        self.fresh |= peer.channel.ready and not was_ready
        if peer.closed or peer.late(now):
            self._hang_up(now)
        return [order for payload in payloads if (order := decode(Order, payload)) is not None]

    @property
    def ready(self) -> bool:
        return self._peer is not None and self._peer.channel.ready

    def send(self, message: FromHost) -> None:
        """Send, where there is a connection: a message that is lost is said again in the next
        hello."""
        if self._peer is not None and self.ready:
            self._peer.send(encode(message))

    def close(self) -> None:
        self._hang_up(0.0)
        self._give_up()

    def _hang_up(self, now: float) -> None:
        if self._peer is not None:
            self._peer.close()
        self._peer = None
        self._try_at = now + self._wait

    def _give_up(self) -> None:
        if self._connecting is not None:
            self._selector.unregister(self._connecting)
            self._connecting.close()
            self._connecting = None

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
                self._selector.register(self._connecting, selectors.EVENT_WRITE, self)
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
                self._give_up()
            return
        self._connecting, self._wait = None, FIRST_RETRY_SECONDS
        self._selector.unregister(sock)
        self._peer = Peer(sock, Channel(self._secret, server=False), self._selector, self)


def allow_files(connections: int) -> int | None:
    """Let this process open the files that so many connections need. What it may open where that
    is less."""
    needed = connections + MAX_UNAUTHENTICATED + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed if allowed < needed else None


def _listen(port: int) -> socket.socket:
    anywhere = ("", port)
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        with suppress(OSError):
            return socket.create_server(
                anywhere, family=family, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(anywhere, backlog=_BACKLOG)


def _resolve(address: tuple[str, int]) -> list[tuple[int, tuple[object, ...]]]:
    """Where to connect to; nothing while the name is not known."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(int(family), tuple(target)) for family, _, _, _, target in found]
