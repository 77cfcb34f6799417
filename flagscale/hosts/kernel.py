"""What an agent asks of the kernel, beyond Python's library."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def become_subreaper() -> None:
    """Orphans among this process's descendants come to it, not to process 1."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent_pid: int, number: signal.Signals) -> Callable[[], None]:
    """What a child calls before exec so that the kernel sends it ``number`` when its parent ends.
    The parent may have ended before the request: then the child ends at once."""

    def arrange() -> None:
        _prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), number)

    return arrange


def out_of_memory_kills(before: int | None = 0) -> int | None:
    """How many processes of this control group the kernel has killed for memory, since there were
    so many ``before``; None if it does not say. Version 2 first, then version 1."""
    for name in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            lines = Path(name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.isdigit():
                return int(value) - before if before is not None else None
    return None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    state = _status(pid).get("State", "")
    return state[:1] in ("T", "t")


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    caught = _status(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _status(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (x.partition(":") for x in text.splitlines())}
