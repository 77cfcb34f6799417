"""Runner for hosts that are reached directly: this machine, or others over SSH.

Each action sends one program per host. The files of a run are read on this machine. Without a
shared file system, each probe fetches the new parts of them, see :mod:`.programs.probe_run`. The
host itself always determines whether processes of the run are alive.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

from flagscale.config.schema import PROJECT, Experiment
from flagscale.errors import ConfigError, FlagscaleError, RunStateError, UnreachableError
from flagscale.files import read_json, write_atomic
from flagscale.hosts import probe, processes
from flagscale.hosts.connection import HostConnection
from flagscale.hosts.fan_out import Hosts, format_host_errors, raise_host_errors
from flagscale.hosts.names import compress_names
from flagscale.hosts.processes import KilledProcesses
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.runners import endpoints
from flagscale.launcher.runners.base import ConfigTexts, PreparedRun
from flagscale.launcher.runners.programs import probe_run, start, stop
from flagscale.launcher.runners.programs.probe_run import ProbeRequest, ProbeResult
from flagscale.launcher.state import (
    RunState,
    alive_message,
    convert_disk_errors,
    load_state,
    make_state,
    new_run_id,
    save_plan,
    start_lock,
)
from flagscale.status import RUN_ID_VARIABLE

if TYPE_CHECKING:
    from flagscale.launcher.preflight.checks import Check
    from flagscale.launcher.preflight.host_probe import HostReplies
    from flagscale.launcher.runners.programs.filter_output import FilteredLines, FilterRequest
    from flagscale.launcher.snapshot import EventReader, Snapshot
    from flagscale.launcher.stop_result import StopResult

# Minimum interval between periodic probes; it grows with the number of hosts.
_PROBE_SECONDS = 1.0
_LOCAL_PROBE_SECONDS = 0.25
_HOSTS_PER_SECOND = 64


class HostRunner:
    """Starts, watches and ends runs on hosts through a :class:`HostConnection` each."""

    def __init__(self) -> None:
        self._hosts: Hosts | None = None
        self._results: dict[int, ProbeResult] = {}
        self._probed_at = float("-inf")
        self._reader: EventReader | None = None
        self._children: dict[int, Popen[bytes]] = {}
        """Scripts that end with this process, by node rank."""
        self._brings_output = True
        self._silent_hosts: set[int] = set()

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None

    # -- before a run ---------------------------------------------------------------------------

    def plan(self, experiment: Experiment) -> LaunchPlan:
        from flagscale.launcher.plan_builder import build_unprobed_plan, select_hosts

        hosts = select_hosts(experiment)
        handle = endpoints.make_handle(experiment.runner, hosts)
        return build_unprobed_plan(experiment, hosts, handle, is_local=endpoints.is_local(handle))

    @contextmanager
    def prepare(
        self, experiment: Experiment, *, checking: bool, fresh: bool = False
    ) -> Iterator[PreparedRun]:
        from flagscale.launcher.plan_builder import check_plan, note_loopback_address, select_hosts
        from flagscale.launcher.preflight.host_probe import build_plan, query_hosts
        from flagscale.launcher.preflight.hosts import check_hosts, require_usable

        hosts = select_hosts(experiment)
        handle = endpoints.make_handle(experiment.runner, hosts)
        with endpoints.open_hosts(handle, [host.name for host in hosts]) as connected_hosts:
            is_local = endpoints.is_local(handle)
            probe_results = query_hosts(
                experiment,
                hosts,
                connected_hosts,
                is_local=is_local,
                for_preflight=checking,
                ignore_cache=fresh,
            )
            plan = build_plan(experiment, probe_results, new_run_id(), handle)
            # A preflight detects by itself whether the hosts are one machine.
            notes = () if checking else note_loopback_address(plan.master_addr, len(hosts))
            plan = check_plan(experiment, plan, *notes)
            prepared = PreparedRun(
                plan,
                copy_code=lambda: _copy_code(experiment, probe_results, connected_hosts),
                check_hardware=lambda: check_hardware(experiment, probe_results, connected_hosts),
            )
            if checking:
                previous = load_state(plan.layout.state)
                prepared.checks = check_hosts(experiment, plan, probe_results, previous)
            else:
                require_usable(experiment, probe_results)
            self._hosts = connected_hosts
            yield prepared

    # -- start --------------------------------------------------------------------------------

    def submit(self, plan: LaunchPlan, texts: ConfigTexts, *, foreground: bool = False) -> RunState:
        """Start the run, detached on every host, so that it outlives this process.

        In the foreground on this machine, the script is a child process and ends with this one.
        """
        from flagscale.hosts.local import LocalConnection

        layout = plan.layout
        start_time = time.monotonic()
        # Held from the first check of the previous run to the last write, so that only one of
        # several launches starts, and the others do not touch the files of its run.
        with start_lock(layout):
            previous = load_state(layout.state)
            # A start of which the launcher was killed may still be in progress on a host: from now
            # on it does nothing.
            with convert_disk_errors(layout):
                write_atomic(layout.claim, f"{plan.run_id}\n")
            if previous is not None:
                _require_ended(previous)
            with convert_disk_errors(layout):
                self._write_files(plan, texts, previous)
                state = make_state(plan)
                # Saved before anything starts, so that the run can be stopped if this launcher dies
                # here.
                state.save(layout.state)
            programs = _start_programs(plan, texts, previous, tied=foreground)

            def start_host(number: int, connection: HostConnection) -> start.ScriptProcess:
                if foreground and isinstance(connection, LocalConnection):
                    result, self._children[number] = connection.run_exec_script(
                        programs[number], {RUN_ID_VARIABLE: plan.run_id}
                    )
                else:
                    result = connection.run_script(
                        programs[number], timeout=start.START_TIMEOUT_SECONDS
                    )
                return start.parse_result(connection.name, result)

            started, errors = self._open_hosts(state).run_on_hosts(start_host)
            hosts = list(state.hosts)
            for number, process in started.items():
                hosts[number] = replace(hosts[number], **vars(process))
            state = replace(state, hosts=tuple(hosts))
            try:
                with convert_disk_errors(layout):
                    state.save(layout.state)
            except (ConfigError, OSError):
                self.stop(state)  # `query` would not find its processes
                raise
            if errors:
                self._abort_start(state, errors, previous)
        if not endpoints.is_local(state.runner):
            summary = f"started on {len(started)} host(s) in {time.monotonic() - start_time:.2f} s"
            print(summary, file=sys.stderr, flush=True)
        return state

    def _write_files(self, plan: LaunchPlan, texts: ConfigTexts, previous: RunState | None) -> None:
        """Write the plan's files on this machine; on a shared file system the hosts see them."""
        save_plan(plan, **vars(texts))
        if plan.shared_fs:
            return  # each host writes its script
        from flagscale.launcher.planning.script import render

        for host in plan.hosts:
            write_atomic(host.script, render(plan, host), mode=0o700)
        for previous_host in previous.hosts if previous is not None else ():
            previous_host.set_output_aside()

    def _abort_start(
        self, state: RunState, errors: Mapping[int, FlagscaleError], previous: RunState | None
    ) -> None:
        """Stop a run of which some hosts did not start, since the others would wait for them
        forever.

        Raises:
            RunStateError: If a previous run is alive on all of these hosts, or the only host is
                local.
            ConfigError: If the run's files cannot be written on these hosts.
            UnreachableError: Otherwise, with the reason of each host.
        """
        names = [host.name for host in state.hosts]
        stop_result = self.stop(state)
        already_running = [
            isinstance(e, start.StartError) and e.already_running for e in errors.values()
        ]
        if any(already_running) and previous is not None:
            # The previous run is alive, so `query` and `stop` have to find its state.
            previous.save(Layout(state.exp_dir).state)
            if all(already_running):
                message, hint = alive_message(previous, [names[number] for number in errors])
                raise RunStateError(message, hint=hint)
        text = (
            f"run {state.run_id} was not started on {len(errors)} of {len(names)} host(s), "
            "and was stopped on the others"
        )
        if len(stop_result.unreachable) > len(errors):
            text += ", except on those that do not answer"
        text = f"{text}\n{format_host_errors(errors, names)}"
        if all(isinstance(e, start.StartError) and e.cannot_write for e in errors.values()):
            raise ConfigError(text)
        error_type = RunStateError if endpoints.is_local(state.runner) else UnreachableError
        raise error_type(text)

    def await_hosts(self, state: RunState) -> RunState:
        return state

    # -- watch --------------------------------------------------------------------------------

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        from flagscale.launcher.snapshot import EventReader, take_snapshot

        shared = state.shared_fs
        request = ProbeRequest(fetch=not shared, last_line=with_lines and not shared)
        self._probe_if_stale(state, request)
        if self._reader is None:
            self._reader = EventReader(state.hosts)
        return take_snapshot(state, self._results, self._reader, with_lines=with_lines and shared)

    def bring_output(self, state: RunState) -> None:
        if state.shared_fs:
            return
        self._probe_hosts(state, ProbeRequest(fetch=True, output=True))
        errors = {
            number: result.error
            for number, result in self._results.items()
            if result.error is not None
        }
        self._silent_hosts = set()
        self._warn_of_silent_hosts(state, errors)

    def filter_output(
        self, state: RunState, requests: Mapping[int, FilterRequest]
    ) -> dict[int, FilteredLines]:
        from flagscale.launcher.runners.programs.filter_output import filter_output

        # The lines are enough; the end of the run shows in its other files.
        self._brings_output = False
        plan = read_json(Layout(state.exp_dir).plan) or {}
        pythons = {host["name"]: host.get("python", "") for host in plan.get("hosts", ())}

        def filter_host(number: int, connection: HostConnection) -> FilteredLines:
            python = pythons.get(state.hosts[number].name, "")
            return filter_output(connection, requests[number], python)

        results, errors = self._open_hosts(state).run_on_hosts(filter_host, list(requests))
        self._warn_of_silent_hosts(state, errors)
        return results

    def _warn_of_silent_hosts(self, state: RunState, errors: Mapping[int, FlagscaleError]) -> None:
        """Print a warning about hosts that did not answer, once for each."""
        new_errors = {n: error for n, error in errors.items() if n not in self._silent_hosts}
        self._silent_hosts |= set(new_errors)
        if new_errors:
            text = format_host_errors(new_errors, [host.name for host in state.hosts])
            print(f"warning: no answer from\n{text}", file=sys.stderr)

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        from flagscale.launcher.job_hosts import find_job_hosts

        if len(self._children) == len(state.hosts):
            ended = [child.poll() is not None for child in self._children.values()]
        else:
            fetch = not state.shared_fs
            output = fetch and self._brings_output
            self._probe_if_stale(state, ProbeRequest(fetch=fetch, output=output))
            job_hosts = find_job_hosts(state)
            members = {host.node_rank for host in job_hosts.members}
            ended = [
                self._script_ended(state, number)
                for number, host in enumerate(state.hosts)
                if number in members or not (any_host or host.name in job_hosts.replaced)
            ]
        return any(ended) if any_host else all(ended)

    def _script_ended(self, state: RunState, number: int) -> bool:
        result = self._results.get(number)
        if result is None or result.alive == "script":
            # The job may have ended, but after_stop may still be running.
            return False
        may_be_alive = bool(result.alive or result.trouble)
        return not may_be_alive or state.hosts[number].exit() is not None

    def rank_count(self, state: RunState) -> int:
        self._probe_hosts(state, ProbeRequest(fetch=not state.shared_fs, count=True))
        return sum(result.ranks or 0 for result in self._results.values())

    def wait(self, state: RunState) -> int:
        from flagscale.launcher.failures import compute_job_code, find_first_failure
        from flagscale.launcher.job_hosts import select_job_members

        while not self.ended(state):
            time.sleep(processes.POLL_SECONDS)
        state = select_job_members(state)
        exits = [host.exit() for host in state.hosts]
        code = compute_job_code(state, exits, find_first_failure(state, {})) or 0
        unrecorded = exits.count(None)
        if code or not unrecorded:
            return code
        # If a script could not record its exit code on a full disk, its parent still gets it.
        codes = [child.wait() for child in self._children.values()]
        default = 0 if len(codes) >= unrecorded else 1
        return next((code if code > 0 else 128 - code for code in codes if code), default)

    def _probe_if_stale(self, state: RunState, request: ProbeRequest) -> None:
        """Probe the hosts, unless they were probed a moment ago."""
        min_interval = _LOCAL_PROBE_SECONDS if endpoints.is_local(state.runner) else _PROBE_SECONDS
        if time.monotonic() - self._probed_at >= max(
            min_interval, len(state.hosts) / _HOSTS_PER_SECOND
        ):
            self._probe_hosts(state, request)

    def _probe_hosts(self, state: RunState, request: ProbeRequest) -> None:
        """Probe all hosts, and again those that have more to fetch."""

        def probe_host(number: int, connection: HostConnection) -> ProbeResult:
            return probe_run.probe_run(connection, state, state.hosts[number], request)

        hosts = self._open_hosts(state)
        numbers: Sequence[int] = range(len(state.hosts))
        for _ in range(1000):
            results, errors = hosts.run_on_hosts(probe_host, numbers)
            self._results.update(results)
            self._results.update({number: ProbeResult.failed(e) for number, e in errors.items()})
            numbers = [number for number in results if results[number].more]
            if not numbers:
                break
        self._probed_at = time.monotonic()

    # -- stop ---------------------------------------------------------------------------------

    def stop(self, state: RunState) -> StopResult:
        """End the run on every host that answers, and report the hosts that do not."""
        from flagscale.launcher.stop_result import StopResult, killed_ranks, record_stop

        stopping_state = replace(state, stop_requested=round(time.time(), 3))
        unrecorded = record_stop(stopping_state)
        start_time = time.monotonic()

        def stop_host(number: int, connection: HostConnection) -> KilledProcesses | None:
            spared: Sequence[int] = ()
            if hosts.endpoints[number].via == "local":
                spared = [os.getpid(), *processes.find_ancestors(os.getpid())]
            return stop.stop_on_host(connection, state, state.hosts[number], spared)

        hosts = self._open_hosts(state)
        results, errors = hosts.run_on_hosts(stop_host)
        self._probed_at = float("-inf")
        ended_processes = {
            state.hosts[number].name: result
            for number, result in sorted(results.items())
            if result is not None
        }
        if not ended_processes and not errors:
            # The run had ended before, so its state must not record a stop.
            record_stop(state)
            return StopResult()
        if unrecorded is not None:
            unrecorded = record_stop(stopping_state)
        killed: dict[str, tuple[int, ...]] = {}
        grace_expired = time.monotonic() - start_time >= state.stop_grace
        if grace_expired or any(host_swept.killed for host_swept in ended_processes.values()):
            # These files only serve a warning, so errors of reading or fetching are ignored.
            with suppress(OSError):
                if not state.shared_fs:
                    self._probe_hosts(state, ProbeRequest(fetch=True))
                killed = {
                    host.name: killed_ranks(host, ended_processes[host.name])
                    for host in state.hosts
                    if host.name in ended_processes
                }
        return StopResult(
            ended_processes, [errors[number] for number in sorted(errors)], killed, unrecorded
        )

    def _open_hosts(self, state: RunState) -> Hosts:
        if self._hosts is None:
            if endpoints.is_local(state.runner):
                endpoints.require_same_machine(state)
            self._hosts = endpoints.open_hosts(state.runner, [host.name for host in state.hosts])
        return self._hosts


