"""A port for the ranks to meet at, on this machine."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from flagscale.errors import ConfigError, Problem

_FIRST_PORT = 20_000
_TRIES = 100
_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that is free now and likely to be so when the ranks meet there, seconds later: below
    those that the kernel gives to connections, where that leaves any."""
    try:
        low = int(_CONNECTIONS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        low = 0
    below = range(_FIRST_PORT, low)
    for port in random.sample(below, min(_TRIES, len(below))):
        if is_free(port):
            return port
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether the rendezvous could listen at this port of this machine."""
    families = [(socket.AF_INET, "0.0.0.0")]
    if socket.has_dualstack_ipv6():
        families.append((socket.AF_INET6, "::"))
    return all(_can_listen(family, address, port) for family, address in families)


def _can_listen(family: int, address: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def require_free(port: int) -> None:
    """Raise :class:`ConfigError` naming the process that holds the port, where it can be told."""
    if is_free(port):
        return
    holder = _holder(port)
    by = f"by {holder}" if holder else "by another process"
    raise ConfigError(
        Problem("experiment.runner.master_port", f"port {port} of this machine is in use {by}"),
        hint="choose another one, or leave the key out to get a free port",
    )


def _holder(port: int) -> str | None:
    """The process that listens at a port; None if that is not ours to know."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return None
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN
        if listens and connection.laddr and connection.laddr[1] == port and connection.pid:
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = "?"
            shown = command if len(command) <= 80 else command[:77] + "..."
            return f"process {connection.pid} ({shown})"
    return None
