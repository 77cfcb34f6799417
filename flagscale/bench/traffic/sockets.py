"""Sockets of flows and probes: opened, and used only after the handshake. Standard library
alone."""

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
"""Time for an address to answer."""
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class AcknowledgedSocket:
    """A socket whose other end has acknowledged a hello."""

    sock: socket.socket
    hello: bytes


def open_listener(settings: WorkerSettings, kind: socket.SocketKind) -> socket.socket:
    """Return a socket bound to the worker's port.

    It takes IPv6 and IPv4 where the host has both. A datagram socket is bound to the host's flow
    address if this host has it, so that answers come from there.

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
        raise OSError(f"port {settings.port} cannot be had: {error.strerror}") from error
    return sock


def connect(
    settings: WorkerSettings, peer: Peer, kind: socket.SocketKind, flow: int, target: int
) -> AcknowledgedSocket:
    """Return a socket to a peer that has acknowledged the hello. Nothing else is sent before.

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
    key = bytes.fromhex(settings.key)
    hello = handshake.make_hello(key, flow, settings.number, target)
    greet = _greet_stream if kind == socket.SOCK_STREAM else _greet_datagrams
    if not greet(sock, key, hello):
        sock.close()
        raise OSError(f"{endpoint} does not answer the hello; nothing else was sent there")
    if kind == socket.SOCK_STREAM:
        # Data still queued at the end must not be sent after it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return AcknowledgedSocket(sock, hello)


def accept_hello(settings: WorkerSettings, sock: socket.socket) -> tuple[int, int] | None:
    """Read a hello from a new connection, acknowledge it, and return its flow and source. A
    connection from outside the session is closed without an answer."""
    sock.settimeout(HANDSHAKE_SECONDS)
    key = bytes.fromhex(settings.key)
    with suppress(OSError):
        hello = receive(sock, handshake.HELLO_SIZE)
        sender = handshake.verify_hello(key, hello, settings.number)
        if sender is not None:
            sock.sendall(handshake.make_acknowledgement(key, hello))
            sock.settimeout(None)
            return sender
    sock.close()
    return None


def receive(sock: socket.socket, size: int) -> bytes:
    """Receive ``size`` bytes, or fewer if the other end closes before."""
    data = b""
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return data


def _bind_to_interface(sock: socket.socket, interface: str | None) -> None:
    if interface is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())


def _resolve(peer: Peer, kind: socket.SocketKind) -> tuple[int, tuple[Any, ...]]:
    """Return the family and address of a peer. Only addresses of a single host are accepted."""
    family, _, _, _, address = socket.getaddrinfo(peer.address, peer.port, type=kind)[0]
    number = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if number.is_multicast or number.is_unspecified or str(number) == "255.255.255.255":
        raise OSError(f"{number} is no address of a host")
    return family, address


def _greet_stream(sock: socket.socket, key: bytes, hello: bytes) -> bool:
    with suppress(OSError):
        sock.sendall(hello)
        answer = receive(sock, handshake.ACKNOWLEDGEMENT_SIZE)
        return handshake.verify_acknowledgement(key, hello, answer)
    return False


def _greet_datagrams(sock: socket.socket, key: bytes, hello: bytes) -> bool:
    """Repeat a hello until it is acknowledged: both datagrams may be lost."""
    sock.settimeout(0.25)
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            sock.send(hello)
            if handshake.verify_acknowledgement(key, hello, sock.recv(1 << 16)):
                return True
            continue
        # Refused at once: the other end may not listen yet.
        time.sleep(0.05)
    return False
