"""Which processes belong to a run, and how to end exactly those.

A process belongs to a run when its initial environment, ``/proc/<pid>/environ``, holds the run's
``FLAGSCALE_RUN_ID``. Names and process groups are no identity: torchrun's workers lead sessions of
their own, and a name matches other people's jobs. Standard library alone: the agent that watches
a host's job imports this module, and it must start fast and run anywhere.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

PROC = Path("/proc")
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Process:
    """A process that cannot be confused with a later one of the same pid: ``start_ticks`` is its
    start in clock ticks since boot, field 22 of ``/proc/<pid>/stat``."""

    pid: int
    start_ticks: int


def boot_id() -> str:
    """The kernel's name of this boot; pids of another boot mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identify(pid: int) -> Process | None:
    """The living process of this pid; None if there is none or only its zombie is left."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in (b"Z", b"X", b"x"):
        return None
    return Process(pid, int(fields[19]))


def parent(pid: int) -> int | None:
    """The parent's pid, or None if the process is gone."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def is_alive(process: Process) -> bool:
    return identify(process.pid) == process


def _stat_fields(pid: int) -> list[bytes] | None:
    """Fields of ``/proc/<pid>/stat`` from the third (the state) on: the second, the command's
    name, may hold spaces and parentheses."""
    try:
        data = (PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return data[data.rfind(b")") + 2 :].split()


def environment(pid: int) -> dict[bytes, bytes]:
    """The environment a process was started with; empty when it is gone or not ours to read."""
    pairs = (entry.partition(b"=") for entry in _environ(pid) if entry)
    return {name: value for name, _, value in pairs}


def _environ(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def ranks(among: Iterable[Process]) -> dict[int, Process]:
    """Those of these processes that torchrun started as ranks, by rank: such a one has RANK, and
    its parent has none. A rank's own children inherit it."""
    found = {}
    for process in among:
        variables, above = environment(process.pid), parent(process.pid)
        rank = variables.get(b"RANK", b"") if b"LOCAL_RANK" in variables else b""
        if rank.isdigit() and above is not None and b"RANK" not in environment(above):
            found[int(rank)] = process
    return found


def belongs(pid: int, run_id: str) -> bool:
    """Whether this process carries the run's identity."""
    return f"{RUN_ID_VARIABLE}={run_id}".encode() in _environ(pid)


def members(run_id: str, *, exclude: Collection[int] = ()) -> list[Process]:
    """Every living process of the run on this machine, by pid."""
    found = []
    for pid in pids():
        if pid not in exclude and belongs(pid, run_id):
            process = identify(pid)
            if process is not None:
                found.append(process)
    return found


def spared(run_id: str) -> set[int]:
    """What an agent leaves alone when it ends its host's part of a run: itself, the parts of other
    hosts that are on this machine too (namespaces, a scheduler's cells), and what is above them."""
    own = os.path.dirname(os.environ.get(STATUS_DIR_VARIABLE, ""))  # noqa: PTH120
    found = {os.getpid()}
    for process in members(run_id) if own else ():
        status = environment(process.pid).get(STATUS_DIR_VARIABLE.encode())
        if status is not None and not status.startswith(f"{own}/".encode()):
            found.add(process.pid)
    return found.union(*map(ancestors, found))


def pids() -> Iterator[int]:
    """Every process of this machine."""
    yield from sorted(int(name) for name in os.listdir(PROC) if name.isdigit())  # noqa: PTH208


def ancestors(pid: int) -> list[int]:
    """The pids above a process, nearest first, without pid 1."""
    found: list[int] = []
    above = parent(pid)
    while above is not None and above > 1 and above not in found:
        found.append(above)
        above = parent(above)
    return found


def send(process: Process, number: int, *, run_id: str | None = None) -> bool:
    """Send a signal to this very process, and only if it carries ``run_id`` where one is given.

    A pidfd pins the process between the check and the signal, so that a pid that was reused in
    between is never hit. Returns whether the signal was sent.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        if not is_alive(process) or (run_id is not None and not belongs(process.pid, run_id)):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition holds or the time is over; whether it held."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


@dataclass(frozen=True)
class Swept:
    """What ending a run's processes took. ``owner`` is whose those ``left`` are, where this user
    may not end them; ``ranks``: pids by rank, of those that were ranks: these two are what hosts
    tell of a stop."""

    terminated: tuple[int, ...] = ()
    killed: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    owner: str = ""
    ranks: Mapping[int, int] = field(default_factory=dict)


def sweep(run_id: str, grace: float, *, exclude: Collection[int] = ()) -> Swept:
    """End every process of the run: TERM, ``grace`` seconds, KILL.

    Processes that the run starts meanwhile are found too, since the search is repeated. ``left``
    holds what survives a KILL for five seconds: a process in uninterruptible sleep.
    """
    terminated, killed = set[int](), set[int]()

    def signalled(number: signal.Signals, ended: set[int]) -> bool:
        alive = members(run_id, exclude=exclude)
        for process in alive:
            again = number is signal.SIGKILL or process.pid not in ended
            if again and send(process, number, run_id=run_id):
                ended.add(process.pid)
        return not alive

    if wait_until(lambda: signalled(signal.SIGTERM, terminated), grace):
        return Swept(tuple(sorted(terminated)))
    wait_until(lambda: signalled(signal.SIGKILL, killed), 5.0)
    rest = tuple(process.pid for process in members(run_id, exclude=exclude))
    return Swept(tuple(sorted(terminated)), tuple(sorted(killed)), rest)