def _require_ended(previous: RunState) -> None:
    """Check that the previous run of a directory has ended on all of its hosts.

    Hosts that do not answer, and on which the run's end is not recorded, are noted: such a run may
    have been given up because a host was lost.

    Raises:
        RunStateError: If processes of the run are alive.
    """
    if previous.runner.type not in ("local", "ssh"):
        from flagscale.launcher.runners.base import runner_for_run

        if not runner_for_run(previous).ended(previous):
            message, hint = alive_message(previous)
            raise RunStateError(message, hint=hint)
        return
    results: dict[int, ProbeResult] = {}
    with closing(HostRunner()) as runner, suppress(UnreachableError):
        runner._probe_hosts(previous, ProbeRequest(await_start=True))
        results = runner._results
    names = [host.name for host in previous.hosts]
    if alive := [names[number] for number, result in results.items() if result.alive]:
        message, hint = alive_message(previous, alive)
        raise RunStateError(message, hint=hint)
    unknown_hosts = [
        host.name
        for number, host in enumerate(previous.hosts)
        if (number not in results or results[number].trouble) and host.exit() is None
    ]
    if unknown_hosts:
        print(
            f"note: run {previous.run_id} may be alive on {compress_names(unknown_hosts)}, which "
            "cannot be asked",
            file=sys.stderr,
        )


