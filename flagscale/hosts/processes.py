"""Detection of a run's processes, and signals to exactly those.

A process belongs to a run if its initial environment, ``/proc/<pid>/environ``, contains the
run's ``FLAGSCALE_RUN_ID``. A process that was started with an emptied environment belongs to the
run of its ancestors. Names and process groups do not identify it: torchrun's workers lead
sessions of their own, and a name also matches other users' jobs. Uses the standard library
alone: the agent that monitors a host's job imports this module, and it must start fast and run
anywhere.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

PROC = Path("/proc")
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Process:
    """Identity of a process that no later process with the same pid shares.

    ``start_ticks`` is its start time in clock ticks since boot, field 22 of
    ``/proc/<pid>/stat``.
    """

    pid: int
    start_ticks: int


def read_boot_id() -> str:
    """Return the kernel's id of this boot. Pids recorded under another boot id are meaningless."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identify_process(pid: int) -> Process | None:
    """Return the identity of a live process; None if no process has this pid or it is a zombie."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in (b"Z", b"X", b"x"):
        return None
    return Process(pid, int(fields[19]))


def parent_pid_of(pid: int) -> int | None:
    """Return the parent's pid, or None if the process has ended."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def is_alive(process: Process) -> bool:
    return identify_process(process.pid) == process


def _stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of ``/proc/<pid>/stat`` from the third (the state) on.

    The second, the command's name, may contain spaces and parentheses.
    """
    try:
        data = (PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return data[data.rfind(b")") + 2 :].split()


def read_environment(pid: int) -> dict[bytes, bytes]:
    """Return the initial environment of a process; empty if it has ended or is not readable."""
    pairs = (entry.partition(b"=") for entry in _environment_entries(pid) if entry)
    return {name: value for name, _, value in pairs}


def _environment_entries(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def find_ranks(candidates: Iterable[Process]) -> dict[int, Process]:
    """Return the processes that torchrun started as ranks, by rank.

    A rank has the variable RANK while its parent has not. The rank's own children inherit it.
    """
    processes_by_rank = {}
    for process in candidates:
        variables, parent_pid = read_environment(process.pid), parent_pid_of(process.pid)
        rank = variables.get(b"RANK", b"") if b"LOCAL_RANK" in variables else b""
        if (
            rank.isdigit()
            and parent_pid is not None
            and b"RANK" not in read_environment(parent_pid)
        ):
            processes_by_rank[int(rank)] = process
    return processes_by_rank


def belongs_to_run(pid: int, run_id: str) -> bool:
    """Return True if the process carries the run's id in its environment."""
    return f"{RUN_ID_VARIABLE}={run_id}".encode() in _environment_entries(pid)


def find_run_processes(run_id: str, *, exclude: Collection[int] = ()) -> list[Process]:
    """Return every live process of the run on this machine, by ascending pid."""
    processes = []
    for pid in iter_pids():
        if pid not in exclude and belongs_to_run(pid, run_id):
            process = identify_process(pid)
            if process is not None:
                processes.append(process)
    return processes


def find_children(pid: int) -> list[int]:
    """Return the pids of the children of a process."""
    return [child for child in iter_pids() if parent_pid_of(child) == pid]


def find_descendants(pid: int, run_id: str, *, exclude: Collection[int] = ()) -> list[Process]:
    """Return the live descendants of a process that belong to its run, by ascending pid.

    Processes that carry the id of another run, and the ``exclude`` pids, are left out together with
    their descendants.
    """
    children: dict[int, list[int]] = {}
    for child in iter_pids():
        parent_pid = parent_pid_of(child)
        if parent_pid is not None:
            children.setdefault(parent_pid, []).append(child)
    descendants = []
    pending = list(children.get(pid, ()))
    while pending:
        child = pending.pop()
        if child in exclude or read_run_id(child) not in (None, run_id):
            continue
        pending += children.get(child, ())
        process = identify_process(child)
        if process is not None:
            descendants.append(process)
    return sorted(descendants, key=lambda process: process.pid)


def find_writers(directory: Path) -> list[Process]:
    """Return the processes whose stdout or stderr is a file below ``directory``, by ascending pid,
    as far as this user may see that.
    """
    prefix = f"{directory.resolve()}/"
    writers = []
    for pid in iter_pids():
        for descriptor in (1, 2):
            with suppress(OSError):
                target = os.readlink(PROC / str(pid) / "fd" / str(descriptor))  # noqa: PTH115
                process = identify_process(pid) if target.startswith(prefix) else None
                if process is not None:
                    writers.append(process)
                    break
    return writers


