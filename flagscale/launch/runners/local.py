"""Runs a plan's only host as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace

from flagscale.errors import RunStateError
from flagscale.files import make_private_directory, write_atomic
from flagscale.hosts import processes
from flagscale.hosts.processes import Swept
from flagscale.launch import agent, logs, snapshot
from flagscale.launch.layout import OLD_OUTPUT_FILE
from flagscale.launch.planning.model import HostPlan, LaunchPlan
from flagscale.launch.planning.script import render
from flagscale.launch.runners.base import Stopped, keep_plan, killed_ranks, record_stop
from flagscale.launch.snapshot import EventReader, Snapshot
from flagscale.launch.state import (
    HostState,
    RunState,
    load_state,
    refuse_if_alive,
    start_lock,
    state_of,
    with_process,
)
from flagscale.status import RUN_ID_VARIABLE

# Beyond the job's own grace period: the agent's kill, its sweep, and `after_stop`.
_AGENT_SECONDS = 15.0


class LocalRunner:
    """Starts, watches and ends a run on this machine."""

    def __init__(self, config_text: str = "", overrides_text: str = "") -> None:
        """The texts are kept beside the scripts; they hold no secrets."""
        self._config_text = config_text
        self._overrides_text = overrides_text
        self._scripts: dict[int, subprocess.Popen[bytes]] = {}
        self._reader: EventReader | None = None

    def submit(self, plan: LaunchPlan, *, foreground: bool = False) -> RunState:
        """Start the run. In the foreground it ends with this process.

        Raises :class:`RunStateError` while another run lives in the same directory.
        """
        layout = plan.layout
        with start_lock(layout):
            previous = load_state(layout.state)
            refuse_if_alive(previous)
            _keep_output(previous)
            self._write(plan)
            state = state_of(plan)
            # Saved before anything starts: a launch that dies here still leaves a run to stop.
            state.save(layout.state)
            for host in plan.hosts:
                process = self._start(plan, host, foreground=foreground)
                state = with_process(state, host.node_rank, process)
            state.save(layout.state)
        return state

    def _write(self, plan: LaunchPlan) -> None:
        keep_plan(plan, self._config_text, self._overrides_text)
        for host in plan.hosts:
            make_private_directory(host.run_dir)
            write_atomic(host.script, render(plan, host), mode=0o700)

    def _start(self, plan: LaunchPlan, host: HostPlan, *, foreground: bool) -> processes.Process:
        secrets = {value.name: value.value for value in host.environment if value.secret}
        environment = {**os.environ, **secrets, RUN_ID_VARIABLE: plan.run_id}
        descriptor = os.open(host.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            child = subprocess.Popen(
                ["bash", str(host.script)],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=agent.die_with(os.getpid(), signal.SIGTERM) if foreground else None,  # noqa: PLW1509
            )
        except FileNotFoundError:
            raise RunStateError("there is no bash on this machine's PATH") from None
        finally:
            os.close(descriptor)
        self._scripts[host.node_rank] = child
        return processes.identify(child.pid) or processes.Process(child.pid, 0)

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        """Whether the script has ended. Reaps it, too, where it is this process's child."""
        if not self._scripts:
            return not state.is_alive()
        ended = [child.poll() is not None for child in self._scripts.values()]
        return any(ended) if any_host else all(ended)

    def is_alive(self, state: RunState) -> bool:
        return state.is_alive()

    def rank_count(self, state: RunState) -> int:
        return sum(1 for process in state.alive() if processes.is_rank(process.pid))

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        if self._reader is None:
            self._reader = EventReader(state.hosts)
        return snapshot.take(state, self._reader, with_lines=with_lines)

    def bring_output(self, state: RunState) -> None:
        """Nothing to do: the files are this machine's."""

    def close(self) -> None:
        """Nothing to do: nothing is held."""

    def logs(self, state: RunState, rank: int | None = None) -> list[str]:
        return logs.lines_of(state, rank)

    def wait(self, state: RunState) -> int:
        """The exit code of the scripts: of the first that failed, else 0."""
        codes = [child.wait() for child in self._scripts.values()]
        return next((code if code > 0 else 128 - code for code in codes if code), 0)

    def stop(self, state: RunState) -> Stopped:
        """TERM to the agent, which ends the job in order; then, or where there is no agent, every
        process of the run: TERM, the grace period, KILL."""
        if state.boot_id != processes.boot_id():
            return Stopped()
        closed = {host.name: swept for host in state.hosts if (swept := _closed(host)) is not None}
        alive = state.alive()
        if closed or not alive:
            return Stopped(closed)
        ranks = {rank: one.pid for rank, one in processes.ranks(alive).items()}
        stopping = replace(state, stop_requested=round(time.time(), 3))
        unrecorded = record_stop(stopping)
        for host in state.hosts:
            self._stop_host(state, host)
            with suppress(OSError):
                host.pid_file.unlink(missing_ok=True)
        exclude = [os.getpid(), *processes.ancestors(os.getpid())]
        swept = processes.sweep(state.run_id, state.stop_grace, exclude=exclude)
        if unrecorded is not None:
            unrecorded = record_stop(stopping)
        killed = {host.name: killed_ranks(host, ranks, swept) for host in state.hosts}
        return Stopped({host.name: swept for host in state.hosts}, (), killed, unrecorded)

    def _stop_host(self, state: RunState, host: HostState) -> None:
        watcher = host.agent()
        if watcher is None or not processes.send(watcher, signal.SIGTERM, run_id=state.run_id):
            return

        def over() -> bool:
            for child in self._scripts.values():
                child.poll()
            return not state.is_alive()

        processes.wait_until(over, state.stop_grace + _AGENT_SECONDS)


def _closed(host: HostState) -> Swept | None:
    """What lives of a run on a host and is not this user's to end."""
    return processes.closed(look() for look in (host.process, host.agent))


def _keep_output(previous: RunState | None) -> None:
    """Move the last run's output into that run's directory: an output file holds one run."""
    for host in previous.hosts if previous is not None else ():
        if host.output.exists():
            make_private_directory(host.run_dir)
            host.output.replace(host.run_dir / OLD_OUTPUT_FILE)
