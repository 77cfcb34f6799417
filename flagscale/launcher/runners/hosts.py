"""Runs a plan on hosts, this machine or others behind SSH: one program a host an action.

The files of a run are read on this machine: where they are shared they lie here, and where they
are not each look brings what is new, see :mod:`.programs.look`. What only a host can tell is
whether anything of the run lives there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

from flagscale.config.schema import PROJECT, Experiment
from flagscale.errors import FlagscaleError, RunStateError, UnreachableError
from flagscale.files import write_atomic
from flagscale.hosts import probe, processes
from flagscale.hosts.executor import Executor
from flagscale.hosts.fan_out import Hosts, describe, require_all
from flagscale.hosts.processes import Swept
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.runners import endpoints
from flagscale.launcher.runners.base import Prepared, Texts
from flagscale.launcher.runners.programs import look as looking
from flagscale.launcher.runners.programs import start, stop
from flagscale.launcher.runners.programs.look import ProbeRequest, ProbeResult
from flagscale.launcher.state import (
    RunState,
    alive_message,
    keep_plan,
    load_state,
    new_run_id,
    start_lock,
    state_of,
)

if TYPE_CHECKING:
    from flagscale.launcher.preflight.host_probe import Survey
    from flagscale.launcher.snapshot import EventReader, Snapshot
    from flagscale.launcher.stop_result import Stopped

# Between looks at hosts that nobody asked for; more hosts are looked at less often.
_PAUSE_SECONDS = 1.0
_PAUSE_HERE_SECONDS = 0.25
_HOSTS_A_SECOND = 64


class HostRunner:
    """Starts, watches and ends a run on hosts that executors reach."""

    def __init__(self) -> None:
        self._hosts: Hosts | None = None
        self._looks: dict[int, ProbeResult] = {}
        self._looked = float("-inf")
        self._reader: EventReader | None = None
        self._children: dict[int, Popen[bytes]] = {}
        """Scripts that end with this process, by node rank."""

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None

    # -- before a run ---------------------------------------------------------------------------

    def plan(self, experiment: Experiment) -> LaunchPlan:
        from flagscale.launcher.plan_builder import hosts_of, unprobed_plan

        hosts = hosts_of(experiment)
        handle = endpoints.handle(experiment, hosts)
        return unprobed_plan(experiment, hosts, handle, here=endpoints.is_here(handle))

    @contextmanager
    def prepare(
        self, experiment: Experiment, *, checking: bool, fresh: bool = False
    ) -> Iterator[Prepared]:
        from flagscale.launcher.plan_builder import checked, hosts_of, loopback_notes
        from flagscale.launcher.preflight.host_probe import plan_of, survey
        from flagscale.launcher.preflight.hosts import check_hosts, require_usable

        hosts = hosts_of(experiment)
        handle = endpoints.handle(experiment, hosts)
        with endpoints.reach(handle, [host.name for host in hosts]) as reached:
            here = endpoints.is_here(handle)
            found = survey(experiment, hosts, reached, here=here, thorough=checking, fresh=fresh)
            made = plan_of(experiment, found, new_run_id(), handle)
            # A preflight knows whether the hosts are one machine.
            made = checked(experiment, made, *(() if checking else loopback_notes(made)))
            ready = Prepared(made, copy_code=lambda: _copy_code(experiment, found, reached))
            if checking:
                previous = load_state(made.layout.state)
                ready.checks = check_hosts(experiment, made, found, previous)
            else:
                require_usable(experiment, found)
            self._hosts = reached
            yield ready

    # -- start --------------------------------------------------------------------------------

    def submit(self, plan: LaunchPlan, texts: Texts, *, foreground: bool = False) -> RunState:
        """Start the run, detached on every host: it lives on when this process ends. Only in the
        foreground, on this very machine, it ends with it."""
        from flagscale.hosts.local import LocalExecutor

        layout = plan.layout
        began = time.monotonic()
        with start_lock(layout):
            previous = load_state(layout.state)
            self._write(plan, texts, previous)
            state = state_of(plan)
            # Saved before anything starts: a launch that dies here still leaves a run to stop.
            state.save(layout.state)
            programs = _programs(plan, texts, previous, tied=foreground)

            def begin(number: int, executor: Executor) -> start.Started:
                if foreground and isinstance(executor, LocalExecutor):
                    result, self._children[number] = executor.run_tied(programs[number])
                else:
                    result = executor.run_script(programs[number], timeout=start.SECONDS)
                return start.read(executor.name, result)

            started, errors = self._reach(state).each(begin)
            hosts = list(state.hosts)
            for number, one in started.items():
                hosts[number] = replace(hosts[number], **vars(one))
            state = replace(state, hosts=tuple(hosts))
            state.save(layout.state)
        if errors:
            self._give_up(state, errors, previous)
        if not endpoints.is_here(state.runner):
            text = f"started on {len(started)} host(s) in {time.monotonic() - began:.2f} s"
            print(text, file=sys.stderr, flush=True)
        return state

    def _write(self, plan: LaunchPlan, texts: Texts, previous: RunState | None) -> None:
        """What this machine keeps of the plan; with shared files that is what the hosts see."""
        keep_plan(plan, texts.config, texts.overrides)
        if plan.shared_fs:
            # Hosts write their scripts themselves; making them executable is done for all here.
            for host in plan.hosts:
                host.script.touch(mode=0o700)
            return
        from flagscale.launcher.planning.script import render

        for host in plan.hosts:
            write_atomic(host.script, render(plan, host), mode=0o700)
        for old in previous.hosts if previous is not None else ():
            old.set_output_aside()

    def _give_up(
        self, state: RunState, errors: Mapping[int, FlagscaleError], previous: RunState | None
    ) -> None:
        """Not every host started: half a job would wait for the others for ever."""
        names = [host.name for host in state.hosts]
        ended = self.stop(state)
        refused = [isinstance(e, start.StartError) and e.beside for e in errors.values()]
        if any(refused) and previous is not None:
            # What lives is the run before: it is the one to query and to stop.
            previous.save(Layout(state.exp_dir).state)
            if all(refused):
                message, hint = alive_message(previous, [names[number] for number in errors])
                raise RunStateError(message, hint=hint)
        text = f"run {state.run_id} was not started on {len(errors)} of {len(names)} host(s), "
        text += "and was stopped on the others"
        if len(ended.unreachable) > len(errors):
            text += ", except on those that do not answer"
        kind = RunStateError if endpoints.is_here(state.runner) else UnreachableError
        raise kind(f"{text}\n{describe(errors, names)}")

    def await_hosts(self, state: RunState) -> RunState:
        return state

    # -- watch --------------------------------------------------------------------------------

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        from flagscale.launcher.snapshot import EventReader, take

        shared = state.shared_fs
        request = ProbeRequest(fetch=not shared, last_line=with_lines and not shared)
        self._refresh(state, request)
        if self._reader is None:
            self._reader = EventReader(state.hosts)
        return take(state, self._looks, self._reader, with_lines=with_lines and shared)

    def bring_output(self, state: RunState) -> None:
        if state.shared_fs:
            return
        self._look(state, ProbeRequest(fetch=True, output=True))
        names = [host.name for host in state.hosts]
        errors = {number: one.error for number, one in self._looks.items() if one.error is not None}
        if errors:
            print(f"warning: no news from\n{describe(errors, names)}", file=sys.stderr)

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        if len(self._children) == len(state.hosts):
            gone = [child.poll() is not None for child in self._children.values()]
        else:
            fetch = not state.shared_fs
            self._refresh(state, ProbeRequest(fetch=fetch, output=fetch))
            gone = [self._gone(state, number) for number in range(len(state.hosts))]
        return any(gone) if any_host else all(gone)

    def _gone(self, state: RunState, number: int) -> bool:
        look = self._looks.get(number)
        if look is None or look.alive == "script":
            # The job may have ended, but not yet what follows it.
            return False
        left = bool(look.alive or look.trouble)
        return not left or state.hosts[number].exit() is not None

    def rank_count(self, state: RunState) -> int:
        self._look(state, ProbeRequest(fetch=not state.shared_fs, count=True))
        return sum(look.ranks or 0 for look in self._looks.values())

    def wait(self, state: RunState) -> int:
        from flagscale.launcher.failures import first_failure, job_code

        while not self.ended(state):
            time.sleep(processes.POLL_SECONDS)
        exits = [host.exit() for host in state.hosts]
        code = job_code(state, exits, first_failure(state, {})) or 0
        untold = exits.count(None)
        if code or not untold:
            return code
        # Of a script that could not write it down, on a full disk, its parent knows the code.
        codes = [child.wait() for child in self._children.values()]
        known = len(codes) >= untold
        return next((code if code > 0 else 128 - code for code in codes if code), 0 if known else 1)

    def _refresh(self, state: RunState, request: ProbeRequest) -> None:
        """Look again, unless that was done a moment ago."""
        pause = _PAUSE_HERE_SECONDS if endpoints.is_here(state.runner) else _PAUSE_SECONDS
        if time.monotonic() - self._looked >= max(pause, len(state.hosts) / _HOSTS_A_SECOND):
            self._look(state, request)

    def _look(self, state: RunState, request: ProbeRequest) -> None:
        def see(number: int, executor: Executor) -> ProbeResult:
            return looking.look(executor, state, state.hosts[number], request)

        hosts = self._reach(state)
        numbers: Sequence[int] = range(len(state.hosts))
        for _ in range(1000):
            looks, errors = hosts.each(see, numbers)
            self._looks.update(looks)
            self._looks.update({number: ProbeResult.failed(e) for number, e in errors.items()})
            numbers = [number for number in looks if looks[number].more]
            if not numbers:
                break
        self._looked = time.monotonic()

    # -- stop ---------------------------------------------------------------------------------

    def stop(self, state: RunState) -> Stopped:
        """End the run on every host that answers; those that do not are named."""
        from flagscale.launcher.stop_result import Stopped, killed_ranks, record_stop

        stopping = replace(state, stop_requested=round(time.time(), 3))
        unrecorded = record_stop(stopping)
        began = time.monotonic()

        def end(number: int, executor: Executor) -> Swept | None:
            here = reached.endpoints[number].via == "local"
            spared = [os.getpid(), *processes.ancestors(os.getpid())] if here else ()
            return stop.stop(executor, state, state.hosts[number], spared)

        reached = self._reach(state)
        swept, errors = reached.each(end)
        self._looked = float("-inf")
        ended = [(number, one) for number, one in sorted(swept.items()) if one is not None]
        found = {state.hosts[number].name: one for number, one in ended}
        if not found and not errors:
            # It had ended before: whoever looks at it later must not take that for a stop.
            record_stop(state)
            return Stopped()
        if unrecorded is not None:
            unrecorded = record_stop(stopping)
        killed: dict[str, tuple[int, ...]] = {}
        waited = time.monotonic() - began >= state.stop_grace
        if waited or any(one.killed for one in found.values()):
            # What is left out if these files cannot be read or brought is a warning.
            with suppress(OSError):
                if not state.shared_fs:
                    self._look(state, ProbeRequest(fetch=True))
                killed = {
                    host.name: killed_ranks(host, found[host.name])
                    for host in state.hosts
                    if host.name in found
                }
        return Stopped(found, [errors[number] for number in sorted(errors)], killed, unrecorded)

    def _reach(self, state: RunState) -> Hosts:
        if self._hosts is None:
            if endpoints.is_here(state.runner):
                endpoints.require_here(state)
            self._hosts = endpoints.reach(state.runner, [host.name for host in state.hosts])
        return self._hosts


def _programs(
    plan: LaunchPlan, texts: Texts, previous: RunState | None, *, tied: bool
) -> list[str]:
    """What each host is told to do to start its script."""
    from flagscale.launcher.planning.script import render

    old = {host.name: host for host in previous.hosts} if previous else {}
    more: dict[Path, str] = {}
    if not plan.shared_fs:
        layout = plan.layout
        more = {
            layout.plan: layout.plan.read_text(encoding="utf-8"),
            layout.config: texts.config,
            layout.overrides: texts.overrides,
        }
    tied = tied and endpoints.is_here(plan.runner)
    return [
        start.text(
            host,
            plan.run_id,
            {**more, host.script: render(plan, host)},
            previous=old.get(host.name),
            tied=tied,
        )
        for host in plan.hosts
    ]


def _copy_code(experiment: Experiment, found: Survey, reached: Hosts) -> None:
    """Copy the code to every host whose code differs, where the runner is to do that."""
    from flagscale.launcher.preflight.host_probe import python_of, syncs
    from flagscale.launcher.runners.programs import code

    if not syncs(experiment, here=found.here):
        return
    files = probe.manifest(str(PROJECT))
    digest = probe.digest_of(files)
    behind = [n for n, f in found.facts.items() if f.python is None or f.python.code != digest]

    def copy(number: int, executor: Executor) -> int:
        own = found.settings[number]
        project, python = own.build_dir or PROJECT, python_of(own)
        return code.sync(executor, PROJECT, files, project=project, python=python, setup=own.setup)

    _, errors = reached.each(copy, behind)
    require_all(errors, found.names, "the code could not be copied")
