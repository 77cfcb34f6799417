"""Agreement of the hosts of a run before it starts: run id, names, and numbers of ranks.

The host with rank 0 listens at the port that its agent uses later. Every other host connects,
proves that it has the secret (:mod:`flagscale.launcher.liveness.protocol`), and introduces itself.
Once all hosts are there, each gets the same :class:`Agreement`; or all get the reason why there is
none.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from flagscale.errors import JobError
from flagscale.files import to_plain
from flagscale.hosts.names import list_first
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.liveness.network import Peer, ReadyEvents, listen, resolve
from flagscale.launcher.liveness.protocol import Channel
from flagscale.launcher.liveness.secret import SECRET_VARIABLE
from flagscale.launcher.runners.cloud.position import Position
from flagscale.records import from_record

_POLL_SECONDS = 0.25
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 1.0
# Time after which a waiting host prints what it waits for, and between two such lines.
_REPORT_SECONDS = 15.0
# Time in which hosts that come after a refusal are still told its reason.
_REFUSAL_SECONDS = 5.0

_Message = TypeVar("_Message")


@dataclass(frozen=True)
class Introduction:
    """Description of a host, which it sends to the host with rank 0."""

    node_rank: int
    nnodes: int
    name: str
    nproc: int
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that have to be equal on all hosts, as text by key."""
    problem: str = ""
    """Reason why this host cannot start; empty if it can."""


@dataclass(frozen=True)
class Agreement:
    """Id of a run, and the name and number of ranks of each host; equal on all hosts."""

    run_id: str
    names: tuple[str, ...]
    nprocs: tuple[int, ...]


@dataclass(frozen=True)
class _Reply:
    """Message of the host with rank 0. Exactly one field is set."""

    agreement: Agreement | None
    refusal: str


def agree(
    own: Introduction,
    position: Position,
    port: int,
    secret: bytes,
    run_id: str,
    timeout: float,
) -> Agreement:
    """Return what the hosts of a run have agreed on.

    Args:
        own: Introduction of this host.
        position: Position of this host.
        port: Port of the host with rank 0.
        secret: Secret that all hosts share.
        run_id: Id of the run, if this host has rank 0.
        timeout: Seconds within which all hosts have to come.

    Raises:
        JobError: If hosts are missing after that time, or do not fit together.
    """
    deadline = time.monotonic() + timeout
    if own.node_rank == 0:
        return _Host(own, port, secret, run_id, deadline).gather()
    # The host with rank 0 is the first to give up, because it knows which hosts are missing.
    return _ask(own, (position.master_addr, port), secret, deadline + _REFUSAL_SECONDS)


