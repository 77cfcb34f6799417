"""Sockets of flows and probes: opened, and greeted before anything else is said. Standard library
alone."""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from flagscale.bench.traffic import handshake as greeting
from flagscale.bench.traffic.messages import Order, Peer

HELLO_SECONDS = 5.0
"""For an address to answer."""
_RESET = struct.pack("ii", 1, 0)


def listener(order: Order, kind: socket.SocketKind) -> socket.socket:
    """A socket at the order's port, of IPv6 and IPv4 where the host has both; for datagrams at the
    site's own address where it is one of this host, so that answers come from there.

    Raises:
        OSError: the port is taken, or may not be had.
    """
    if kind == socket.SOCK_DGRAM and order.address:
        with suppress(OSError):
            family, address = _resolve(Peer(order.address, order.port), kind)
            made = socket.socket(family, kind)
            _bind_to(made, order.interface)
            made.bind(address)
            return made
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    made = socket.socket(family, kind)
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if kind == socket.SOCK_STREAM:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind_to(made, order.interface)
        made.bind(("", order.port))
        if kind == socket.SOCK_STREAM:
            made.listen(256)
    except OSError as error:
        made.close()
        raise OSError(f"port {order.port} cannot be had: {error.strerror}") from error
    return made


def connect(order: Order, peer: Peer, kind: socket.SocketKind, flow: int, target: int) -> Greeted:
    """A socket to a peer that has answered the hello. Until then it has got nothing else.

    Raises:
        OSError: nobody answers there, or somebody else; in a sentence with the address.
    """
    where = f"{peer.address} port {peer.port}"
    try:
        family, address = _resolve(peer, kind)
        made = socket.socket(family, kind)
        made.settimeout(HELLO_SECONDS)
        _bind_to(made, order.interface)
        made.connect(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"{where} cannot be reached: {reason}; nothing was sent there") from error
    key = bytes.fromhex(order.key)
    message = greeting.hello(key, flow, order.number, target)
    answered = _greet_stream if kind == socket.SOCK_STREAM else _greet_datagrams
    if not answered(made, key, message):
        made.close()
        raise OSError(f"{where} does not answer the hello; nothing else was sent there")
    if kind == socket.SOCK_STREAM:
        # What is still queued at the end is not to be sent after it.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Greeted(made, message)


class Greeted:
    """A socket and the hello that its other end has answered."""

    def __init__(self, sock: socket.socket, message: bytes) -> None:
        self.sock, self.message = sock, message


def welcome(order: Order, found: socket.socket) -> tuple[int, int] | None:
    """The flow and the source of a connection that says hello, which is answered. A stranger's is
    closed without a word."""
    found.settimeout(HELLO_SECONDS)
    key = bytes.fromhex(order.key)
    with suppress(OSError):
        message = receive(found, greeting.HELLO_SIZE)
        who = greeting.heard(key, message, order.number)
        if who is not None:
            found.sendall(greeting.answer(key, message))
            found.settimeout(None)
            return who
    found.close()
    return None


def receive(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the other end closes before."""
    got = b""
    while len(got) < size and (more := sock.recv(size - len(got))):
        got += more
    return got


def _bind_to(made: socket.socket, interface: str | None) -> None:
    if interface is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())


def _resolve(peer: Peer, kind: socket.SocketKind) -> tuple[int, tuple[Any, ...]]:
    """The family and address of a peer, which has to be one host's."""
    family, _, _, _, address = socket.getaddrinfo(peer.address, peer.port, type=kind)[0]
    number = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if number.is_multicast or number.is_unspecified or str(number) == "255.255.255.255":
        raise OSError(f"{number} is no address of a host")
    return family, address


def _greet_stream(made: socket.socket, key: bytes, message: bytes) -> bool:
    with suppress(OSError):
        made.sendall(message)
        return greeting.is_answer(key, message, receive(made, greeting.ANSWER_SIZE))
    return False


def _greet_datagrams(made: socket.socket, key: bytes, message: bytes) -> bool:
    """A hello may be lost, and so may its answer: it is repeated."""
    made.settimeout(0.25)
    deadline = time.monotonic() + HELLO_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            made.send(message)
            if greeting.is_answer(key, message, made.recv(1 << 16)):
                return True
            continue
        # Refused at once: the other end may not listen yet.
        time.sleep(0.05)
    return False
