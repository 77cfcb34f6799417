"""Sockets of the flows and the probe, which carry data only after the :mod:`.handshake`.

Used by the workers on the hosts (:mod:`.flows`, :mod:`.ring`), with the standard library alone.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flagscale.bench.traffic import handshake
from flagscale.bench.traffic.messages import Peer, WorkerSettings

HANDSHAKE_SECONDS = 5.0
"""Time within which an address must acknowledge the hello."""
_LINGER_RESET = struct.pack("ii", 1, 0)
"""``SO_LINGER`` with 0 seconds: closing resets the connection and discards queued data."""


@dataclass(frozen=True)
class AcknowledgedSocket:
    """A socket whose other end has acknowledged a hello."""

    sock: socket.socket
    hello: bytes


def open_listener(settings: WorkerSettings, kind: socket.SocketKind) -> socket.socket:
    """Return a socket bound to the worker's port; a stream socket listens.

    It accepts IPv6 and IPv4 where the host has both. A datagram socket is bound to the host's flow
    address if this host has that address, so that answers are sent from there.

    Raises:
        OSError: the port is taken, or not permitted.
    """
    if kind == socket.SOCK_DGRAM and settings.address:
        with suppress(OSError):
            family, address = _resolve(Peer(settings.address, settings.port), kind)
            sock = socket.socket(family, kind)
            _bind_to_interface(sock, settings.interface)
            sock.bind(address)
            return sock
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    sock = socket.socket(family, kind)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind_to_interface(sock, settings.interface)
        sock.bind(("", settings.port))
        if kind == socket.SOCK_STREAM:
            sock.listen(256)
    except OSError as error:
        sock.close()
        raise OSError(f"port {settings.port} is not available: {error.strerror}") from error
    return sock


def connect(
    settings: WorkerSettings, peer: Peer, kind: socket.SocketKind, flow: int, target: int
) -> AcknowledgedSocket:
    """Connect to a peer and complete the handshake for a flow to host ``target``. Nothing but the
    hello is sent.

    Raises:
        OSError: no answer, or one from outside the session; the message has the address.
    """
    endpoint = f"{peer.address} port {peer.port}"
    try:
        family, address = _resolve(peer, kind)
        sock = socket.socket(family, kind)
        sock.settimeout(HANDSHAKE_SECONDS)
        _bind_to_interface(sock, settings.interface)
        sock.connect(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"{endpoint} cannot be reached: {reason}; nothing was sent there") from error
    key = bytes.fromhex(settings.session_key)
    hello = handshake.make_hello(key, flow, settings.host_index, target)
    exchange_hello = _send_hello_stream if kind == socket.SOCK_STREAM else _send_hello_datagrams
    if not exchange_hello(sock, key, hello):
        sock.close()
        raise OSError(f"{endpoint} does not answer the hello; nothing else was sent there")
    if kind == socket.SOCK_STREAM:
        # Data that is still queued when the session ends must not be sent afterwards.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return AcknowledgedSocket(sock, hello)


def accept_hello(settings: WorkerSettings, sock: socket.socket) -> tuple[int, int] | None:
    """Read a hello from a new connection, acknowledge it, and return its flow and source. A
    connection from outside the session is closed without an answer."""
    sock.settimeout(HANDSHAKE_SECONDS)
    key = bytes.fromhex(settings.session_key)
    with suppress(OSError):
        hello = receive(sock, handshake.HELLO_SIZE)
        sender = handshake.verify_hello(key, hello, settings.host_index)
        if sender is not None:
            sock.sendall(handshake.make_acknowledgement(key, hello))
            sock.settimeout(None)
            return sender
    sock.close()
    return None


def receive(sock: socket.socket, size: int) -> bytes:
    """Receive ``size`` bytes, or fewer if the other end closes before."""
    data = b""
    while len(data) < size and (chunk := sock.recv(size - len(data))):
        data += chunk
    return data


def _bind_to_interface(sock: socket.socket, interface: str | None) -> None:
    if interface is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())


def _resolve(peer: Peer, kind: socket.SocketKind) -> tuple[int, tuple[Any, ...]]:
    """Return the socket family and address of a peer.

    Raises:
        OSError: the name has no address, or one that is not a single host's, such as multicast.
    """
    family, _, _, _, address = socket.getaddrinfo(peer.address, peer.port, type=kind)[0]
    ip_address = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if ip_address.is_multicast or ip_address.is_unspecified or str(ip_address) == "255.255.255.255":
        raise OSError(f"{ip_address} is not the address of a single host")
    return family, address


def _send_hello_stream(sock: socket.socket, key: bytes, hello: bytes) -> bool:
    with suppress(OSError):
        sock.sendall(hello)
        acknowledgement = receive(sock, handshake.ACKNOWLEDGEMENT_SIZE)
        return handshake.verify_acknowledgement(key, hello, acknowledgement)
    return False


def _send_hello_datagrams(sock: socket.socket, key: bytes, hello: bytes) -> bool:
    """Repeat a hello until it is acknowledged: either datagram may be lost."""
    sock.settimeout(0.25)
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            sock.send(hello)
            if handshake.verify_acknowledgement(key, hello, sock.recv(1 << 16)):
                return True
            continue
        # If the port was refused at once, the other end may not listen yet.
        time.sleep(0.05)
    return False
