"""One torchrun from its start until no process of it is left. Never waits: it is looked at again
and again, since the agent has to answer its peers meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from flagscale.hosts import kernel, processes
from flagscale.hosts.processes import Process

# How long after the order to end ranks are still looked for: torchrun may be starting them.
TELL_SECONDS = 1.0
# What torchrun gets to notice that its ranks have ended, and, where they have ended well, for those
# of other hosts to end: it waits for them.
SETTLE_SECONDS = 5.0
# What torchrun gets, after the grace period, to end what is left before all of it is killed.
KILL_MARGIN_SECONDS = 5.0
# After a failure elsewhere, ranks can save nothing any more: they get this long to end.
FAILED_GRACE_SECONDS = 3.0
_SURVIVE_SECONDS = 5.0


class Stage(Enum):
    """Where an attempt stands."""

    RUNNING = "running"
    SWEEPING = "sweeping"
    OVER = "over"


class Attempt:
    """Runs one command and what comes of it. ``code`` is its exit code once it has ended, 128+n
    where a signal ended it; ``killed`` holds the processes that were killed here."""

    def __init__(self, run_id: str, grace: float) -> None:
        self.run_id = run_id
        self.stage = Stage.RUNNING
        self.code: int | None = None
        self.ended_at = 0.0
        self.swept = processes.Swept()
        self.killed: set[int] = set()
        self.began = time.monotonic()
        self._grace = grace
        self._end_at: float | None = None
        self._ending_grace = grace
        self._command: subprocess.Popen[bytes] | None = None
        self._command_told = False
        self._hard = False
        self._dying: Collection[int] = ()
        self._told: set[Process] = set()
        self._gone_at: float | None = None
        self._terminated: set[int] = set()
        self._swept_at = 0.0

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command in a session of its own: a terminal's Ctrl-C reaches it through the
        agent alone, once. Raises :class:`OSError`."""
        self._command = subprocess.Popen(
            command,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=kernel.die_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - one thread
        )

    @property
    def ending(self) -> bool:
        """Whether it was told to end."""
        return self._end_at is not None

    @property
    def killed_command(self) -> bool:
        """Whether the command ended because it was killed here."""
        return self._command is not None and self._command.pid in self.killed

    def reaped(self, pid: int, status: int) -> None:
        """A child of this process has ended; it may be the command."""
        if self._command is not None and pid == self._command.pid:
            code = os.waitstatus_to_exitcode(status)
            self._command.returncode = code
            self.code = code if code >= 0 else 128 - code
            self.ended_at = time.time()
            self.stage = Stage.SWEEPING
            self._swept_at = time.monotonic()

    def end(self, *, failed: bool, dying: Collection[int] = ()) -> None:
        """End it in order: TERM to the ranks, then to torchrun, then KILL. ``failed``: nothing can
        be saved any more, so that little time is given. ``dying`` ranks have said that they end by
        themselves, with a code worth knowing: they get no TERM. The first call counts."""
        if self._end_at is None:
            self._dying = dying
            self._end_at = time.monotonic()
            limit = FAILED_GRACE_SECONDS if failed else self._grace
            self._ending_grace = min(self._grace, limit)
            self._hard = failed

    def kill(self) -> None:
        """End everything at once."""
        for process in self._members():
            self._kill(process)

    def step(self, now: float) -> None:
        """Go on with whatever is to be done now."""
        if self.stage is Stage.SWEEPING:
            self._sweep(now)
        elif self.stage is Stage.RUNNING and self._end_at is not None:
            self._end(now, now - self._end_at)

    def ranks(self) -> dict[int, Process]:
        """The processes that torchrun has started as ranks, by rank."""
        found = {}
        if self._command is None or self._command.returncode is not None:
            return {}
        for process in processes.members(self.run_id):
            if processes.parent(process.pid) == self._command.pid:
                environment = processes.environment(process.pid)
                if b"LOCAL_RANK" in environment and environment.get(b"RANK", b"").isdigit():
                    found[int(environment[b"RANK"])] = process
        return found

    def _end(self, now: float, passed: float) -> None:
        """A step of ending the command in order.

        The ranks are told first, and they alone: torchrun would signal each rank's whole process
        group, and a rank whose data loaders die in the middle of a step cannot save a checkpoint;
        and a torchrun that is told itself does not say how its ranks ended. It is told when they
        are gone but it stays, or when the grace period is over.
        """
        if passed < TELL_SECONDS:
            self._tell_ranks()
        over = passed >= self._ending_grace
        if over and self._hard:
            for process in self._told:
                if processes.is_alive(process):
                    self._kill(process)
            over = passed >= self._ending_grace + TELL_SECONDS
        if passed >= self._ending_grace + min(self._grace, KILL_MARGIN_SECONDS):
            self.kill()
        elif not self._command_told and (over or self._ranks_are_gone(now)):
            self._command_told = True
            if self._command is not None:
                os.kill(self._command.pid, signal.SIGTERM)

    def _tell_ranks(self) -> None:
        """TERM to the ranks that have not had it, as long as torchrun hasn't had the time to
        restart any."""
        if self._gone_at is not None:
            return
        for rank, process in self.ranks().items():
            if process in self._told:
                continue
            self._told.add(process)
            if rank not in self._dying:
                processes.send(process, signal.SIGTERM, run_id=self.run_id)

    def _ranks_are_gone(self, now: float) -> bool:
        """Whether no rank is left to wait for, and torchrun has had the time to end by itself."""
        if not self._told:
            # After a failure torchrun may be about to say which of its ranks brought it about.
            return not self._hard
        if any(processes.is_alive(process) for process in self._told):
            return False
        self._gone_at = self._gone_at or now
        return now - self._gone_at >= SETTLE_SECONDS

    def _members(self) -> list[Process]:
        return processes.members(self.run_id, exclude=processes.spared(self.run_id))

    def _kill(self, process: Process) -> None:
        if processes.send(process, signal.SIGKILL, run_id=self.run_id):
            self.killed.add(process.pid)

    def _sweep(self, now: float) -> None:
        """End what the command left. After a stop the grace period is already used up, and after
        a failure nobody is left to wait for: a few seconds do."""
        left = self._members()
        passed = now - self._swept_at
        grace = min(self._grace, KILL_MARGIN_SECONDS)
        for process in left:
            if passed >= grace:
                self._kill(process)
            elif process.pid not in self._terminated:
                self._terminated.add(process.pid)
                processes.send(process, signal.SIGTERM, run_id=self.run_id)
        if not left or passed >= grace + _SURVIVE_SECONDS:
            ended = tuple(sorted(self._terminated | self.killed))
            self.swept = processes.Swept(ended, left=tuple(p.pid for p in left))
            self.stage = Stage.OVER
