"""Tests of both ends of the agents' connections, on real sockets. The test controls the time."""

from __future__ import annotations

import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS

from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.liveness.messages import (
    FinishJob,
    HostMessage,
    KeepAlive,
    Order,
    StartAttempt,
    StopSignalled,
)
from flagscale.launcher.liveness.network import (
    AUTHENTICATION_SECONDS,
    MAX_UNAUTHENTICATED,
    Client,
    Server,
    raise_file_limit,
)
from flagscale.launcher.liveness.protocol import MAGIC, NONCE_BYTES

SECRET = b"s" * 32


class Link:
    """A server and its clients on one selector."""

    def __init__(self, hosts: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.server = Server(SECRET, 0, self.selector, hosts)
        self.clients: list[Client] = []
        self.heard: list[tuple[int, HostMessage]] = []
        self.orders: list[Order] = []
        self.reading = True

    def connect(self) -> Client:
        address = ("127.0.0.1", self.server.port)
        self.clients.append(Client(SECRET, address, self.selector))
        return self.clients[-1]

    def poll(self, now: float) -> None:
        ready = self.selector.select(0.02)
        self.heard += self.server.poll(ready, now)
        for client in self.clients if self.reading else ():
            self.orders += client.poll(ready, now)

    def poll_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline
            self.poll(time.monotonic())


@pytest.fixture
def link() -> Iterator[Link]:
    network = Link(3)
    network.poll(0.0)
    yield network
    for client in network.clients:
        client.close()
    network.server.close()
    assert not network.selector.get_map()
    network.selector.close()


def make_stop(host: int, number: int = 15) -> StopSignalled:
    return StopSignalled(host, 0, 0.0, number, None)


def test_messages_go_both_ways_to_one_or_to_all(link: Link) -> None:
    for host in (1, 2):
        client = link.connect()
        link.poll_until(lambda client=client: client.is_new_connection)
        client.send(make_stop(host))
    link.poll_until(lambda: len(link.heard) == 2)
    assert sorted(link.heard) == [(1, make_stop(1)), (2, make_stop(2))]
    link.server.send(2, StartAttempt(5))
    link.server.send(0, StartAttempt(6))
    link.server.send(None, KeepAlive())
    link.poll_until(lambda: len(link.orders) == 3)
    assert sorted(link.orders, key=str) == [KeepAlive(), KeepAlive(), StartAttempt(5)]


def test_pending_data_is_sent_when_the_socket_is_writable(link: Link) -> None:
    """The sender does not wait for an agent that does not read."""
    client = link.connect()
    link.poll_until(lambda: client.is_new_connection)
    client.send(make_stop(1))
    link.poll_until(lambda: link.heard)
    order = FinishJob(Failure("h", 1, 1, "r", "x" * 1_000_000, Path("log")))
    link.reading = False
    for _ in range(20):
        link.server.send(1, order)
    link.poll(time.monotonic())
    link.reading = True
    link.poll_until(lambda: len(link.orders) == 20)
    assert link.orders == [order] * 20


def test_reconnected_host_replaces_its_old_connection(link: Link) -> None:
    first = link.connect()
    link.poll_until(lambda: first.is_new_connection)
    first.send(make_stop(1))
    link.poll_until(lambda: link.heard)
    second = link.connect()
    link.poll_until(lambda: second.is_new_connection)
    # The number that a connection has begun with counts.
    second.send(make_stop(1))
    second.send(make_stop(2))
    link.poll_until(lambda: len(link.heard) == 3)
    assert [host for host, _ in link.heard] == [1, 1, 1]
    link.clients.remove(first)
    first.close()
    link.server.send(1, StartAttempt(1))
    link.poll_until(lambda: link.orders)
    assert link.server.has_connections()
    second.close()
    link.poll_until(lambda: not link.server.has_connections())


def test_oldest_of_too_many_unauthenticated_peers_is_disconnected(link: Link) -> None:
    """All hosts of the run may connect at once in addition."""
    count = 3 + MAX_UNAUTHENTICATED
    peers = []
    for _ in range(count + 1):
        peers.append(socket.create_connection(("127.0.0.1", link.server.port)))
        link.poll(0.0)
    link.poll(0.0)
    disconnected = []
    for peer in peers:
        peer.setblocking(False)
        assert len(peer.recv(len(MAGIC) + NONCE_BYTES)) == len(MAGIC) + NONCE_BYTES
        try:
            disconnected.append(peer.recv(1) == b"")
        except BlockingIOError:
            disconnected.append(False)
    assert disconnected == [True] + [False] * count
    # The other connections are closed after the admission timeout.
    link.poll(time.monotonic() + AUTHENTICATION_SECONDS + 1)
    assert peers[-1].recv(1) == b""
    for peer in peers:
        peer.close()


LIMITED = """
import resource, selectors, socket, sys
from flagscale.launcher.liveness.network import Server, raise_file_limit
selector = selectors.DefaultSelector()
server = Server(b"s" * 32, 0, selector, 2)
list(server.poll((), 0.0))
peers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(9)]
used = max(peer.fileno() for peer in peers) + 1
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, used + 200))
listening = lambda: any(key.data is None for key in selector.get_map().values())
list(server.poll(selector.select(9), 0.0))
print(listening(), len(selector.get_map()))
print(raise_file_limit(10), raise_file_limit(1000) == used + 200)
list(server.poll((), 9.0))
list(server.poll(selector.select(9), 9.0))
print(listening(), len(selector.get_map()))
"""


def test_a_server_without_descriptors_does_not_spin_and_recovers() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["False 3", "None True", "True 10"]


def test_sufficient_file_limit_is_unchanged() -> None:
    limits_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_file_limit(10) is None
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits_before
