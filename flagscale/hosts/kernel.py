"""Linux kernel interfaces of the agent that Python's standard library lacks."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _call_prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def become_subreaper() -> None:
    """Make this process the parent of orphans among its descendants, in place of process 1."""
    _call_prctl(PR_SET_CHILD_SUBREAPER, 1)


def signal_on_parent_death(parent_pid: int, number: signal.Signals) -> Callable[[], None]:
    """Return a ``preexec_fn`` that makes the kernel send signal ``number`` to the child when its
    parent ends.

    If the parent ended before the request, the child sends the signal to itself.
    """

    def set_death_signal() -> None:
        _call_prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), number)

    return set_death_signal


def handle_hangup(handler: Callable[[int, FrameType | None], object]) -> None:
    """Install a handler of SIGHUP, unless the signal was ignored when this process started.

    ``nohup`` and shells ignore it for programs that are to survive the end of their terminal.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


def count_oom_kills(earlier_count: int | None = 0) -> int | None:
    """Return the number of processes of this control group that the OOM killer has killed since
    ``earlier_count`` was read.

    Returns None if the kernel does not report the count, or did not when ``earlier_count`` was
    read. Reads cgroup v2, then v1.
    """
    for name in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            lines = Path(name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.isdigit():
                return int(value) - earlier_count if earlier_count is not None else None
    return None


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped, by SIGSTOP or a debugger."""
    state = _read_status(pid).get("State", "")
    return state[:1] in ("T", "t")


def catches_signal(pid: int, number: signal.Signals) -> bool:
    """Return True if a process has a handler for a signal that would end it otherwise."""
    caught_mask = _read_status(pid).get("SigCgt", "0")
    return bool(int(caught_mask, 16) >> (number - 1) & 1)


def _read_status(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (x.partition(":") for x in text.splitlines())}
