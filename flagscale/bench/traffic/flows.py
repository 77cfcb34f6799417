"""Worker for the flows of a host: one sending thread per outgoing flow, and a sink that counts and
discards what arrives. Standard library alone."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flagscale.bench.traffic import handshake
from flagscale.bench.traffic.distributions import Bursts
from flagscale.bench.traffic.messages import TrafficCommand, TrafficEvent, WorkerSettings
from flagscale.bench.traffic.sockets import (
    AcknowledgedSocket,
    accept_hello,
    connect,
    open_listener,
)
from flagscale.bench.traffic.spec import Pattern
from flagscale.hosts.workers.control import ControlChannel

DATAGRAM = 1400
"""Bytes of a datagram: below the MTU of Ethernet with a tunnel's headers."""
_CHUNK = 64 << 10
_REPORT_SECONDS = 0.5
_LARGEST_DELAY = 2.0
"""Seconds of delayed bursts that are made up for. More would arrive as one long burst."""
_SILENCE_SECONDS = 5.0
"""Seconds without a tally after which the target of datagrams is considered lost."""
_BATCH = 8


def serve(
    settings: WorkerSettings, channel: ControlChannel[TrafficCommand], congestion: str
) -> None:
    """Run the worker until its process ends.

    Raises:
        OSError: a target does not answer, or is lost.
    """
    server = open_listener(settings, socket.SOCK_STREAM)
    port = server.getsockname()[1]
    datagrams = open_listener(replace(settings, port=port), socket.SOCK_DGRAM)
    sink = _FlowSink(settings)
    for receive in (lambda: sink.accept(server), lambda: sink.receive_datagrams(datagrams)):
        threading.Thread(target=channel.report_errors(receive), daemon=True).start()
    channel.open()
    channel.send_event(TrafficEvent("ready", port=port, congestion=congestion))
    command = channel.commands.get()
    if command.pattern is None:
        raise ValueError("flows need a pattern")
    senders = _connect_senders(settings, command, command.pattern)
    channel.send_event(TrafficEvent("joined"))
    for sender in senders:
        sender.set_paused(command.paused)
        threading.Thread(target=channel.report_errors(sender.run), daemon=True).start()
    while True:
        with suppress(queue.Empty):
            _apply(channel.commands.get(timeout=_REPORT_SECONDS), senders)
        sent = tuple((sender.flow, sender.sent) for sender in senders)
        late = sum(sender.late for sender in senders)
        received = tuple(sink.counts().items())
        channel.send_event(TrafficEvent("counts", sent=sent, received=received, late=late))


def _connect_senders(
    settings: WorkerSettings, command: TrafficCommand, pattern: Pattern
) -> list[_FlowSender]:
    """Return the flows that leave this host, each acknowledged by its target."""
    kind = socket.SOCK_STREAM if pattern.transport == "tcp" else socket.SOCK_DGRAM
    key = bytes.fromhex(settings.key)
    return [
        _FlowSender(
            number,
            key,
            pattern,
            connect(settings, command.peers[flow.target], kind, number, flow.target),
        )
        for number, flow in enumerate(command.flows)
        if flow.source == settings.number
    ]


def _apply(command: TrafficCommand, senders: list[_FlowSender]) -> None:
    for sender in senders:
        if command.action == "burst" and command.pattern is not None:
            sender.set_pattern(command.pattern)
        elif command.action in ("pause", "resume"):
            sender.set_paused(command.action == "pause")