class _Host:
    """The end with rank 0: collects the introductions of all hosts."""

    def __init__(
        self, own: Introduction, port: int, secret: bytes, run_id: str, deadline: float
    ) -> None:
        self._introductions = {0: own}
        self._own = own
        self._port = port
        self._secret = secret
        self._run_id = run_id
        self._deadline = deadline
        self._peers: dict[Peer, int | None] = {}
        """Connections, with the rank of the host behind each, once it is known."""
        self._selector = selectors.DefaultSelector()
        self._stranger_count = 0
        self._refusal = own.problem and describe_problem(own)

    def gather(self) -> Agreement:
        with ExitStack() as stack:
            stack.enter_context(self._selector)
            try:
                listener = stack.enter_context(listen(self._port))
            except OSError as error:
                raise JobError(
                    f"the hosts cannot connect to port {self._port} of this host: {error.strerror}",
                    hint="set experiment.runner.liveness_port to another one",
                ) from None
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
            stack.callback(self._close)
            report = _Reporter(self._missing_hosts)
            while len(self._introductions) < self._own.nnodes and not self._refusal:
                if time.monotonic() > self._deadline:
                    self._refusal = (
                        f"{self._missing_hosts()} did not come in time{self._strangers()}"
                    )
                    break
                report.print_if_due()
                self._poll(listener)
            if self._refusal:
                self._refuse(listener)
                raise JobError(self._refusal)
            agreement = self._conclude()
            for peer in list(self._peers):
                _send(peer, _Reply(agreement, ""))
            self._await_goodbyes()
            return agreement

    def _conclude(self) -> Agreement:
        hosts = [self._introductions[rank] for rank in range(self._own.nnodes)]
        counts = Counter(host.name for host in hosts)
        names = (h.name if counts[h.name] == 1 else f"{h.name}-{h.node_rank}" for h in hosts)
        return Agreement(self._run_id, tuple(names), tuple(host.nproc for host in hosts))

    def _missing_hosts(self) -> str:
        ranks = [rank for rank in range(self._own.nnodes) if rank not in self._introductions]
        return f"{len(ranks)} of {self._own.nnodes} hosts (rank {list_first(ranks)})"

    def _strangers(self) -> str:
        if not self._stranger_count:
            return ""
        return (
            f"; {self._stranger_count} connection(s) without this job's secret "
            f"({SECRET_VARIABLE}) were closed"
        )

    def _poll(self, listener: socket.socket) -> None:
        now = time.monotonic()
        for key, events in self._selector.select(_POLL_SECONDS):
            if key.fileobj is listener:
                with suppress(OSError):
                    sock, _ = listener.accept()
                    channel = Channel(self._secret, is_server=True)
                    self._peers[Peer(sock, channel, self._selector)] = None
            elif isinstance(key.data, Peer):
                self._read(key.data, events)
        for peer in [peer for peer in self._peers if peer.closed or peer.is_overdue(now)]:
            self._drop(peer)

    def _read(self, peer: Peer, events: int) -> None:
        peer.flush()
        payloads = peer.read() if events & selectors.EVENT_READ and not peer.closed else []
        for payload in payloads:
            introduction = _decode(Introduction, payload)
            if introduction is None or self._refusal:
                continue
            self._refusal = self._find_conflict(introduction)
            self._introductions.setdefault(introduction.node_rank, introduction)
            self._peers[peer] = introduction.node_rank

    def _find_conflict(self, other: Introduction) -> str:
        """Return why a host does not fit the ones that are there; empty if it does."""
        if other.problem:
            return describe_problem(other)
        if other.nnodes != self._own.nnodes:
            return (
                f"{_label(other)} is one of {other.nnodes} host(s), {_label(self._own)} one of "
                f"{self._own.nnodes}: experiment.runner.nnodes has to be equal on all hosts"
            )
        if not 0 <= other.node_rank < self._own.nnodes or other.node_rank in self._introductions:
            first = self._introductions.get(other.node_rank)
            also = f" and {first.name}" if first else ""
            return f"{other.name}{also} have rank {other.node_rank}: each host needs its own rank"
        keys = sorted({*other.settings, *self._own.settings})
        differing = [k for k in keys if other.settings.get(k) != self._own.settings.get(k)]
        if differing:
            key = differing[0]
            values = " and ".join(
                f"{host.settings.get(key)} on {_label(host)}" for host in (self._own, other)
            )
            more = f"; {len(differing) - 1} more" if len(differing) > 1 else ""
            return f"the hosts have different settings: {key} is {values}{more}"
        return ""

    def _refuse(self, listener: socket.socket) -> None:
        """Send the refusal to the hosts that are there, and to those that come soon."""
        end = time.monotonic() + _REFUSAL_SECONDS
        told: set[Peer] = set()
        while time.monotonic() < end and len(told) < self._own.nnodes - 1:
            for peer in [p for p in self._peers if p.channel.is_authenticated and p not in told]:
                told.add(peer)
                _send(peer, _Reply(None, self._refusal))
            self._poll(listener)
        self._await_goodbyes()

    def _await_goodbyes(self) -> None:
        """Wait until the hosts have read the reply and closed their connections."""
        end = time.monotonic() + _REFUSAL_SECONDS
        while time.monotonic() < end and any(rank is not None for rank in self._peers.values()):
            for key, events in self._selector.select(_POLL_SECONDS):
                if isinstance(key.data, Peer):
                    self._read(key.data, events)
            for peer in [peer for peer in self._peers if peer.closed]:
                del self._peers[peer]

    def _drop(self, peer: Peer) -> None:
        """Forget a connection, and the host behind it: it may come again."""
        peer.close()
        rank = self._peers.pop(peer)
        self._stranger_count += not peer.channel.is_authenticated
        if rank is not None and not self._refusal:
            self._introductions.pop(rank, None)

    def _close(self) -> None:
        for peer in self._peers:
            peer.close()


