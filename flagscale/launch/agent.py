"""The supervisor between a host's script and torchrun: standard library alone, one a host.

``python -m flagscale.launch.agent --run-dir DIR --grace SECONDS -- COMMAND …`` starts the command
and sees to it that nothing of the run outlives it:

- TERM, INT and HUP end the job in order: TERM to the ranks, then to torchrun, and after the grace
  period KILL. A second signal, later than a second, cuts the grace period short.
- Orphans of the run come to the agent, which is a child subreaper, and when the command has ended
  every process that carries the run's ``FLAGSCALE_RUN_ID`` is ended too.
- If the script above dies, the agent gets TERM from the kernel; if the agent dies, the command
  does, and ``--sweep`` (called by the script) ends what is left.
- How the command ended is written to ``DIR/exit.json`` before the agent ends with its code.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from flagscale.launch import files, processes
from flagscale.launch.layout import AGENT_FILE, EXIT_FILE, STATUS_DIRECTORY
from flagscale.status import RUN_ID_VARIABLE

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
IMPATIENCE_SECONDS = 1.0
TICK_SECONDS = 0.1
# What torchrun gets to notice that its ranks have ended.
SETTLE_SECONDS = 1.0
# What torchrun gets, after the grace period, to end what is left before all of it is killed.
KILL_MARGIN_SECONDS = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with(parent_pid: int, number: signal.Signals) -> Callable[[], None]:
    """What a child calls before exec so that the kernel sends it ``number`` when its parent ends.
    The parent may have ended before the request: then the child ends at once."""

    def arrange() -> None:
        _prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), number)

    return arrange


class Agent:
    """Runs one command and ends with it."""

    def __init__(self, run_id: str, run_dir: Path, grace: float) -> None:
        self.run_id = run_id
        self.run_dir = run_dir
        self.grace = grace
        self.signal: int | None = None
        self._signalled_at = 0.0
        self._command: subprocess.Popen[bytes] | None = None
        self._command_told = False
        self._ranks_told: set[processes.Process] = set()
        self._ranks_gone_at: float | None = None

    def run(self, command: Sequence[str]) -> int:
        """Start the command, wait for it, leave nothing behind; the code to exit with."""
        # A signal before the command is up is kept and passed on once it is.
        for number in FORWARDED:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_tick)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        script = os.getppid()
        die_with(script, signal.SIGTERM)()
        self._announce()
        started, kills_before = time.time(), out_of_memory_kills()
        try:
            status = self._execute(command)
        except OSError as error:
            print(f"flagscale: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
            return self._record(127, started, None, processes.Swept())
        swept = self._sweep()
        kills_after = out_of_memory_kills()
        kills = None
        if kills_before is not None and kills_after is not None:
            kills = kills_after - kills_before
        return self._record(self._code(status), started, kills, swept)

    def _announce(self) -> None:
        """Say in the run's directory who watches, and forget an earlier start of this script."""
        files.make_private_directory(self.run_dir / STATUS_DIRECTORY)
        (self.run_dir / EXIT_FILE).unlink(missing_ok=True)
        for stale in (self.run_dir / STATUS_DIRECTORY).glob("rank_*.jsonl"):
            stale.unlink()
        own = processes.identify(os.getpid())
        files.write_json(
            self.run_dir / AGENT_FILE,
            {
                "pid": os.getpid(),
                "start_ticks": own.start_ticks if own else 0,
                "boot_id": processes.boot_id(),
            },
        )

    def _execute(self, command: Sequence[str]) -> int:
        """The command's wait status. It leads a session of its own: a terminal's Ctrl-C reaches
        it through the agent alone, once."""
        self._command = subprocess.Popen(
            command,
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - one thread
        )
        while True:
            # Orphans of the run are children too: reap every one, return with the command.
            pid, status = os.waitpid(-1, 0)
            if pid == self._command.pid:
                self._command.returncode = os.waitstatus_to_exitcode(status)
                return status

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._signalled_at = number, now
            signal.setitimer(signal.ITIMER_REAL, 0.001, TICK_SECONDS)
        elif now - self._signalled_at > IMPATIENCE_SECONDS:
            self._kill()

    def _on_tick(self, _number: int, _frame: FrameType | None) -> None:
        """A step of ending the command in order.

        The ranks are told first, and they alone: torchrun would signal each rank's whole process
        group, and a rank whose data loaders die in the middle of a step cannot save a checkpoint.
        torchrun is told when they are gone but it stays, or when the grace period is over.
        """
        if self._command is None or self._command.returncode is not None:
            return
        now = time.monotonic()
        passed = now - self._signalled_at
        if passed < SETTLE_SECONDS:
            self._tell_ranks()
        if passed >= self.grace + self._margin():
            self._kill()
        elif not self._command_told and (passed >= self.grace or self._ranks_are_gone(now)):
            self._command_told = True
            os.kill(self._command.pid, signal.SIGTERM)

    def _tell_ranks(self) -> None:
        """TERM to the ranks that have not had it. Those are torchrun's own children, as long as
        it hasn't had the time to restart any."""
        if self._command is None or self._ranks_gone_at is not None:
            return
        for process in processes.members(self.run_id):
            is_rank = processes.parent(process.pid) == self._command.pid
            if (
                is_rank
                and process not in self._ranks_told
                and b"LOCAL_RANK" in (processes.environment(process.pid))
            ):
                self._ranks_told.add(process)
                processes.send(process, signal.SIGTERM, run_id=self.run_id)

    def _ranks_are_gone(self, now: float) -> bool:
        """Whether no rank is left to wait for, and torchrun has had the time to end by itself."""
        if not self._ranks_told:
            return True
        if any(processes.is_alive(process) for process in self._ranks_told):
            return False
        self._ranks_gone_at = self._ranks_gone_at or now
        return now - self._ranks_gone_at >= SETTLE_SECONDS

    def _kill(self) -> None:
        for process in processes.members(self.run_id, exclude=self._spared()):
            processes.send(process, signal.SIGKILL, run_id=self.run_id)

    def _sweep(self) -> processes.Swept:
        """End what the command left. After a stop the grace period is already used up, and after
        a failure nobody is left to wait for: a few seconds do."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        return sweep_run(self.run_id, self._margin(), self._spared())

    def _margin(self) -> float:
        return min(self.grace, KILL_MARGIN_SECONDS)

    @staticmethod
    def _spared() -> list[int]:
        return [os.getpid(), *processes.ancestors(os.getpid())]

    def _code(self, status: int) -> int:
        """The command's own code, 128+n where a signal ended it or a stop was asked for."""
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and self.signal is not None:
            return 128 + self.signal
        return code if code >= 0 else 128 - code

    def _record(self, code: int, started: float, kills: int | None, swept: processes.Swept) -> int:
        files.write_json(
            self.run_dir / EXIT_FILE,
            {
                "code": code,
                "phase": "job",
                "signal": self.signal,
                "started": round(started, 3),
                "ended": round(time.time(), 3),
                "out_of_memory_kills": kills,
                "swept": [*swept.terminated, *swept.killed],
                "left": list(swept.left),
            },
        )
        return code


