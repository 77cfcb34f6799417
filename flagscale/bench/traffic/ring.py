"""Worker for the probe: a ring of TCP connections among the hosts. Host 0 starts one operation
after the other and times each. Standard library alone.

An operation begins when a token of one byte has gone round, so that every host waits for it. In a
ring all_reduce of n hosts each sends 2(n-1) pieces of an n-th to its neighbour and receives as
many, a piece at a time. An echo is one message to the second host and back.
"""

from __future__ import annotations

import select
import socket
import threading
import time

from flagscale.bench.traffic.messages import TrafficCommand, TrafficEvent, WorkerSettings
from flagscale.bench.traffic.sockets import accept_hello, connect, open_listener
from flagscale.bench.traffic.spec import Probe
from flagscale.hosts.workers.control import ControlChannel

_STALL_SECONDS = 60.0
_REPORT_SECONDS = 0.25
_CONNECT_SECONDS = 20.0


def serve(
    settings: WorkerSettings, channel: ControlChannel[TrafficCommand], congestion: str
) -> None:
    """Run the worker until its process ends.

    Raises:
        OSError: a neighbour cannot be reached, or is lost.
    """
    server = open_listener(settings, socket.SOCK_STREAM)
    channel.open()
    port = server.getsockname()[1]
    channel.send_event(TrafficEvent("ready", port=port, congestion=congestion))
    command = channel.commands.get()
    if command.probe is None:
        raise ValueError("a ring needs a probe")
    ring = _ProbeRing(settings, channel, command, server, command.probe)
    channel.send_event(TrafficEvent("joined"))
    if settings.number == 0:
        _take_samples(channel, ring)
    while True:
        ring.follow()


class _ProbeRing:
    """The two connections of a host, and its share of an operation."""

    def __init__(
        self,
        settings: WorkerSettings,
        channel: ControlChannel[TrafficCommand],
        command: TrafficCommand,
        server: socket.socket,
        probe: Probe,
    ) -> None:
        count, number = len(command.peers), settings.number
        self._probe, self._count = probe, count
        accepted: list[socket.socket] = []

        def accept() -> None:
            while not accepted:
                sock, _ = server.accept()
                sender = accept_hello(settings, sock)
                if sender is not None and sender[1] == (number - 1) % count:
                    accepted.append(sock)

        waiting = threading.Thread(target=channel.report_errors(accept), daemon=True)
        waiting.start()
        following = (number + 1) % count
        peer = command.peers[following]
        self._next = connect(settings, peer, socket.SOCK_STREAM, 0, following).sock
        waiting.join(_CONNECT_SECONDS)
        if not accepted:
            raise OSError("the site before this one has not come")
        self._previous = accepted[0]
        for sock in (self._next, self._previous):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
        piece = -(-probe.size // count) if probe.kind == "ring" else probe.size
        self._outgoing = memoryview(bytes(piece))
        self._incoming = memoryview(bytearray(piece))
        self._token = memoryview(bytearray(1))

    def lead(self) -> float:
        """Run one operation as host 0, and return its seconds."""
        self._exchange(memoryview(b"t"), self._token)
        begin = time.perf_counter()
        if self._probe.kind == "ring":
            self._exchange_pieces()
        else:
            self._exchange(self._outgoing, self._incoming)
        return time.perf_counter() - begin

    def follow(self) -> None:
        """Run one operation as another host, whenever it begins."""
        self._exchange(memoryview(b""), self._token, timeout=None)
        self._exchange(self._token, self._token[:0])
        if self._probe.kind == "ring":
            self._exchange_pieces()
        else:
            self._exchange(memoryview(b""), self._incoming)
            self._exchange(self._outgoing, self._incoming[:0])

    def _exchange_pieces(self) -> None:
        for _ in range(2 * (self._count - 1)):
            self._exchange(self._outgoing, self._incoming)

    def _exchange(
        self, outgoing: memoryview, incoming: memoryview, timeout: float | None = _STALL_SECONDS
    ) -> None:
        """Send to the next host and fill ``incoming`` from the previous one at the same time.
        ``timeout``: seconds without progress."""
        poller = select.poll()
        if outgoing:
            poller.register(self._next, select.POLLOUT)
        if incoming:
            poller.register(self._previous, select.POLLIN)
        sent = received = 0
        while sent < len(outgoing) or received < len(incoming):
            ready = poller.poll(None if timeout is None else 1e3 * timeout)
            if not ready:
                raise OSError(f"the probe has stood still for {_STALL_SECONDS:g} s")
            for descriptor, _ in ready:
                if descriptor == self._next.fileno() and sent < len(outgoing):
                    sent += self._next.send(outgoing[sent:])
                    if sent == len(outgoing):
                        poller.unregister(self._next)
                elif received < len(incoming):
                    count = self._previous.recv_into(incoming[received:])
                    if not count:
                        raise OSError("the probe has lost the site before this one")
                    received += count
                    if received == len(incoming):
                        poller.unregister(self._previous)


def _take_samples(channel: ControlChannel[TrafficCommand], ring: _ProbeRing) -> None:
    """Run as host 0: time operations whenever a ``probe`` command asks for samples."""
    while True:
        command = channel.commands.get()
        if command.action != "probe":
            continue
        last_report, samples = time.monotonic(), list[float]()
        deadline = last_report + command.seconds
        for _ in range(command.samples):
            samples.append(ring.lead())
            now = time.monotonic()
            if now - last_report > _REPORT_SECONDS:
                channel.send_event(TrafficEvent("samples", samples=tuple(samples)))
                samples, last_report = [], now
            if now > deadline:
                break
        channel.send_event(TrafficEvent("samples", samples=tuple(samples)))
        channel.send_event(TrafficEvent("probed"))
