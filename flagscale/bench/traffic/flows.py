"""The flows' process on a host: a thread a flow that leaves it, and what takes the flows that come
and throws them away. Standard library alone."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flagscale.bench.traffic import handshake as greeting
from flagscale.bench.traffic.distributions import Bursts
from flagscale.bench.traffic.messages import Peer, Said, Word
from flagscale.bench.traffic.sockets import Greeted, connect, listener, welcome
from flagscale.bench.traffic.spec import Flow, Pattern
from flagscale.bench.traffic.worker_control import Post

DATAGRAM = 1400
"""Bytes of one: below the MTU of Ethernet with a tunnel's headers."""
_CHUNK = 64 << 10
_TELL_SECONDS = 0.5
_MOST_LATE = 2.0
"""Seconds of bursts that are made up for. More would come as one long burst."""
_SILENCE = 5.0
"""Without a tally the other end of datagrams is taken for gone."""
_BATCH = 8


def serve(post: Post) -> None:
    """The life of the process.

    Raises:
        OSError: a target does not answer, or is lost.
    """
    server = listener(post.order, socket.SOCK_STREAM)
    port = server.getsockname()[1]
    datagrams = listener(replace(post.order, port=port), socket.SOCK_DGRAM)
    sink = _Sink(post)
    for work in (lambda: sink.accept(server), lambda: sink.collect(datagrams)):
        threading.Thread(target=post.guarded(work), daemon=True).start()
    post.open(port)
    word = post.words.get()
    if word.pattern is None:
        raise ValueError("flows need a pattern")
    sources = _join(post, word, word.pattern)
    post.say(Said("joined"))
    for source in sources:
        source.hold(word.held)
        threading.Thread(target=post.guarded(source.run), daemon=True).start()
    while True:
        with suppress(queue.Empty):
            _obey(post.words.get(timeout=_TELL_SECONDS), sources)
        sent = tuple((source.flow, source.sent) for source in sources)
        late = sum(source.late for source in sources)
        post.say(Said("counts", sent=sent, received=tuple(sink.counts().items()), late=late))


def _join(post: Post, word: Word, pattern: Pattern) -> list[_Source]:
    """The flows that leave this site, each greeted by its target."""
    kind = socket.SOCK_STREAM if pattern.transport == "tcp" else socket.SOCK_DGRAM
    own = [(n, flow) for n, flow in enumerate(word.flows) if flow.source == post.order.number]
    return [_Source(post, n, pattern, _reach(post, n, flow, word.peers, kind)) for n, flow in own]


def _reach(
    post: Post, number: int, flow: Flow, peers: tuple[Peer, ...], kind: socket.SocketKind
) -> Greeted:
    return connect(post.order, peers[flow.target], kind, number, flow.target)


def _obey(word: Word, sources: list[_Source]) -> None:
    for source in sources:
        if word.do == "burst" and word.pattern is not None:
            source.change(word.pattern)
        elif word.do in ("pause", "resume"):
            source.hold(word.do == "pause")