def sweep_run(run_id: str, grace: float, spared: Sequence[int]) -> processes.Swept:
    """End the run's processes but the spared ones, reaping those that are our children."""
    _ignore_children()
    return processes.sweep(run_id, grace, exclude=spared)


def _ignore_children() -> None:
    """Let the kernel reap orphans from now on, so that they don't stay as zombies."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def out_of_memory_kills() -> int | None:
    """How many processes of this control group the kernel has killed for memory; None if it does
    not say. Version 2 first, then version 1."""
    for name in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            lines = Path(name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.isdigit():
                return int(value)
    return None


def sweep_after_agent(run_id: str, run_dir: Path, grace: float) -> int:
    """End what a killed agent left behind and record the end that it could not record."""
    spared = [os.getpid(), *processes.ancestors(os.getpid())]
    swept = sweep_run(run_id, grace, spared)
    if not (run_dir / EXIT_FILE).exists():
        record = {"code": 137, "phase": "agent", "signal": None, "ended": round(time.time(), 3)}
        record["swept"] = [*swept.terminated, *swept.killed]
        files.write_json(run_dir / EXIT_FILE, record)
    return 0


def already_alive(run_id: str, run_dir: Path) -> int | None:
    """The pid of an agent that watches this very run already, or None."""
    record = files.read_json(run_dir / AGENT_FILE)
    if record is None or record.get("boot_id") != processes.boot_id():
        return None
    process = processes.Process(int(record["pid"]), int(record["start_ticks"]))
    alive = processes.is_alive(process) and processes.belongs(process.pid, run_id)
    return process.pid if alive else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="flagscale.launch.agent", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--grace", type=float, required=True, help="seconds between TERM and KILL")
    parser.add_argument("--sweep", action="store_true", help="end what a killed agent left")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    run_id = os.environ.get(RUN_ID_VARIABLE)
    if not run_id:
        parser.error(f"{RUN_ID_VARIABLE} is not set")
    if options.sweep:
        return sweep_after_agent(run_id, options.run_dir, options.grace)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command given after --")
    other = already_alive(run_id, options.run_dir)
    if other is not None:
        print(f"flagscale: run {run_id} is alive already (agent {other})", file=sys.stderr)
        return 1
    return Agent(run_id, options.run_dir, options.grace).run(command)


if __name__ == "__main__":
    sys.exit(main())