def _ask(own: Introduction, address: tuple[str, int], secret: bytes, deadline: float) -> Agreement:
    """Introduce this host to the one with rank 0, and return its reply."""
    trouble = "its name cannot be resolved"
    report = _Reporter(lambda: f"the host with rank 0 at {address[0]}:{address[1]} ({trouble})")
    while time.monotonic() < deadline:
        report.print_if_due()
        sock, trouble = _connect(address, trouble)
        if sock is not None:
            reply, trouble = _exchange(own, sock, secret, deadline, report)
            if reply is not None and reply.agreement is not None:
                return reply.agreement
            if reply is not None:
                raise JobError(reply.refusal)
        time.sleep(_RETRY_SECONDS)
    raise JobError(
        f"the host with rank 0 was not reached at {address[0]}:{address[1]}: {trouble}",
        hint="every host has to reach this port of the host with rank 0 (experiment.runner."
        "liveness_port; by default the one after master_port) and master_port",
    )


def _connect(address: tuple[str, int], trouble: str) -> tuple[socket.socket | None, str]:
    for family, target in resolve(address):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(_CONNECT_SECONDS)
        try:
            sock.connect(target)
        except OSError as error:
            sock.close()
            trouble = (error.strerror or str(error)).lower()
        else:
            return sock, "it closed the connection"
    return None, trouble


def _exchange(
    own: Introduction,
    sock: socket.socket,
    secret: bytes,
    deadline: float,
    report: _Reporter,
) -> tuple[_Reply | None, str]:
    """Send the introduction, and return the reply; or None and what kept it from coming."""
    with selectors.DefaultSelector() as selector:
        peer = Peer(sock, Channel(secret, is_server=False), selector)
        peer.send(_encode(own))
        try:
            while time.monotonic() < deadline and not peer.closed:
                if peer.is_overdue(time.monotonic()):
                    return None, "it does not answer as a host of this run"
                report.print_if_due()
                ready: ReadyEvents = selector.select(_POLL_SECONDS)
                for _, events in ready:
                    peer.flush()
                    payloads = peer.read() if events & selectors.EVENT_READ else []
                    for reply in filter(None, (_decode(_Reply, p) for p in payloads)):
                        return reply, ""
            if not peer.channel.is_authenticated:
                return None, f"it has another secret ({SECRET_VARIABLE}) or is of another job"
            return None, "it closed the connection"
        finally:
            peer.close()


class _Reporter:
    """Prints from time to time what this host waits for."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._due = time.monotonic() + _REPORT_SECONDS

    def print_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + 4 * _REPORT_SECONDS
            log_line(f"waiting for {self._describe()}")


def _label(host: Introduction) -> str:
    return f"{host.name} (rank {host.node_rank})"


def describe_problem(host: Introduction) -> str:
    """Return the sentence about a host that cannot start."""
    return f"{_label(host)} cannot start: {host.problem}"


def _send(peer: Peer, reply: _Reply) -> None:
    if not peer.closed:
        peer.send(_encode(reply))


def _encode(message: object) -> bytes:
    return json.dumps(to_plain(message)).encode()


def _decode(kind: type[_Message], payload: bytes) -> _Message | None:
    try:
        return from_record(kind, json.loads(payload))
    except ValueError:
        return None
