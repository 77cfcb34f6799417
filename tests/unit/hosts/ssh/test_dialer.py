"""How a dialer gives up what it holds."""

from __future__ import annotations

import socket

import pytest

from flagscale.hosts.ssh.dial import Dialer


class _Interrupted(socket.socket):
    """A connection during whose end the user presses Ctrl-C again."""

    times = 0

    def close(self) -> None:
        self.times += 1
        if self.times == 1:
            raise KeyboardInterrupt
        super().close()


def test_what_an_interrupt_left_open_is_closed_by_another_call() -> None:
    opened = [_Interrupted() for _ in range(3)]
    dialer = Dialer()
    dialer._open.update(opened)
    for _ in opened:
        with pytest.raises(KeyboardInterrupt):
            dialer.close()
    dialer.close()
    assert [sock.fileno() for sock in opened] == [-1, -1, -1]