def _start_programs(
    plan: LaunchPlan, texts: ConfigTexts, previous: RunState | None, *, tied: bool
) -> list[str]:
    """Return the program for each host that writes its files and starts its script."""
    from flagscale.launcher.planning.script import render

    previous_hosts = {host.name: host for host in previous.hosts} if previous else {}
    plan_files: dict[Path, str] = {}
    if not plan.shared_fs:
        layout = plan.layout
        plan_files = {
            layout.plan: layout.plan.read_text(encoding="utf-8"),
            layout.config: texts.config,
            layout.overrides: texts.overrides,
        }
    tied = tied and endpoints.is_local(plan.runner)
    return [
        start.render_start(
            host,
            plan.run_id,
            {**plan_files, host.script: render(plan, host)},
            previous=previous_hosts.get(host.name),
            previous_run_id=previous.run_id if previous else "",
            claim_file=plan.layout.claim if plan.shared_fs else None,
            tied=tied,
        )
        for host in plan.hosts
    ]


def check_hardware(experiment: Experiment, probe_results: HostReplies, hosts: Hosts) -> list[Check]:
    """Measure the hardware of the hosts, if the experiment requests it."""
    if experiment.runner.health == "off":
        return []
    from flagscale.launcher.preflight import hardware

    return hardware.check_hardware(experiment, probe_results, hosts)


def _copy_code(experiment: Experiment, probe_results: HostReplies, hosts: Hosts) -> None:
    """Copy the code to every host whose code differs, if the runner is configured to do so."""
    from flagscale.launcher.preflight.host_probe import copies_code, rank_python
    from flagscale.launcher.runners.programs import code

    if not copies_code(experiment, is_local=probe_results.is_local):
        return
    files = probe.build_manifest(str(PROJECT))
    digest = probe.digest_manifest(files)
    outdated = [
        number
        for number, facts in probe_results.facts.items()
        if facts.python is None or facts.python.code != digest
    ]

    def copy_to_host(number: int, connection: HostConnection) -> int:
        settings = probe_results.settings[number]
        return code.sync_code(
            connection,
            PROJECT,
            files,
            project=settings.build_dir or PROJECT,
            python=rank_python(settings),
            setup=settings.setup,
        )

    _, errors = hosts.run_on_hosts(copy_to_host, outdated)
    raise_host_errors(errors, probe_results.names, "the code could not be copied")
    probe_results.is_code_copied = True