class _FlowSender:
    """Sender of one flow.

    Sizes of bursts are drawn in the order of the seed. A new mean, or a pause, restarts the clock
    that bursts are due by.
    """

    def __init__(
        self, flow: int, key: bytes, pattern: Pattern, acknowledged: AcknowledgedSocket
    ) -> None:
        self.flow = flow
        self.sent = 0
        self.late = 0.0
        self._sock = acknowledged.sock
        self._hello = acknowledged.hello
        self._key = key
        self._datagrams = pattern.transport == "udp"
        self._bursts = Bursts(pattern, flow)
        self._paused = False
        self._changed = threading.Condition()
        self._epoch = 0
        self._last_tally = time.monotonic()
        self._buffer = memoryview(bytes(_CHUNK))
        self._sock.settimeout(0.5)

    def set_pattern(self, pattern: Pattern) -> None:
        """Send bursts of another pattern from now on."""
        with self._changed:
            self._bursts.pattern = pattern
            self._epoch += 1
            self._changed.notify()

    def set_paused(self, paused: bool) -> None:
        """Stop sending, or continue."""
        with self._changed:
            self._paused = paused
            self._epoch += 1
            self._changed.notify()

    def run(self) -> None:
        """Send until the process ends.

        Raises:
            OSError: the target is lost.
        """
        origin, epoch = time.monotonic(), 0
        for due, size in self._bursts:
            with self._changed:
                while not self._paused and epoch == self._epoch:
                    remaining = origin + due - time.monotonic()
                    if remaining <= 0 or self._changed.wait(remaining):
                        break
                while self._paused:
                    self._changed.wait()
                if epoch != self._epoch:
                    # This burst was drawn for the previous epoch: the next is due a gap later.
                    origin, epoch = time.monotonic() - self._bursts.end, self._epoch
                    continue
            delay = time.monotonic() - (origin + due)
            if delay > _LARGEST_DELAY:
                origin += delay - _LARGEST_DELAY
                self.late += delay - _LARGEST_DELAY
            self._send_burst(size, epoch)

    def _send_burst(self, size: int, epoch: int) -> None:
        pattern = self._bursts.pattern
        peak = pattern.peak or (pattern.rate if self._datagrams else None)
        begin, unsent = time.monotonic(), size
        while unsent and epoch == self._epoch:
            count = self._send_datagrams(unsent) if self._datagrams else self._send_chunk(unsent)
            unsent -= count
            self.sent += count
            if peak is not None:
                ahead = begin + 8 * (size - unsent) / peak - time.monotonic()
                if ahead > 2e-4:
                    time.sleep(ahead)

    def _send_chunk(self, unsent: int) -> int:
        # With a peak rate, no more at once than a small queue holds.
        limit = _CHUNK if self._bursts.pattern.peak is None else _CHUNK // 4
        with suppress(TimeoutError):
            return self._sock.send(self._buffer[: min(unsent, limit)])
        return 0

    def _send_datagrams(self, unsent: int) -> int:
        """Send a few datagrams and return their bytes."""
        self._read_tallies()
        sent = 0
        for _ in range(_BATCH):
            size = min(unsent - sent, DATAGRAM)
            if not size:
                break
            with suppress(TimeoutError):
                sent += self._sock.send(self._buffer[:size])
        return sent

    def _read_tallies(self) -> None:
        """Raise OSError if the target has been silent for too long."""
        self._sock.setblocking(False)
        try:
            while True:
                message = self._sock.recv(1 << 11)
                if handshake.verify_tally(self._key, self._hello, message) is not None:
                    self._last_tally = time.monotonic()
        except BlockingIOError:
            pass
        finally:
            self._sock.settimeout(0.5)
        # Nobody reads between two bursts: the first tally after a pause is on its way.
        if time.monotonic() - self._last_tally > _SILENCE_SECONDS:
            raise OSError(f"flow {self.flow}: its target has fallen silent")


class _FlowSink:
    """Receiver of the flows that arrive: their bytes are counted and discarded."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._key = bytes.fromhex(settings.key)
        self._counts: dict[int, int] = {}

    def counts(self) -> Mapping[int, int]:
        """Return the bytes received by flow."""
        return dict(self._counts)

    def accept(self, server: socket.socket) -> None:
        """Accept connections, and receive from those that pass the handshake."""
        while True:
            sock, _ = server.accept()
            threading.Thread(target=self._drain, args=(sock,), daemon=True).start()

    def _drain(self, sock: socket.socket) -> None:
        sender = accept_hello(self._settings, sock)
        if sender is None:
            return
        flow, _ = sender
        self._counts.setdefault(flow, 0)
        buffer = bytearray(4 * _CHUNK)
        with suppress(OSError), sock:
            # MSG_TRUNC: the kernel discards the bytes, and copies nothing.
            while count := sock.recv_into(buffer, 0, socket.MSG_TRUNC):
                self._counts[flow] += count

    def receive_datagrams(self, sock: socket.socket) -> None:
        """Count datagrams from addresses that passed the handshake, and send these a tally every
        second."""
        flows: dict[tuple[Any, ...], tuple[int, bytes]] = {}
        sock.settimeout(0.5)
        last_tally = time.monotonic()
        buffer = bytearray(1 << 16)
        while True:
            with suppress(TimeoutError):
                count, address = sock.recvfrom_into(buffer)
                hello = bytes(buffer[:count]) if count == handshake.HELLO_SIZE else b""
                sender = handshake.verify_hello(self._key, hello, self._settings.number)
                if sender is not None:
                    flows[address] = (sender[0], hello)
                    self._counts.setdefault(sender[0], 0)
                    sock.sendto(handshake.make_acknowledgement(self._key, hello), address)
                elif address in flows:
                    self._counts[flows[address][0]] += count
            if time.monotonic() - last_tally > 1:
                last_tally = time.monotonic()
                for address, (flow, hello) in flows.items():
                    with suppress(OSError):
                        tally = handshake.make_tally(self._key, hello, self._counts[flow])
                        sock.sendto(tally, address)
