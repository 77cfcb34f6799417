"""One torchrun on one host, from its start until none of its processes is left.

Nothing here waits: :meth:`Attempt.tick` is called periodically, because the agent has to answer its
peers in the meantime.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum

from flagscale.hosts import kernel, processes
from flagscale.hosts.processes import Process
from flagscale.status import RUN_ID_VARIABLE

# Time after the order to end in which new ranks are looked for: torchrun may be starting them.
NEW_RANK_SECONDS = 1.0
# Time for torchrun to notice that its ranks have ended, and, if they ended well, for the ranks of
# other hosts to end, which it waits for.
TORCHRUN_EXIT_SECONDS = 5.0
# Time for torchrun, after the grace period, to end its ranks before everything is killed.
KILL_MARGIN_SECONDS = 5.0
# Grace period after a failure on another host, when ranks cannot save anything any more.
FAILED_GRACE_SECONDS = 3.0
_KILL_WAIT_SECONDS = 5.0


class Stage(Enum):
    """Stage of an attempt on one host. (The whole job has a :class:`~.messages.JobPhase`, and a
    host a :class:`~.messages.HostStatus` in reports.)
    """

    RUNNING = "running"
    SWEEPING = "sweeping"
    """The command has ended; processes that it left behind are being ended."""
    OVER = "over"
    """No process is left."""


class Attempt:
    """Runs one command (torchrun) and ends all its processes.

    Attributes:
        exit_code: Exit code once the command has ended, 128+n for a signal.
        killed_pids: Pids of the processes that were killed by this class.
        start_time: Seconds of the monotonic clock.
        end_time: Unix seconds at which the command ended.
        sweep_result: Processes that were ended after the command, once the stage is ``OVER``.
    """

    def __init__(
        self,
        run_id: str,
        grace_seconds: float,
        other_children: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """``other_children`` returns the pids of children of this process that are no part of the
        run; by default those that it has already.
        """
        self.run_id = run_id
        if other_children is None:
            earlier_children = processes.find_children(os.getpid())
            self._other_children: Callable[[], Collection[int]] = lambda: earlier_children
        else:
            self._other_children = other_children
        self.stage = Stage.RUNNING
        self.exit_code: int | None = None
        self.end_time = 0.0
        self.sweep_result = processes.KilledProcesses()
        self.killed_pids: set[int] = set()
        self.start_time = time.monotonic()
        self._grace_seconds = grace_seconds
        self._end_requested_at: float | None = None
        self._current_grace_seconds = grace_seconds
        self._command: subprocess.Popen[bytes] | None = None
        self._command_signalled = False
        self._after_failure = False
        self._self_ending_ranks: Collection[int] = ()
        self._signalled_ranks: set[Process] = set()
        self._has_terminated_ranks = False
        self._ranks_ended_at: float | None = None
        self._terminated_pids: set[int] = set()
        self._sweep_started_at = 0.0

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
    def is_ending(self) -> bool:
        """True if the attempt was requested to end."""
        return self._end_requested_at is not None

    @property
    def killed_command(self) -> bool:
        """True if the command ended because it was killed by this class."""
        return self._command is not None and self._command.pid in self.killed_pids

    def on_child_exit(self, pid: int, status: int) -> None:
        """Process the end of a child of this process, if it is the command."""
        if self._command is not None and pid == self._command.pid:
            return_code = os.waitstatus_to_exitcode(status)
            self._command.returncode = return_code
            self.exit_code = return_code if return_code >= 0 else 128 - return_code
            self.end_time = time.time()
            self.stage = Stage.SWEEPING
            self._sweep_started_at = time.monotonic()

    def end(self, *, failed: bool, self_ending_ranks: Collection[int] = ()) -> None:
        """End the attempt in order: TERM to the ranks, then to torchrun, then KILL. Only the first
        call has an effect.

        Args:
            failed: Nothing can be saved any more, so the grace period is short.
            self_ending_ranks: Ranks that have reported that they are ending by themselves. They
                get no TERM, because it would replace their exit code.
        """
        if self._end_requested_at is None:
            self._self_ending_ranks = self_ending_ranks
            self._end_requested_at = time.monotonic()
            max_grace_seconds = FAILED_GRACE_SECONDS if failed else self._grace_seconds
            self._current_grace_seconds = min(self._grace_seconds, max_grace_seconds)
            self._after_failure = failed

    def kill(self) -> None:
        """Kill all processes at once."""
        for process in self._find_processes():
            self._kill(process)

    def tick(self, now: float) -> None:
        """Perform the actions that are due."""
        if self.stage is Stage.SWEEPING:
            self._sweep(now)
        elif self.stage is Stage.RUNNING and self._end_requested_at is not None:
            self._continue_ending(now, now - self._end_requested_at)

    def find_ranks(self) -> dict[int, Process]:
        """Return the processes that torchrun has started as ranks, by rank."""
        return {rank: process for process, rank in self._find_children() if rank is not None}

    def _find_children(self) -> Iterator[tuple[Process, int | None]]:
        """Yield the ranks, each with its number, or with None if its environment was emptied."""
        if self._command is None or self._command.returncode is not None:
            return
        for pid in processes.iter_pids():
            if processes.parent_pid_of(pid) != self._command.pid:
                continue
            process, environment = (
                processes.identify_process(pid),
                processes.read_environment(pid),
            )
            rank = environment.get(b"RANK", b"") if b"LOCAL_RANK" in environment else b""
            if process is not None and rank.isdigit():
                yield process, int(rank)
            elif process is not None and RUN_ID_VARIABLE.encode() not in environment:
                yield process, None

    def _continue_ending(self, now: float, elapsed_seconds: float) -> None:
        """Perform one step of ending the command in order.

        Only the ranks get the signal first. torchrun would signal each rank's whole process group,
        and a rank whose data loaders die in the middle of a step cannot save a checkpoint; and a
        torchrun that gets the signal itself does not report how its ranks ended. torchrun gets it
        if it stays although the ranks have ended, or when the grace period is over.
        """
        # Once in any case, even if this process was held up for longer.
        if elapsed_seconds < NEW_RANK_SECONDS or not self._has_terminated_ranks:
            self._has_terminated_ranks = True
            self._terminate_ranks()
        grace_is_over = elapsed_seconds >= self._current_grace_seconds
        if grace_is_over and self._after_failure:
            for process in self._signalled_ranks:
                if processes.is_alive(process):
                    self._kill(process)
            grace_is_over = elapsed_seconds >= self._current_grace_seconds + NEW_RANK_SECONDS
        if elapsed_seconds >= self._current_grace_seconds + min(
            self._grace_seconds, KILL_MARGIN_SECONDS
        ):
            self.kill()
        elif not self._command_signalled and (grace_is_over or self._ranks_have_ended(now)):
            self._command_signalled = True
            if self._command is not None:
                os.kill(self._command.pid, signal.SIGTERM)

    def _terminate_ranks(self) -> None:
        """Send TERM to the ranks that have not got it, while torchrun has had no time to restart
        any.
        """
        if self._ranks_ended_at is not None:
            return
        for process, rank in self._find_children():
            if process in self._signalled_ranks:
                continue
            self._signalled_ranks.add(process)
            if rank not in self._self_ending_ranks:
                processes.send_signal(process, signal.SIGTERM)

    def _ranks_have_ended(self, now: float) -> bool:
        """Return True if all ranks have ended, and torchrun has had the time to end by itself."""
        if not self._signalled_ranks:
            # After a failure torchrun may be about to report which of its ranks caused it.
            return not self._after_failure
        if any(processes.is_alive(process) for process in self._signalled_ranks):
            return False
        self._ranks_ended_at = self._ranks_ended_at or now
        return now - self._ranks_ended_at >= TORCHRUN_EXIT_SECONDS

    def _find_processes(self) -> list[Process]:
        """Return the processes of the run on this host.

        Those that were started with an emptied environment are found as descendants: this process
        is a child subreaper, so that its descendants stay below it whoever of them ends.
        """
        carriers = processes.find_own_processes(self.run_id)
        descendants = processes.find_descendants(
            os.getpid(), self.run_id, exclude=self._other_children()
        )
        return sorted({*carriers, *descendants}, key=lambda process: process.pid)

    def _kill(self, process: Process) -> None:
        if processes.send_signal(process, signal.SIGKILL):
            self.killed_pids.add(process.pid)

    def _sweep(self, now: float) -> None:
        """End the processes that the command left behind.

        After a stop the grace period has been used up, and after a failure there is nothing to wait
        for, so a few seconds suffice.
        """
        remaining = self._find_processes()
        elapsed_seconds = now - self._sweep_started_at
        grace_seconds = min(self._grace_seconds, KILL_MARGIN_SECONDS)
        for process in remaining:
            if elapsed_seconds >= grace_seconds:
                self._kill(process)
            elif process.pid not in self._terminated_pids:
                self._terminated_pids.add(process.pid)
                processes.send_signal(process, signal.SIGTERM)
        if not remaining or elapsed_seconds >= grace_seconds + _KILL_WAIT_SECONDS:
            ended_pids = tuple(sorted(self._terminated_pids | self.killed_pids))
            survivors = tuple(process.pid for process in remaining)
            self.sweep_result = processes.KilledProcesses(ended_pids, survivors=survivors)
            self.stage = Stage.OVER
