"""Ports for the servers of benchmarks and tests."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """Return a free port below those that the system assigns, so that no other program gets it
    before it is used.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(20_000, max(low, 32_000))
        try:
            with socket.create_server(("", port), dualstack_ipv6=False):
                return port
        except OSError:
            continue
