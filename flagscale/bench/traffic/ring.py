"""The probe's process on a host: a ring of TCP connections among the sites, over which site 0
starts one operation after the other and takes its time. Standard library alone.

An operation begins when a token of one byte has gone round, so that every site waits for it. In a
ring all_reduce of n sites each sends 2(n-1) pieces of an n-th to its neighbour and gets as many, a
piece at a time; an echo is one message to the second site and back.
"""

from __future__ import annotations

import select
import socket
import threading
import time

from flagscale.bench.traffic.messages import Said, Word
from flagscale.bench.traffic.sockets import connect, listener, welcome
from flagscale.bench.traffic.spec import Probe
from flagscale.bench.traffic.worker_control import Post

_PATIENCE = 60.0
_TELL_SECONDS = 0.25
_MEET_SECONDS = 20.0


def serve(post: Post) -> None:
    """The life of the process.

    Raises:
        OSError: a neighbour cannot be reached, or is lost.
    """
    server = listener(post.order, socket.SOCK_STREAM)
    post.open(server.getsockname()[1])
    word = post.words.get()
    if word.probe is None:
        raise ValueError("a ring needs a probe")
    ring = _Ring(post, word, server, word.probe)
    post.say(Said("joined"))
    if post.order.number == 0:
        _lead(post, ring)
    while True:
        ring.follow()


class _Ring:
    """The two connections of a site, and its share of an operation."""

    def __init__(self, post: Post, word: Word, server: socket.socket, probe: Probe) -> None:
        count, own = len(word.peers), post.order.number
        self._probe, self._count = probe, count
        found: list[socket.socket] = []

        def accept() -> None:
            while not found:
                made, _ = server.accept()
                who = welcome(post.order, made)
                if who is not None and who[1] == (own - 1) % count:
                    found.append(made)

        waiting = threading.Thread(target=post.guarded(accept), daemon=True)
        waiting.start()
        after = (own + 1) % count
        self._next = connect(post.order, word.peers[after], socket.SOCK_STREAM, 0, after).sock
        waiting.join(_MEET_SECONDS)
        if not found:
            raise OSError("the site before this one has not come")
        self._before = found[0]
        for sock in (self._next, self._before):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
        piece = -(-probe.size // count) if probe.kind == "ring" else probe.size
        self._out, self._into = memoryview(bytes(piece)), memoryview(bytearray(piece))
        self._token = memoryview(bytearray(1))

    def lead(self) -> float:
        """One operation of site 0: its seconds."""
        self._exchange(memoryview(b"t"), self._token)
        begin = time.perf_counter()
        if self._probe.kind == "ring":
            self._pieces()
        else:
            self._exchange(self._out, self._into)
        return time.perf_counter() - begin

    def follow(self) -> None:
        """One operation of another site, whenever it comes."""
        self._exchange(memoryview(b""), self._token, patience=None)
        self._exchange(self._token, self._token[:0])
        if self._probe.kind == "ring":
            self._pieces()
        else:
            self._exchange(memoryview(b""), self._into)
            self._exchange(self._out, self._into[:0])

    def _pieces(self) -> None:
        for _ in range(2 * (self._count - 1)):
            self._exchange(self._out, self._into)

    def _exchange(
        self, out: memoryview, into: memoryview, patience: float | None = _PATIENCE
    ) -> None:
        """Send ``out`` to the next site and fill ``into`` from the one before, at the same time."""
        poller = select.poll()
        if out:
            poller.register(self._next, select.POLLOUT)
        if into:
            poller.register(self._before, select.POLLIN)
        sent = got = 0
        while sent < len(out) or got < len(into):
            ready = poller.poll(None if patience is None else 1e3 * patience)
            if not ready:
                raise OSError(f"the probe has stood still for {_PATIENCE:g} s")
            for descriptor, _ in ready:
                if descriptor == self._next.fileno() and sent < len(out):
                    sent += self._next.send(out[sent:])
                    if sent == len(out):
                        poller.unregister(self._next)
                elif got < len(into):
                    count = self._before.recv_into(into[got:])
                    if not count:
                        raise OSError("the probe has lost the site before this one")
                    got += count
                    if got == len(into):
                        poller.unregister(self._before)


def _lead(post: Post, ring: _Ring) -> None:
    """Site 0's life: it takes times when it is asked for them."""
    while True:
        word = post.words.get()
        if word.do != "probe":
            continue
        deadline, told, times = time.monotonic() + word.seconds, time.monotonic(), list[float]()
        for _ in range(word.samples):
            times.append(ring.lead())
            now = time.monotonic()
            if now - told > _TELL_SECONDS:
                post.say(Said("samples", samples=tuple(times)))
                times, told = [], now
            if now > deadline:
                break
        post.say(Said("samples", samples=tuple(times)))
        post.say(Said("probed"))
