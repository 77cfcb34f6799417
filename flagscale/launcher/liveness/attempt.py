"""One torchrun, from its start until none of its processes is left.

Nothing here waits: :meth:`Attempt.step` is called periodically, because the agent has to answer its
peers in the meantime.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from flagscale.hosts import kernel, processes
from flagscale.hosts.processes import Process

# Time after the order to end in which new ranks are looked for: torchrun may be starting them.
SIGNAL_SECONDS = 1.0
# Time for torchrun to notice that its ranks have ended, and, if they ended well, for the ranks of
# other hosts to end, which it waits for.
SETTLE_SECONDS = 5.0
# Time for torchrun, after the grace period, to end its ranks before everything is killed.
KILL_MARGIN_SECONDS = 5.0
# Grace period after a failure on another host, when ranks cannot save anything any more.
FAILED_GRACE_SECONDS = 3.0
_SURVIVE_SECONDS = 5.0


class Stage(Enum):
    """Stage of an attempt."""

    RUNNING = "running"
    SWEEPING = "sweeping"
    OVER = "over"


class Attempt:
    """Runs one command and ends all its processes.

    Attributes:
        code: Exit code once the command has ended, 128+n for a signal.
        killed: Pids of the processes that were killed by this class.
    """

    def __init__(self, run_id: str, grace: float) -> None:
        self.run_id = run_id
        self.stage = Stage.RUNNING
        self.code: int | None = None
        self.ended_at = 0.0
        self.swept = processes.KilledProcesses()
        self.killed: set[int] = set()
        self.began = time.monotonic()
        self._grace = grace
        self._end_at: float | None = None
        self._ending_grace = grace
        self._command: subprocess.Popen[bytes] | None = None
        self._command_signalled = False
        self._after_failure = False
        self._dying: Collection[int] = ()
        self._signalled: set[Process] = set()
        self._ranks_ended_at: float | None = None
        self._terminated: set[int] = set()
        self._swept_at = 0.0

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command in a session of its own.

        A terminal's Ctrl-C therefore reaches it only once, through the agent.

        Raises:
            OSError: If the command cannot be started.
        """
        self._command = subprocess.Popen(
            command,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=kernel.signal_on_parent_death(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - one thread
        )

    @property
    def ending(self) -> bool:
        """True if the attempt was requested to end."""
        return self._end_at is not None

    @property
    def killed_command(self) -> bool:
        """True if the command ended because it was killed by this class."""
        return self._command is not None and self._command.pid in self.killed

    def on_child_exit(self, pid: int, status: int) -> None:
        """Process the end of a child of this process, if it is the command."""
        if self._command is not None and pid == self._command.pid:
            code = os.waitstatus_to_exitcode(status)
            self._command.returncode = code
            self.code = code if code >= 0 else 128 - code
            self.ended_at = time.time()
            self.stage = Stage.SWEEPING
            self._swept_at = time.monotonic()

    def end(self, *, failed: bool, dying: Collection[int] = ()) -> None:
        """End the attempt in order: TERM to the ranks, then to torchrun, then KILL. The first call
        counts.

        Args:
            failed: Nothing can be saved any more, so the grace period is short.
            dying: Ranks that have reported that they are ending by themselves, with an exit code of
                interest; they get no TERM.
        """
        if self._end_at is None:
            self._dying = dying
            self._end_at = time.monotonic()
            limit = FAILED_GRACE_SECONDS if failed else self._grace
            self._ending_grace = min(self._grace, limit)
            self._after_failure = failed

    def kill(self) -> None:
        """Kill all processes at once."""
        for process in self._find_processes():
            self._kill(process)

    def step(self, now: float) -> None:
        """Perform the actions that are due."""
        if self.stage is Stage.SWEEPING:
            self._sweep(now)
        elif self.stage is Stage.RUNNING and self._end_at is not None:
            self._continue_ending(now, now - self._end_at)

    def find_ranks(self) -> dict[int, Process]:
        """Return the processes that torchrun has started as ranks, by rank."""
        if self._command is None or self._command.returncode is not None:
            return {}
        ranks = {}
        for process in processes.find_run_processes(self.run_id):
            if processes.parent_pid_of(process.pid) == self._command.pid:
                environment = processes.read_environment(process.pid)
                if b"LOCAL_RANK" in environment and environment.get(b"RANK", b"").isdigit():
                    ranks[int(environment[b"RANK"])] = process
        return ranks

    def _continue_ending(self, now: float, elapsed: float) -> None:
        """Perform one step of ending the command in order.

        Only the ranks get the signal first. torchrun would signal each rank's whole process group,
        and a rank whose data loaders die in the middle of a step cannot save a checkpoint; and a
        torchrun that gets the signal itself does not report how its ranks ended. torchrun gets it
        if it stays although the ranks have ended, or when the grace period is over.
        """
        if elapsed < SIGNAL_SECONDS:
            self._terminate_ranks()
        over = elapsed >= self._ending_grace
        if over and self._after_failure:
            for process in self._signalled:
                if processes.is_alive(process):
                    self._kill(process)
            over = elapsed >= self._ending_grace + SIGNAL_SECONDS
        if elapsed >= self._ending_grace + min(self._grace, KILL_MARGIN_SECONDS):
            self.kill()
        elif not self._command_signalled and (over or self._ranks_have_ended(now)):
            self._command_signalled = True
            if self._command is not None:
                os.kill(self._command.pid, signal.SIGTERM)

    def _terminate_ranks(self) -> None:
        """Send TERM to the ranks that have not got it, while torchrun has had no time to restart
        any.
        """
        if self._ranks_ended_at is not None:
            return
        for rank, process in self.find_ranks().items():
            if process in self._signalled:
                continue
            self._signalled.add(process)
            if rank not in self._dying:
                processes.send_signal(process, signal.SIGTERM, run_id=self.run_id)

    def _ranks_have_ended(self, now: float) -> bool:
        """Return True if all ranks have ended, and torchrun has had the time to end by itself."""
        if not self._signalled:
            # After a failure torchrun may be about to report which of its ranks caused it.
            return not self._after_failure
        if any(processes.is_alive(process) for process in self._signalled):
            return False
        self._ranks_ended_at = self._ranks_ended_at or now
        return now - self._ranks_ended_at >= SETTLE_SECONDS

    def _find_processes(self) -> list[Process]:
        return processes.find_run_processes(
            self.run_id, exclude=processes.find_spared_pids(self.run_id)
        )

    def _kill(self, process: Process) -> None:
        if processes.send_signal(process, signal.SIGKILL, run_id=self.run_id):
            self.killed.add(process.pid)

    def _sweep(self, now: float) -> None:
        """End the processes that the command left behind.

        After a stop the grace period has been used up, and after a failure there is nothing to wait
        for, so a few seconds suffice.
        """
        remaining = self._find_processes()
        elapsed = now - self._swept_at
        grace = min(self._grace, KILL_MARGIN_SECONDS)
        for process in remaining:
            if elapsed >= grace:
                self._kill(process)
            elif process.pid not in self._terminated:
                self._terminated.add(process.pid)
                processes.send_signal(process, signal.SIGTERM, run_id=self.run_id)
        if not remaining or elapsed >= grace + _SURVIVE_SECONDS:
            ended = tuple(sorted(self._terminated | self.killed))
            survivors = tuple(process.pid for process in remaining)
            self.swept = processes.KilledProcesses(ended, survivors=survivors)
            self.stage = Stage.OVER
