"""Non-blocking sockets of the coordinator and of the agents that connect to it.

A call costs only as much as there are events, because a thousand agents may be connected. An
unauthenticated peer receives nothing but a random nonce. It is disconnected unless it proves within
a few seconds that it has the run's secret, and the number of such connections is limited.
"""

from __future__ import annotations

import errno
import resource
import selectors
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from flagscale.launcher.liveness.messages import HostMessage, Order, decode, encode
from flagscale.launcher.liveness.protocol import Channel, ProtocolError

AUTHENTICATION_SECONDS = 5.0
MAX_UNAUTHENTICATED = 64
"""Limit of unauthenticated connections in addition to the run's own hosts, which may all
connect at the same moment.
"""
MAX_UNAUTHENTICATED_BYTES = 256
FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 1.0
_READ_BYTES = 1 << 16
_BACKLOG = 4096  # the kernel reduces it to its own limit
_MAX_ACCEPTS = 128  # accepted per call, before messages of authenticated peers are processed
# Pause after running out of file descriptors: the listener would be ready again at once.
_ACCEPT_PAUSE_SECONDS = 0.5
_RESERVED_FILES = 128  # files that an agent opens in addition to its connections

ReadyEvents = Iterable[tuple[selectors.SelectorKey, int]]
"""Result of a selector's ``select``."""


class Peer:
    """Remote end of a connection.

    While it is open it is registered in the selector, with ``data`` or itself as the key's data.
    ``host`` is the node rank that the peer has reported, None before.
    """

    def __init__(
        self,
        sock: socket.socket,
        channel: Channel,
        selector: selectors.BaseSelector,
        data: object = None,
    ) -> None:
        self.channel = channel
        self.connected_at = time.monotonic()
        self.host: int | None = None
        self.closed = False
        self._socket = sock
        self._selector = selector
        self._data = self if data is None else data
        self._events = selectors.EVENT_READ
        self._unsent = b""
        self._received_bytes = 0
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(sock, self._events, self._data)
        self.flush()

    def read(self) -> list[bytes]:
        """Return the received messages; closes the connection at its end or on any error."""
        try:
            data = self._socket.recv(_READ_BYTES)
            self._received_bytes += len(data)
            messages = self.channel.receive(data)
        except BlockingIOError:
            return []
        except (OSError, ProtocolError):
            self.close()
            return []
        if not data or (
            not self.channel.is_authenticated and self._received_bytes > MAX_UNAUTHENTICATED_BYTES
        ):
            self.close()
        self.flush()
        return messages

    def send(self, payload: bytes) -> None:
        self.channel.send(payload)
        self.flush()

    def flush(self) -> None:
        """Send as much as possible now; the selector reports when more can be sent."""
        if self.closed:
            return
        self._unsent += self.channel.take_outgoing()
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._socket, events, self._data)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._socket)
            self._socket.close()

    def is_overdue(self, now: float) -> bool:
        """Return True if the peer should have authenticated itself by now."""
        return (
            not self.channel.is_authenticated and now - self.connected_at > AUTHENTICATION_SECONDS
        )


