"""Tests of closing a dialer's connections."""

from __future__ import annotations

import socket

import pytest

from flagscale.hosts.ssh.dial import Dialer


class _Interrupted(socket.socket):
    """A connection that raises KeyboardInterrupt when it is closed."""

    times = 0

    def close(self) -> None:
        self.times += 1
        if self.times == 1:
            raise KeyboardInterrupt
        super().close()


def test_second_close_closes_what_an_interrupt_left_open() -> None:
    connections = [_Interrupted() for _ in range(3)]
    dialer = Dialer()
    dialer._open.update(connections)
    for _ in connections:
        with pytest.raises(KeyboardInterrupt):
            dialer.close()
    dialer.close()
    assert [sock.fileno() for sock in connections] == [-1, -1, -1]
