"""A store in a forked process, for programs that fork ranks and so must not have threads."""

from __future__ import annotations

import os
import signal

from torch._C._distributed_c10d import TCPStore


def start_store() -> tuple[int, int]:
    """Fork a process that hosts a TCPStore. Return its pid and the store's port."""
    read_end, write_end = os.pipe()
    server = os.fork()
    if server == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write_end, f"{store.port}\n".encode())
        signal.pause()
    os.close(write_end)
    with os.fdopen(read_end) as output:
        return server, int(output.readline())