class _Source:
    """One flow that leaves this site. Sizes are drawn in the order of the seed; a change of their
    mean, or a pause, begins the times anew."""

    def __init__(self, post: Post, flow: int, pattern: Pattern, greeted: Greeted) -> None:
        self.flow, self.sent, self.late = flow, 0, 0.0
        self._sock, self._hello = greeted.sock, greeted.message
        self._key = bytes.fromhex(post.order.key)
        self._datagrams = pattern.transport == "udp"
        self._bursts = Bursts(pattern, flow)
        self._held = False
        self._changed = threading.Condition()
        self._turn = 0
        self._heard = time.monotonic()
        self._buffer = memoryview(bytes(_CHUNK))
        self._sock.settimeout(0.5)

    def change(self, pattern: Pattern) -> None:
        """Other bursts from now on."""
        with self._changed:
            self._bursts.pattern = pattern
            self._turn += 1
            self._changed.notify()

    def hold(self, held: bool) -> None:
        """Send nothing, or go on."""
        with self._changed:
            self._held = held
            self._turn += 1
            self._changed.notify()

    def run(self) -> None:
        """Send until the process ends.

        Raises:
            OSError: the other end is gone.
        """
        origin, turn = time.monotonic(), 0
        for due, size in self._bursts:
            with self._changed:
                while not self._held and turn == self._turn:
                    left = origin + due - time.monotonic()
                    if left <= 0 or self._changed.wait(left):
                        break
                while self._held:
                    self._changed.wait()
                if turn != self._turn:
                    # This one was drawn for what is over: the next is due a gap later.
                    origin, turn = time.monotonic() - self._bursts.end, self._turn
                    continue
            behind = time.monotonic() - (origin + due)
            if behind > _MOST_LATE:
                origin += behind - _MOST_LATE
                self.late += behind - _MOST_LATE
            self._send(size, turn)

    def _send(self, size: int, turn: int) -> None:
        pattern = self._bursts.pattern
        peak = pattern.peak or (pattern.rate if self._datagrams else None)
        begin, left = time.monotonic(), size
        while left and turn == self._turn:
            count = self._datagram(left) if self._datagrams else self._chunk(left)
            left -= count
            self.sent += count
            if peak is not None:
                ahead = begin + 8 * (size - left) / peak - time.monotonic()
                if ahead > 2e-4:
                    time.sleep(ahead)

    def _chunk(self, left: int) -> int:
        # With a peak, no more at once than a small queue holds.
        most = _CHUNK if self._bursts.pattern.peak is None else _CHUNK // 4
        with suppress(TimeoutError):
            return self._sock.send(self._buffer[: min(left, most)])
        return 0

    def _datagram(self, left: int) -> int:
        """A few datagrams; bytes that were sent."""
        self._listen()
        sent = 0
        for _ in range(_BATCH):
            size = min(left - sent, DATAGRAM)
            if not size:
                break
            with suppress(TimeoutError):
                sent += self._sock.send(self._buffer[:size])
        return sent

    def _listen(self) -> None:
        """Raise OSError where the target has fallen silent."""
        self._sock.setblocking(False)
        try:
            while True:
                said = self._sock.recv(1 << 11)
                if greeting.tallied(self._key, self._hello, said) is not None:
                    self._heard = time.monotonic()
        except BlockingIOError:
            pass
        finally:
            self._sock.settimeout(0.5)
        # Between two bursts nobody listens: the first tally after a pause is on its way.
        if time.monotonic() - self._heard > _SILENCE:
            raise OSError(f"flow {self.flow}: its target has fallen silent")


class _Sink:
    """What comes to this site: counted, by flow, and thrown away."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._key = bytes.fromhex(post.order.key)
        self._counts: dict[int, int] = {}

    def counts(self) -> Mapping[int, int]:
        """Bytes by flow."""
        return dict(self._counts)

    def accept(self, server: socket.socket) -> None:
        """Take connections that say hello."""
        while True:
            found, _ = server.accept()
            threading.Thread(target=self._drain, args=(found,), daemon=True).start()

    def _drain(self, found: socket.socket) -> None:
        who = welcome(self._post.order, found)
        if who is None:
            return
        flow, _ = who
        self._counts.setdefault(flow, 0)
        buffer = bytearray(4 * _CHUNK)
        with suppress(OSError), found:
            # The kernel throws the bytes away, and copies nothing.
            while count := found.recv_into(buffer, 0, socket.MSG_TRUNC):
                self._counts[flow] += count

    def collect(self, sock: socket.socket) -> None:
        """Take datagrams from addresses that said hello, and tell these every second how many."""
        known: dict[tuple[Any, ...], tuple[int, bytes]] = {}
        sock.settimeout(0.5)
        told = time.monotonic()
        buffer = bytearray(1 << 16)
        while True:
            with suppress(TimeoutError):
                count, address = sock.recvfrom_into(buffer)
                message = bytes(buffer[:count]) if count == greeting.HELLO_SIZE else b""
                who = greeting.heard(self._key, message, self._post.order.number)
                if who is not None:
                    known[address] = (who[0], message)
                    self._counts.setdefault(who[0], 0)
                    sock.sendto(greeting.answer(self._key, message), address)
                elif address in known:
                    self._counts[known[address][0]] += count
            if time.monotonic() - told > 1:
                told = time.monotonic()
                for address, (flow, message) in known.items():
                    with suppress(OSError):
                        counted = greeting.tally(self._key, message, self._counts[flow])
                        sock.sendto(counted, address)