class Server:
    """Coordinator's end: listens, authenticates the run's agents, keeps one connection per host.

    ``hosts`` is the number of hosts.

    Raises:
        OSError: If the port is in use.
    """

    def __init__(
        self, secret: bytes, port: int, selector: selectors.BaseSelector, hosts: int
    ) -> None:
        self._secret = secret
        self._selector = selector
        self._max_unauthenticated = hosts + MAX_UNAUTHENTICATED
        self._peers: set[Peer] = set()
        self._unauthenticated: dict[Peer, None] = {}  # in order of connection
        self._peer_by_host: dict[int, Peer] = {}
        self._listener = listen(port)
        self._listener.setblocking(False)
        self._is_accepting = False
        self._accept_again_at = 0.0
        self.port = int(self._listener.getsockname()[1])

    def poll(self, ready: ReadyEvents, now: float) -> Iterator[tuple[int, HostMessage]]:
        """Yield the messages of hosts, in order. Must be called when a socket is ready, and
        periodically.
        """
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept_peers(now)
            elif isinstance(key.data, Peer) and not key.data.closed:
                yield from self._read_peer(key.data, events)
        while self._unauthenticated and (oldest := next(iter(self._unauthenticated))).is_overdue(
            now
        ):
            self._disconnect(oldest)
        if not self._is_accepting and now >= self._accept_again_at:
            self._is_accepting = True
            self._selector.register(self._listener, selectors.EVENT_READ)

    def send(self, host: int | None, order: Order) -> None:
        """Send an order to one host, or to all. A host that is not connected will send a hello
        again.
        """
        payload = encode(order)
        peers = (
            self._peer_by_host.values()
            if host is None
            else filter(None, [self._peer_by_host.get(host)])
        )
        for peer in list(peers):
            peer.send(payload)
            if peer.closed:
                self._disconnect(peer)

    def has_connections(self) -> bool:
        return bool(self._peer_by_host)

    def close(self) -> None:
        self._pause_accepting(0.0)
        self._listener.close()
        for peer in list(self._peers):
            self._disconnect(peer)

    def _read_peer(self, peer: Peer, events: int) -> Iterator[tuple[int, HostMessage]]:
        if events & selectors.EVENT_WRITE:
            peer.flush()
        payloads = peer.read() if events & selectors.EVENT_READ and not peer.closed else []
        if peer.channel.is_authenticated:
            self._unauthenticated.pop(peer, None)
        for message in filter(None, (decode(HostMessage, payload) for payload in payloads)):
            host = self._register_host(peer, message.host) if peer.host is None else peer.host
            yield host, message
        if peer.closed:
            self._disconnect(peer)

    def _accept_peers(self, now: float) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause_accepting(now + _ACCEPT_PAUSE_SECONDS)
                    return
                raise
            if len(self._unauthenticated) >= self._max_unauthenticated:
                self._disconnect(next(iter(self._unauthenticated)))
            peer = Peer(sock, Channel(self._secret, is_server=True), self._selector)
            self._peers.add(peer)
            self._unauthenticated[peer] = None

    def _pause_accepting(self, resume_time: float) -> None:
        """Stop accepting connections until ``resume_time``."""
        if self._is_accepting:
            self._is_accepting, self._accept_again_at = False, resume_time
            self._selector.unregister(self._listener)

    def _register_host(self, peer: Peer, host: int) -> int:
        previous_peer = self._peer_by_host.get(host)
        if previous_peer is not None:
            self._disconnect(previous_peer)
        peer.host = host
        self._peer_by_host[host] = peer
        return host

    def _disconnect(self, peer: Peer) -> None:
        peer.close()
        self._peers.discard(peer)
        self._unauthenticated.pop(peer, None)
        if peer.host is not None and self._peer_by_host.get(peer.host) is peer:
            del self._peer_by_host[peer.host]


class Client:
    """Agent's end: connects, and reconnects after a loss."""

    def __init__(
        self,
        secret: bytes,
        address: tuple[str, int],
        selector: selectors.BaseSelector,
        resolved_addresses: Sequence[tuple[int, tuple[object, ...]]] = (),
    ) -> None:
        self._secret = secret
        self._address = address
        self._selector = selector
        self._peer: Peer | None = None
        self._connecting_socket: socket.socket | None = None
        self._connecting_since = 0.0
        self._next_connect_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._addresses = list(resolved_addresses)
        self._untried_addresses: list[tuple[int, tuple[object, ...]]] = []
        self.is_new_connection = False
        """True if a connection was established since this was last set to False."""

    def poll(self, ready: ReadyEvents, now: float) -> list[Order]:
        """Return the received orders, and connect if there is no connection.

        The client's sockets are registered in the selector with the client as the key's data.
        """
        peer = self._peer
        if peer is None:
            self._connect(now)
            return []
        payloads: list[bytes] = []
        was_ready = peer.channel.is_authenticated
        for key, events in ready:
            if key.data is self and not peer.closed:
                peer.flush()
                payloads += peer.read() if events & selectors.EVENT_READ else []
        self.is_new_connection |= peer.channel.is_authenticated and not was_ready
        if peer.closed or peer.is_overdue(now):
            self._disconnect_peer(now)
        return [order for payload in payloads if (order := decode(Order, payload)) is not None]

    @property
    def is_connected(self) -> bool:
        """True if there is a connection and both ends have authenticated themselves."""
        return self._peer is not None and self._peer.channel.is_authenticated

    def send(self, message: HostMessage) -> None:
        """Send a message if connected; the next hello repeats the information of a lost message."""
        if self._peer is not None and self.is_connected:
            self._peer.send(encode(message))

    def close(self) -> None:
        self._disconnect_peer(0.0)
        self._cancel_connecting()

    def _disconnect_peer(self, now: float) -> None:
        if self._peer is not None:
            self._peer.close()
        self._peer = None
        self._next_connect_at = now + self._retry_seconds

    def _cancel_connecting(self) -> None:
        if self._connecting_socket is not None:
            self._selector.unregister(self._connecting_socket)
            self._connecting_socket.close()
            self._connecting_socket = None

    def _connect(self, now: float) -> None:
        if self._connecting_socket is not None:
            self._complete_connection(now)
        elif now >= self._next_connect_at:
            self._next_connect_at = now + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)
            # Resolved once: if the link is cut, a name server would block the agent.
            self._addresses = self._addresses or resolve(self._address)
            self._untried_addresses = self._untried_addresses or list(self._addresses)
            if self._untried_addresses:
                family, target = self._untried_addresses.pop(0)
                self._connecting_socket = socket.socket(family, socket.SOCK_STREAM)
                self._connecting_socket.setblocking(False)
                self._connecting_since = now
                # The selector wakes up on success and on failure.
                self._selector.register(self._connecting_socket, selectors.EVENT_WRITE, self)
                with suppress(OSError):
                    self._connecting_socket.connect_ex(target)
                self._complete_connection(now)

    def _complete_connection(self, now: float) -> None:
        """Use the connection if it has been established; give it up if it has failed."""
        sock = self._connecting_socket
        if sock is None:
            return
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            sock.getpeername()
        except OSError:
            if error or now - self._connecting_since > AUTHENTICATION_SECONDS:
                self._cancel_connecting()
            return
        self._connecting_socket, self._retry_seconds = None, FIRST_RETRY_SECONDS
        self._selector.unregister(sock)
        self._peer = Peer(sock, Channel(self._secret, is_server=False), self._selector, self)


