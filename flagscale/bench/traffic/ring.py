"""Worker for the probe: a ring of TCP connections among the hosts, in which messages are timed.

Runs on every host (:mod:`.worker`) with the standard library alone. Host 0 starts one operation
after the other and times each. Before an operation a token of one byte is passed around the ring,
so that every host is ready. There are two kinds of operations:

- ``ring``: the messages of a ring all_reduce. Each of n hosts sends 2(n-1) blocks of 1/n of the
  size to the next host, and receives as many from the previous one, one block at a time.
- ``echo``: one message to the second host and back.
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
    """Run the worker until its process ends. Arguments as for :func:`.flows.serve`.

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
    if settings.host_index == 0:
        _take_samples(channel, ring)
    while True:
        ring.run_as_follower()


class _ProbeRing:
    """The two connections of a host in the ring, and its part of an operation."""

    def __init__(
        self,
        settings: WorkerSettings,
        channel: ControlChannel[TrafficCommand],
        command: TrafficCommand,
        server: socket.socket,
        probe: Probe,
    ) -> None:
        host_count, host = len(command.peers), settings.host_index
        self._probe, self._host_count = probe, host_count
        accepted: list[socket.socket] = []

        def accept() -> None:
            while not accepted:
                sock, _ = server.accept()
                sender = accept_hello(settings, sock)
                if sender is not None and sender[1] == (host - 1) % host_count:
                    accepted.append(sock)

        accept_thread = threading.Thread(target=channel.report_errors(accept), daemon=True)
        accept_thread.start()
        next_host = (host + 1) % host_count
        peer = command.peers[next_host]
        self._next_socket = connect(settings, peer, socket.SOCK_STREAM, 0, next_host).sock
        accept_thread.join(_CONNECT_SECONDS)
        if not accepted:
            raise OSError(
                f"the previous host of the ring has not connected in {_CONNECT_SECONDS:g} s"
            )
        self._previous_socket = accepted[0]
        for sock in (self._next_socket, self._previous_socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
        block_bytes = -(-probe.size // host_count) if probe.kind == "ring" else probe.size
        self._outgoing = memoryview(bytes(block_bytes))
        self._incoming = memoryview(bytearray(block_bytes))
        self._token = memoryview(bytearray(1))

    def run_as_leader(self) -> float:
        """Start one operation as host 0, and return its duration in seconds."""
        self._exchange(memoryview(b"t"), self._token)
        begin = time.perf_counter()
        if self._probe.kind == "ring":
            self._exchange_blocks()
        else:
            self._exchange(self._outgoing, self._incoming)
        return time.perf_counter() - begin

    def run_as_follower(self) -> None:
        """Wait for the token, and run one operation as any host but 0."""
        self._exchange(memoryview(b""), self._token, stall_seconds=None)
        self._exchange(self._token, self._token[:0])
        if self._probe.kind == "ring":
            self._exchange_blocks()
        else:
            self._exchange(memoryview(b""), self._incoming)
            self._exchange(self._outgoing, self._incoming[:0])

    def _exchange_blocks(self) -> None:
        for _ in range(2 * (self._host_count - 1)):
            self._exchange(self._outgoing, self._incoming)

    def _exchange(
        self,
        outgoing: memoryview,
        incoming: memoryview,
        stall_seconds: float | None = _STALL_SECONDS,
    ) -> None:
        """Send ``outgoing`` to the next host, and fill ``incoming`` from the previous one at the
        same time.

        Raises:
            OSError: no progress for ``stall_seconds`` (None: no limit), or a neighbour is lost.
        """
        poller = select.poll()
        if outgoing:
            poller.register(self._next_socket, select.POLLOUT)
        if incoming:
            poller.register(self._previous_socket, select.POLLIN)
        sent = received = 0
        while sent < len(outgoing) or received < len(incoming):
            ready = poller.poll(None if stall_seconds is None else 1e3 * stall_seconds)
            if not ready:
                raise OSError(f"the probe has made no progress for {_STALL_SECONDS:g} s")
            for descriptor, _ in ready:
                if descriptor == self._next_socket.fileno() and sent < len(outgoing):
                    sent += self._next_socket.send(outgoing[sent:])
                    if sent == len(outgoing):
                        poller.unregister(self._next_socket)
                elif received < len(incoming):
                    count = self._previous_socket.recv_into(incoming[received:])
                    if not count:
                        raise OSError("the previous host of the ring has closed its connection")
                    received += count
                    if received == len(incoming):
                        poller.unregister(self._previous_socket)


def _take_samples(channel: ControlChannel[TrafficCommand], ring: _ProbeRing) -> None:
    """Run as host 0: time operations on every ``sample`` command, until the process ends."""
    while True:
        command = channel.commands.get()
        if command.action != "sample":
            continue
        last_report, samples = time.monotonic(), list[float]()
        deadline = last_report + command.seconds
        for _ in range(command.samples):
            samples.append(ring.run_as_leader())
            now = time.monotonic()
            if now - last_report > _REPORT_SECONDS:
                channel.send_event(TrafficEvent("samples", samples=tuple(samples)))
                samples, last_report = [], now
            if now > deadline:
                break
        channel.send_event(TrafficEvent("samples", samples=tuple(samples)))
        channel.send_event(TrafficEvent("sampled"))