def read_run_id(pid: int) -> str | None:
    """Return the id of the run in a process's environment, or None."""
    value = read_environment(pid).get(RUN_ID_VARIABLE.encode())
    return None if value is None else os.fsdecode(value)


def find_own_processes(run_id: str) -> list[Process]:
    """Return the processes that an agent ends with its host's part of a run, by ascending pid.

    These are the live processes of the run on this machine, except the agent itself, the processes
    of other hosts of the run on this machine (network namespaces, cells of a scheduler), and the
    ancestors of all of them. One list decides about both: a process of another host that starts in
    the meantime is in neither.
    """
    carriers = find_run_processes(run_id)
    status_root = os.path.dirname(os.environ.get(STATUS_DIR_VARIABLE, ""))  # noqa: PTH120
    spared_pids = {os.getpid()}
    for process in carriers if status_root else ():
        status = read_environment(process.pid).get(STATUS_DIR_VARIABLE.encode())
        if status is not None and not status.startswith(f"{status_root}/".encode()):
            spared_pids.add(process.pid)
    spared_pids = spared_pids.union(*map(find_ancestors, spared_pids))
    return [process for process in carriers if process.pid not in spared_pids]


def iter_pids() -> Iterator[int]:
    """Iterate over the pids of all processes of this machine, ascending."""
    yield from sorted(int(name) for name in os.listdir(PROC) if name.isdigit())  # noqa: PTH208


def find_ancestors(pid: int) -> list[int]:
    """Return the pids of a process's ancestors, nearest first, without pid 1."""
    pids: list[int] = []
    parent_pid = parent_pid_of(pid)
    while parent_pid is not None and parent_pid > 1 and parent_pid not in pids:
        pids.append(parent_pid)
        parent_pid = parent_pid_of(parent_pid)
    return pids


def send_signal(process: Process, signal_number: int, *, run_id: str | None = None) -> bool:
    """Send a signal to exactly this process, and only if it carries ``run_id`` where one is given.

    A pidfd pins the process between the check and the signal, so that a process that reused the
    pid is never signalled. Returns True if the signal was sent.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        if not is_alive(process) or (
            run_id is not None and not belongs_to_run(process.pid, run_id)
        ):
            return False
        signal.pidfd_send_signal(descriptor, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True


def wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Poll until the condition is true or ``timeout_seconds`` have passed. Return True if it became
    true.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


@dataclass(frozen=True)
class KilledProcesses:
    """Result of ending a run's processes.

    ``terminated``, ``killed`` and ``survivors`` are the pids that got SIGTERM, that got SIGKILL,
    and that are still alive. ``owner`` is the user that owns them, if this user may not signal
    them. ``ranks`` maps pids to ranks for processes that were ranks. ``owner`` and ``ranks`` are
    only known from hosts' stop programs.
    """

    terminated: tuple[int, ...] = ()
    killed: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    owner: str = ""
    ranks: Mapping[int, int] = field(default_factory=dict)


def kill_run_processes(
    run_id: str,
    grace_seconds: float,
    *,
    exclude: Collection[int] = (),
    of_this_host: bool = False,
) -> KilledProcesses:
    """End every process of the run: SIGTERM, then SIGKILL after ``grace_seconds``.

    All but the ``exclude`` pids, or with ``of_this_host`` those of :func:`find_own_processes`.

    The search is repeated, so processes that the run starts meanwhile are ended, too. The
    survivors in the result have outlived SIGKILL for five seconds: they are in uninterruptible
    sleep.
    """
    terminated, killed = set[int](), set[int]()

    def find_processes() -> list[Process]:
        if of_this_host:
            return find_own_processes(run_id)
        return find_run_processes(run_id, exclude=exclude)

    def signal_processes(signal_number: signal.Signals, signalled_pids: set[int]) -> bool:
        alive = find_processes()
        for process in alive:
            should_signal = signal_number is signal.SIGKILL or process.pid not in signalled_pids
            if should_signal and send_signal(process, signal_number, run_id=run_id):
                signalled_pids.add(process.pid)
        return not alive

    if wait_until(lambda: signal_processes(signal.SIGTERM, terminated), grace_seconds):
        return KilledProcesses(tuple(sorted(terminated)))
    wait_until(lambda: signal_processes(signal.SIGKILL, killed), 5.0)
    survivors = tuple(process.pid for process in find_processes())
    return KilledProcesses(tuple(sorted(terminated)), tuple(sorted(killed)), survivors)