class AgentConnections:
    """Connections of an agent: one to each host that it connects to, and those of the hosts that
    have connected to it while it listens.

    Args:
        secret: Secret of the run.
        addresses: Addresses of the hosts by number.
        port: Port at which the coordinator listens.
        selector: Selector that all connections are registered in.
        host_count: Number of hosts.
    """

    def __init__(
        self,
        secret: bytes,
        addresses: Mapping[int, str],
        port: int,
        selector: selectors.BaseSelector,
        host_count: int,
    ) -> None:
        self._secret = secret
        self._addresses = addresses
        self._port = port
        self._selector = selector
        self._host_count = host_count
        self._resolved: dict[int, list[tuple[int, tuple[object, ...]]]] = {}
        self.clients: dict[int, Client] = {}
        self.server: Server | None = None

    @property
    def numbers(self) -> set[int]:
        """Hosts that this one connects to, or tries to."""
        return set(self.clients)

    def resolve(self, number: int) -> None:
        """Look up the address of a host. If the link is cut later, a name server would block the
        agent.
        """
        if not self._resolved.get(number):
            self._resolved[number] = resolve((self._addresses[number], self._port))

    def connect(self, number: int) -> None:
        """Connect to a host, until :meth:`disconnect` is called."""
        if number not in self.clients:
            address = (self._addresses[number], self._port)
            resolved = self._resolved.get(number, ())
            self.clients[number] = Client(self._secret, address, self._selector, resolved)

    def disconnect(self, number: int) -> None:
        """Close the connection to a host."""
        self.clients.pop(number).close()

    def send_message(self, number: int, message: HostMessage) -> None:
        """Send a message to a host, if it is connected."""
        self.clients[number].send(message)

    def listen(self) -> None:
        """Accept connections of the other hosts.

        Raises:
            OSError: If the port is in use.
        """
        self.server = Server(self._secret, self._port, self._selector, self._host_count)

    def stop_listening(self) -> None:
        """Close the connections of the other hosts."""
        if self.server is not None:
            self.server.close()
            self.server = None

    def send_order(self, number: int | None, order: Order) -> None:
        """Send an order to a host that has connected, or to all."""
        if self.server is not None:
            self.server.send(number, order)

    def close(self) -> None:
        """Close all connections."""
        for number in self.numbers:
            self.disconnect(number)
        self.stop_listening()


def raise_file_limit(connections: int) -> int | None:
    """Raise this process's limit of open files to the number that ``connections`` require.

    Returns:
        The limit, if it is too low; None if it suffices.
    """
    required_files = connections + MAX_UNAUTHENTICATED + _RESERVED_FILES
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= required_files:
        return None
    new_limit = (
        required_files if hard_limit == resource.RLIM_INFINITY else min(required_files, hard_limit)
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard_limit))
    return new_limit if new_limit < required_files else None


def listen(port: int) -> socket.socket:
    """Listen on all addresses, with IPv6 if available."""
    any_address = ("", port)
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        with suppress(OSError):
            return socket.create_server(
                any_address, family=family, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(any_address, backlog=_BACKLOG)


def resolve(address: tuple[str, int]) -> list[tuple[int, tuple[object, ...]]]:
    """Return the addresses to connect to; empty while the name cannot be resolved."""
    try:
        results = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(int(family), tuple(target)) for family, _, _, _, target in results]
