"""Free TCP ports for servers that start later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _LEAST_END = 20_000, 32_000


def free_port() -> int:
    """Return a free port below the ephemeral ones, which the system gives to connections. A port
    that the system had chosen could be given to a connection before the server listens on it.
    """
    try:
        first_ephemeral_port = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except OSError:
        first_ephemeral_port = _LEAST_END
    while True:
        port = random.randrange(_FIRST_PORT, max(first_ephemeral_port, _LEAST_END))
        try:
            with socket.create_server(("", port), dualstack_ipv6=False):
                return port
        except OSError:
            continue
