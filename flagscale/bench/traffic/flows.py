"""Worker for the flows of a host: senders of its outgoing flows, and a sink for the incoming ones.

Runs on the host (:mod:`.worker`) with nothing but the standard library. Each outgoing flow has a
thread that sends its bursts. The sink counts the bytes that arrive and discards them. Flows are TCP
connections or UDP datagrams. The target of datagrams returns a *tally* every second: the bytes it
has received, by which a sender detects a lost target.
"""

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

DATAGRAM_BYTES = 1400
"""Payload of a datagram: below the MTU of Ethernet with a tunnel's headers."""
_CHUNK_BYTES = 64 << 10
_REPORT_SECONDS = 0.5
_MAX_DELAY_SECONDS = 2.0
"""Largest delay that a sender catches up on. With more, the delayed bursts would become one long
burst; the excess is dropped, and counted in ``dropped_seconds``.
"""
_SILENCE_SECONDS = 5.0
"""Time without a tally after which the target of datagrams is considered lost."""
_DATAGRAM_BATCH = 8


def serve(
    settings: WorkerSettings, channel: ControlChannel[TrafficCommand], congestion: str
) -> None:
    """Run the worker until its process ends.

    Args:
        settings: host and session that the worker serves.
        channel: source of commands, and receiver of events.
        congestion: TCP congestion control of this host, for the ``ready`` event.

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
        dropped_seconds = sum(sender.dropped_seconds for sender in senders)
        received = tuple(sink.counts().items())
        channel.send_event(
            TrafficEvent("counts", sent=sent, received=received, dropped_seconds=dropped_seconds)
        )


def _connect_senders(
    settings: WorkerSettings, command: TrafficCommand, pattern: Pattern
) -> list[_FlowSender]:
    """Return a sender for each flow that leaves this host, connected to the flow's target."""
    kind = socket.SOCK_STREAM if pattern.transport == "tcp" else socket.SOCK_DGRAM
    key = bytes.fromhex(settings.session_key)
    return [
        _FlowSender(
            index,
            key,
            pattern,
            connect(settings, command.peers[flow.target], kind, index, flow.target),
        )
        for index, flow in enumerate(command.flows)
        if flow.source == settings.host_index
    ]


def _apply(command: TrafficCommand, senders: list[_FlowSender]) -> None:
    for sender in senders:
        if command.action == "burst" and command.pattern is not None:
            sender.set_pattern(command.pattern)
        elif command.action in ("pause", "resume"):
            sender.set_paused(command.action == "pause")


class _FlowSender:
    """Sender of one flow.

    The sizes of bursts depend on the pattern's seed alone. A new pattern or a pause begins a new
    epoch, in which the times of bursts are counted from its start.
    """

    def __init__(
        self, flow: int, key: bytes, pattern: Pattern, acknowledged: AcknowledgedSocket
    ) -> None:
        self.flow = flow
        self.sent = 0
        self.dropped_seconds = 0.0
        self._sock = acknowledged.sock
        self._hello = acknowledged.hello
        self._key = key
        self._datagrams = pattern.transport == "udp"
        self._bursts = Bursts(pattern, flow)
        self._paused = False
        self._changed = threading.Condition()
        self._epoch = 0
        self._last_tally = time.monotonic()
        self._buffer = memoryview(bytes(_CHUNK_BYTES))
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
                    # This burst was drawn for the previous epoch. The next one follows after a gap.
                    origin, epoch = time.monotonic() - self._bursts.end, self._epoch
                    continue
            delay = time.monotonic() - (origin + due)
            if delay > _MAX_DELAY_SECONDS:
                origin += delay - _MAX_DELAY_SECONDS
                self.dropped_seconds += delay - _MAX_DELAY_SECONDS
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
                lead_seconds = begin + 8 * (size - unsent) / peak - time.monotonic()
                if lead_seconds > 2e-4:
                    time.sleep(lead_seconds)

    def _send_chunk(self, unsent: int) -> int:
        # With a peak rate, a chunk must fit into the small queue of a switch.
        limit = _CHUNK_BYTES if self._bursts.pattern.peak is None else _CHUNK_BYTES // 4
        with suppress(TimeoutError):
            return self._sock.send(self._buffer[: min(unsent, limit)])
        return 0

    def _send_datagrams(self, unsent: int) -> int:
        """Send a few datagrams and return their bytes."""
        self._read_tallies()
        sent = 0
        for _ in range(_DATAGRAM_BATCH):
            size = min(unsent - sent, DATAGRAM_BYTES)
            if not size:
                break
            with suppress(TimeoutError):
                sent += self._sock.send(self._buffer[:size])
        return sent

    def _read_tallies(self) -> None:
        """Read the tallies that have arrived. Raise OSError if there was none for too long."""
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
        # Tallies are not read between two bursts: after a pause they wait in the socket.
        if time.monotonic() - self._last_tally > _SILENCE_SECONDS:
            raise OSError(
                f"flow {self.flow}: its target has not answered for {_SILENCE_SECONDS:g} s"
            )


class _FlowSink:
    """Receiver of the flows that arrive: their bytes are counted and discarded."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._key = bytes.fromhex(settings.session_key)
        self._counts: dict[int, int] = {}

    def counts(self) -> Mapping[int, int]:
        """Return the bytes received by flow."""
        return dict(self._counts)

    def accept(self, server: socket.socket) -> None:
        """Accept connections, and receive from those that pass the handshake."""
        while True:
            sock, _ = server.accept()
            threading.Thread(target=self._receive_stream, args=(sock,), daemon=True).start()

    def _receive_stream(self, sock: socket.socket) -> None:
        sender = accept_hello(self._settings, sock)
        if sender is None:
            return
        flow, _ = sender
        self._counts.setdefault(flow, 0)
        buffer = bytearray(4 * _CHUNK_BYTES)
        with suppress(OSError), sock:
            # MSG_TRUNC: the kernel discards the bytes, and copies nothing.
            while count := sock.recv_into(buffer, 0, socket.MSG_TRUNC):
                self._counts[flow] += count

    def receive_datagrams(self, sock: socket.socket) -> None:
        """Count datagrams from addresses that passed the handshake, and send a tally to each of
        these addresses every second.
        """
        flows: dict[tuple[Any, ...], tuple[int, bytes]] = {}
        sock.settimeout(0.5)
        last_tally = time.monotonic()
        buffer = bytearray(1 << 16)
        while True:
            with suppress(TimeoutError):
                count, address = sock.recvfrom_into(buffer)
                hello = bytes(buffer[:count]) if count == handshake.HELLO_SIZE else b""
                sender = handshake.verify_hello(self._key, hello, self._settings.host_index)
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
