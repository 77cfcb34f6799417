"""Runs a plan on other machines, reached by SSH: one connection and one command a host an action.

The files of a run are read on this machine: where they are shared they lie here, and where they
are not each look brings what is new, see :mod:`.programs.look`. What SSH alone
can tell is whether anything of the run lives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flagscale.errors import FlagscaleError, UnreachableError
from flagscale.files import make_private_directory, write_atomic
from flagscale.hosts.processes import Process, Swept
from flagscale.hosts.reach import Endpoint, Hosts, describe
from flagscale.hosts.ssh import Connection
from flagscale.launch import logs, snapshot
from flagscale.launch.failures import first_failure
from flagscale.launch.layout import OLD_OUTPUT_FILE, Layout
from flagscale.launch.planning.model import LaunchPlan
from flagscale.launch.planning.script import render
from flagscale.launch.runners.base import Stopped, keep_plan, killed_ranks, record_stop
from flagscale.launch.runners.programs import look as looking
from flagscale.launch.runners.programs import start, stop
from flagscale.launch.runners.programs.look import Look, Wish
from flagscale.launch.snapshot import EventReader, Snapshot
from flagscale.launch.state import RunState, load_state, start_lock, state_of, with_process

# Between looks at hosts that nobody asked for; more hosts are looked at less often.
_PAUSE_SECONDS = 1.0
_HOSTS_A_SECOND = 64


class SshRunner:
    """Starts, watches and ends a run on hosts behind SSH."""

    def __init__(
        self,
        config_text: str = "",
        overrides_text: str = "",
        hosts: Hosts | None = None,
    ) -> None:
        """``hosts`` are connections that are open already, to the hosts of the plan in order.
        The texts are kept beside the scripts; they hold no secrets."""
        self._config_text = config_text
        self._overrides_text = overrides_text
        self._hosts = hosts
        self._looks: dict[int, Look] = {}
        self._looked = 0.0
        self._reader: EventReader | None = None

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None

    # -- start --------------------------------------------------------------------------------

    def submit(self, plan: LaunchPlan, *, foreground: bool = False) -> RunState:
        """Start the run, detached on every host: it lives on when this process ends.

        Raises :class:`UnreachableError` when a host does not start it; the others are stopped.
        """
        layout = plan.layout
        began = time.monotonic()
        with start_lock(layout):
            previous = load_state(layout.state)
            self._write(plan, previous)
            state = state_of(plan)
            # Saved before anything starts: a launch that dies here still leaves a run to stop.
            state.save(layout.state)
            programs = self._programs(plan, previous)

            def begin(rank: int, connection: Connection) -> start.Started:
                return start.start(connection, programs[rank])

            started, errors = self._reach(state).each(begin)
            for rank, one in started.items():
                process = Process(one.pid, one.start_ticks)
                state = with_process(state, rank, process, one.boot_id)
            state.save(layout.state)
        if errors:
            self._give_up(state, errors, previous)
        seconds = time.monotonic() - began
        print(f"started on {len(started)} host(s) in {seconds:.2f} s", file=sys.stderr, flush=True)
        return state

    def _write(self, plan: LaunchPlan, previous: RunState | None) -> None:
        """What this machine keeps of the plan; with shared files that is what the hosts see."""
        keep_plan(plan, self._config_text, self._overrides_text)
        if plan.shared_fs:
            # Hosts write their scripts themselves; making them executable is done for all here.
            for host in plan.hosts:
                host.script.touch(mode=0o700)
            return
        for host in plan.hosts:
            write_atomic(host.script, render(plan, host), mode=0o700)
        for old in previous.hosts if previous is not None else ():
            if old.output.exists():
                make_private_directory(old.run_dir)
                old.output.replace(old.run_dir / OLD_OUTPUT_FILE)

    def _programs(self, plan: LaunchPlan, previous: RunState | None) -> list[str]:
        old = {host.name: host for host in previous.hosts} if previous else {}
        more: dict[Path, str] = {}
        if not plan.shared_fs:
            layout = plan.layout
            more = {
                layout.plan: layout.plan.read_text(encoding="utf-8"),
                layout.config: self._config_text,
                layout.overrides: self._overrides_text,
            }
        return [
            start.text(
                host,
                plan.run_id,
                {**more, host.script: render(plan, host)},
                previous=old.get(host.name),
            )
            for host in plan.hosts
        ]

    def _give_up(
        self, state: RunState, errors: dict[int, FlagscaleError], previous: RunState | None
    ) -> None:
        """Not every host started: half a job would wait for the others for ever."""
        names = [host.name for host in state.hosts]
        ended = self.stop(state)
        beside = any(isinstance(e, start.StartError) and e.beside for e in errors.values())
        if beside and previous is not None:
            # What lives is the run before: it is the one to query and to stop.
            previous.save(Layout(state.exp_dir).state)
        text = f"run {state.run_id} was not started on {len(errors)} of {len(names)} host(s), "
        text += "and was stopped on the others"
        if len(ended.unreachable) > len(errors):
            text += ", except on those that do not answer"
        raise UnreachableError(f"{text}\n{describe(errors, names)}")

    # -- watch --------------------------------------------------------------------------------

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        shared = state.shared_fs
        self._look(state, Wish(fetch=not shared, last_line=with_lines and not shared))
        if self._reader is None:
            self._reader = EventReader(state.hosts)
        return snapshot.take(state, self._reader, self._looks, with_lines=with_lines and shared)

    def logs(self, state: RunState, rank: int | None = None) -> list[str]:
        self.bring_output(state)
        return logs.lines_of(state, rank)

    def bring_output(self, state: RunState) -> None:
        if state.shared_fs:
            return
        self._look(state, Wish(fetch=True, output=True))
        names = [host.name for host in state.hosts]
        errors = {rank: one.error for rank, one in self._looks.items() if one.error is not None}
        if errors:
            print(f"warning: no news from\n{describe(errors, names)}", file=sys.stderr)

    def is_alive(self, state: RunState) -> bool:
        self._look(state, Wish())
        return any(look.alive or look.trouble for look in self._looks.values())

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        self._refresh(state)
        gone = [self._gone(state, rank) for rank in range(len(state.hosts))]
        return any(gone) if any_host else all(gone)

    def _gone(self, state: RunState, rank: int) -> bool:
        look = self._looks.get(rank)
        if look is None or look.alive == "script":
            # The job may have ended, but not yet what follows it.
            return False
        left = bool(look.alive or look.trouble)
        return not left or state.hosts[rank].exit() is not None

    def rank_count(self, state: RunState) -> int:
        self._look(state, Wish(fetch=not state.shared_fs, count=True))
        return sum(look.ranks or 0 for look in self._looks.values())

    def wait(self, state: RunState) -> int:
        """The job's exit code: of the host that failed first, else of the first that ended with
        one that isn't 0. The others were told to end, and may have done so sooner."""
        while not self.ended(state):
            time.sleep(_PAUSE_SECONDS)
        failure = first_failure(state, {})
        first = failure.host if failure is not None else None
        ends = [
            (host.name != first, end.ended, end.code)
            for host in state.hosts
            if (end := host.exit()) is not None
        ]
        failed = next((code for *_, code in sorted(ends) if code), 0)
        return failed if failed or len(ends) == len(state.hosts) else 1

    def _refresh(self, state: RunState) -> None:
        """Look again, unless that was done a moment ago."""
        pause = max(_PAUSE_SECONDS, len(state.hosts) / _HOSTS_A_SECOND)
        if time.monotonic() - self._looked >= pause:
            self._look(state, Wish(fetch=not state.shared_fs, output=not state.shared_fs))

    def _look(self, state: RunState, wish: Wish) -> None:
        def see(rank: int, connection: Connection) -> Look:
            return looking.look(connection, state, state.hosts[rank], wish)

        hosts = self._reach(state)
        ranks: Sequence[int] = range(len(state.hosts))
        for _ in range(1000):
            looks, errors = hosts.each(see, ranks)
            self._looks.update(looks)
            self._looks.update({rank: Look(error=error) for rank, error in errors.items()})
            ranks = [rank for rank in looks if looks[rank].more]
            if not ranks:
                break
        self._looked = time.monotonic()

    # -- stop ---------------------------------------------------------------------------------

    def stop(self, state: RunState) -> Stopped:
        """End the run on every host that answers; those that do not are named."""
        stopping = replace(state, stop_requested=round(time.time(), 3))
        unrecorded = record_stop(stopping)
        began = time.monotonic()

        def end(rank: int, connection: Connection) -> Swept | None:
            return stop.stop(connection, state, state.hosts[rank])

        swept, errors = self._reach(state).each(end)
        by_name = {
            state.hosts[rank].name: one for rank, one in sorted(swept.items()) if one is not None
        }
        if unrecorded is not None:
            unrecorded = record_stop(stopping)
        killed: dict[str, tuple[int, ...]] = {}
        waited = time.monotonic() - began >= state.stop_grace
        if waited or any(one.killed for one in by_name.values()):
            # What is left out if these files cannot be read or brought is a warning.
            with suppress(OSError):
                killed = self._killed(state, by_name)
        return Stopped(by_name, [errors[rank] for rank in sorted(errors)], killed, unrecorded)

    def _killed(self, state: RunState, swept: Mapping[str, Swept]) -> dict[str, tuple[int, ...]]:
        """The ranks that had to be killed, by host, of those that have reported their pid."""
        if not state.shared_fs:
            self._look(state, Wish(fetch=True))
        events = EventReader(state.hosts).refresh()
        pids = {
            rank: int(row.get("pid", 0))
            for rank, rows in events.items()
            for row in rows
            if row.event == "started"
        }
        return {
            host.name: killed_ranks(
                host, {rank: pids[rank] for rank in host.ranks if rank in pids}, swept[host.name]
            )
            for host in state.hosts
            if host.name in swept
        }

    def _reach(self, state: RunState) -> Hosts:
        if self._hosts is None:
            handle = state.runner.handle
            places = [
                (host.name, Endpoint(**place))
                for host, place in zip(state.hosts, handle["hosts"], strict=True)
            ]
            config = handle["ssh_config"]
            self._hosts = Hosts(places, Path(config) if config else None)
        return self._hosts
