"""Supervisor between a host's script and torchrun, one per host. Standard library alone.

``python -m flagscale.launcher.agent --options JSON -- COMMAND …`` starts the command and ensures
that no process of the run outlives it:

- TERM, INT and HUP end the job in order: TERM to the ranks, then to torchrun, and KILL after the
  grace period. A second signal, more than a second later, ends the grace period. A HUP that was
  ignored when the run was started, as under nohup, stays ignored.
- The agent is a child subreaper, so orphans of the run become its children. When the command has
  ended, every process that has the run's ``FLAGSCALE_RUN_ID`` is ended too, and every descendant,
  whose environment may have been emptied. Processes of other runs are not.
- If the script dies, the agent gets TERM from the kernel. If the agent dies, the command gets it,
  and ``--sweep`` (called by the script) ends the remaining processes.
- The agents of a run act together (``liveness``): a failure on any host ends the job on all hosts,
  or restarts it on all hosts. A host that has lost its connection to the others ends its part.
  If that of the coordinating host is lost, another one continues (``liveness.link``).
- The end of the job is recorded in ``exit.json`` in the run's directory before the agent ends with
  the job's exit code.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from flagscale.files import make_private_directory, to_plain
from flagscale.hosts.kernel import (
    become_subreaper,
    count_oom_kills,
    handle_hangup,
    signal_on_parent_death,
)
from flagscale.launcher.host_record import HostRecorder
from flagscale.launcher.layout import (
    AGENT_FILE,
    EXIT_FILE,
    LIVENESS_FILE,
    OUTPUT_TIMES_FILE,
    HostFiles,
    status_directory,
)
from flagscale.launcher.liveness import identity, secret
from flagscale.launcher.liveness.agent_log import log_line, write_record
from flagscale.launcher.liveness.attempt import Stage
from flagscale.launcher.liveness.coordinator import Coordinator
from flagscale.launcher.liveness.diagnosis import Failure, host_failure
from flagscale.launcher.liveness.job import Notice
from flagscale.launcher.liveness.job_record import read_newest_job_record
from flagscale.launcher.liveness.link import CoordinatorLink, NoConnections
from flagscale.launcher.liveness.member import Member
from flagscale.launcher.liveness.messages import (
    DumpStacks,
    JobPhase,
    JobState,
    KeepAlive,
    MeasureHealth,
    Order,
    ShareJobState,
)
from flagscale.launcher.liveness.network import AgentConnections, ReadyEvents, raise_file_limit
from flagscale.launcher.liveness.options import CommandLine, find_output, parse_command_line
from flagscale.launcher.liveness.output_times import OutputTimes
from flagscale.launcher.notify import Notifier
from flagscale.memory_regions import create_regions
from flagscale.status import RUN_ID_VARIABLE

if TYPE_CHECKING:
    from flagscale.launcher.health_worker import HealthWorker

SECOND_SIGNAL_SECONDS = 1.0
TICK_SECONDS = 0.1
IDLE_SECONDS = 0.25
# Minimum interval between updates of the job's summary, which the launcher reads.
SUMMARY_SECONDS = 0.2
# Maximum time at the end of the job until all peers are informed of it.
CLOSE_SECONDS = 3.0
# Maximum time for a host that never reached the coordinator to report its end to it.
_END_REPORT_SECONDS = 6.0
_BIND_TIMEOUT_SECONDS = 10.0
_MEMORY_OPTION = "--non-persistent-save-interval"
"""Option of the training program that needs memory which outlives the ranks."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalQueue:
    """Received signals that request the end of the job, for the agent's loop."""

    def __init__(self) -> None:
        self.pending: list[int] = []

    def listen(self) -> socket.socket:
        """Install the signal handlers, and return a socket that becomes readable on a signal."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in ENDING_SIGNALS:
            signal.signal(number, self._append)
        handle_hangup(self._append)
        return reader

    def _append(self, number: int, _frame: FrameType | None) -> None:
        self.pending.append(number)

    def take(self) -> list[int]:
        """Return the pending signals, and clear them."""
        pending, self.pending = self.pending, []
        return pending


class Agent:
    """Supervisor of one host. That of one host, of host 0 at first, contains the coordinator."""

    def __init__(self, command_line: CommandLine, run_id: str, key: bytes | None) -> None:
        options = self._options = command_line.options
        output = find_output(options.run_dir)
        self._host = HostFiles(
            options.name, options.first_rank, options.nproc, options.run_dir, output
        )
        self._output_times = OutputTimes(options.run_dir / OUTPUT_TIMES_FILE)
        self._run_id = run_id
        self._key = key
        self._selector = selectors.DefaultSelector()
        self._signals = SignalQueue()
        self._signalled_at = 0.0
        now = time.monotonic()
        self._port = options.liveness_port if key is not None else None
        is_single_host = self._port is None
        node_rank = 0 if is_single_host else options.node_rank
        # Without a secret shared by the agents of several hosts, their ranks cannot share one
        # either.
        no_shared_secret = is_single_host and options.liveness_port is not None
        variables = {} if no_shared_secret else secret.rank_secret_variables(key)
        if _MEMORY_OPTION in command_line.command:
            variables |= create_regions(options.nproc)
        self.member = Member(
            node_rank,
            self._host,
            run_id,
            options.stop_grace,
            command_line.command,
            options.earlier_starts,
            variables,
            reports_status=options.reports_status,
        )
        self.member.hang_detection_timeout = options.hang_detection_timeout
        self._notifier = Notifier(options.notify_on, run_id, options.run_name, options.attempts)
        self._command = command_line.command
        self._recorder = HostRecorder()
        self._is_recorded = False
        self._health_worker: HealthWorker | None = None
        self.member.other_children = self._list_other_children
        self._connections: AgentConnections | None = None
        if self._port is not None and key is not None:
            addresses = dict(enumerate(options.addresses_by_host)) or {0: options.master_addr}
            self._connections = AgentConnections(
                key, addresses, self._port, self._selector, len(options.names)
            )
            self.member.addresses = options.addresses_by_host
        # After it was started again by hand, the job may go on without this host, or start, too.
        self._is_second_start = (
            bool(options.addresses)
            and self._connections is not None
            and (options.run_dir / AGENT_FILE).exists()
        )
        is_elsewhere = self._is_second_start and self._is_coordinated_elsewhere()
        self._returns = (
            options.on_bad_host == "shrink"
            and not options.is_spare
            and self._is_second_start
            and (node_rank > 0 or is_elsewhere)
        )
        self._is_too_late = is_elsewhere and node_rank == 0 and not self._returns
        self._link = CoordinatorLink(
            node_rank,
            options,
            self.member,
            self._connections or NoConnections(),
            self._create_coordinator,
            output,
            now,
        )
        if node_rank == 0 and not self._returns:
            self._link.start_coordinator(now)
        self._start_time = self._last_run_at = now
        self._heartbeat_at = 0.0
        self._summary_at = -SUMMARY_SECONDS
        self._script = 0

    def _create_coordinator(self, now: float, job_state: JobState | None) -> Coordinator:
        options = self._options
        is_single_host = self._port is None
        return Coordinator(
            options,
            [options.name] if is_single_host else options.names,
            now,
            self._host.output,
            self._port,
            options.positions_by_host,
            saves_when_stopped=options.saves_when_stopped,
            has_successors=bool(options.addresses),
            job_state=job_state,
        )

    def _is_coordinated_elsewhere(self) -> bool:
        """Return True if another host than host 0 coordinates the job, and responds."""
        record = read_newest_job_record(self._options.run_dir)
        number = record.get("coordinator", 0)
        connections = self._connections
        if connections is None or self.member.node_rank or not number:
            return False
        if record.get("phase") == JobPhase.OVER:
            return False
        self._connect_to_all(connections)
        deadline = time.monotonic() + self._options.lost_host_timeout
        while time.monotonic() < deadline:
            ready = self._selector.select(TICK_SECONDS)
            for client in connections.clients.values():
                client.poll(ready, time.monotonic())
                if client.is_connected:
                    return True
        connections.close()
        return False

    def _connect_to_all(self, connections: AgentConnections) -> None:
        for number in range(len(self._options.names)):
            if number != self.member.node_rank:
                connections.connect(number)

    @property
    def _coordinator(self) -> Coordinator | None:
        """The coordinator, if it is on this host."""
        return self._link.coordinator

    def run(self) -> int:
        """Run the command until the job is over, end its processes, and return the exit code."""
        # A signal that arrives before the command is running is handled once it is.
        wakeup = self._signals.listen()
        self._selector.register(wakeup, selectors.EVENT_READ)
        become_subreaper()
        self._script = os.getppid()
        signal_on_parent_death(self._script, signal.SIGTERM)()
        started, oom_kills_before = time.time(), count_oom_kills()
        if self._is_too_late:
            log_line("the run goes on without this host, which was lost, and does not take it back")
            return self._record_end(1, started, None)
        error = identity.register_agent(
            self._host.run_dir, self._options.earlier_starts, returns=self._returns
        )
        error = error or self._open_network()
        if error is not None:
            log_line(error)
            return self._record_end(1, started, None)
        self._serve_metrics()
        try:
            self._supervise(wakeup)
        except BaseException:
            # After any error, no unsupervised process may stay alive.
            self.member.attempt.kill()
            raise
        return self._record_end(self.member.exit_code(), started, count_oom_kills(oom_kills_before))

    def _list_other_children(self) -> set[int]:
        """Return the pids of children of this process that are no part of the run."""
        worker_pids = () if self._health_worker is None else self._health_worker.pids
        return {*self._notifier.pids, *self._recorder.pids, *worker_pids}

    def _serve_metrics(self) -> None:
        options = self._options
        if options.metrics_port is not None:
            # Only these runs pay for the import of an HTTP server.
            from flagscale.launcher.metrics_server import MetricsServer

            MetricsServer(
                options.metrics_address,
                options.metrics_port,
                self._host,
                self._run_id,
                options.run_name,
            ).start()

    def _supervise(self, wakeup: socket.socket) -> None:
        if self._coordinator is not None:
            # Written before any rank can report a failure, so that readers see whether one is
            # final.
            self._write_summary(self._coordinator, time.monotonic())
        if self._returns:
            self.member.wait_as_spare()
            log_line("this host was in the run before: it waits until it joins the job again")
        elif self._options.is_spare:
            self.member.wait_as_spare()
            log_line("this host is a spare: it waits until it takes the place of another host")
        else:
            self.member.start_attempt(0)
        while not self.member.is_over:
            self._run_once(wakeup)
        self._finish_communication(wakeup)

    def _open_network(self) -> str | None:
        """Listen for the other agents, or prepare the connection to host 0; return an error
        message.
        """
        connections = self._connections
        if connections is None:
            if self._options.liveness_port is not None:
                log_line("this run has no secret: the job of this host is supervised separately")
            return None
        host_count, open_file_limit = len(self._options.names), None
        if self._coordinator is not None or self._options.addresses:
            open_file_limit = raise_file_limit(host_count)
        if self._is_second_start and self._coordinator is None:
            # Any of them may coordinate the job by now.
            self._connect_to_all(connections)
            return None
        if self._coordinator is None:
            connections.connect(0)
            return None
        if open_file_limit is not None:
            log_line(
                f"{open_file_limit} open files (ulimit -Hn) are too few for {host_count} hosts"
            )
        deadline = time.monotonic() + _BIND_TIMEOUT_SECONDS
        while connections.server is None:
            try:
                connections.listen()
            except OSError as error:
                if time.monotonic() > deadline or self._signals.pending:
                    # error.strerror would include the address
                    reason = os.strerror(error.errno or 0)
                    return (
                        f"the agents cannot connect to port {self._port} of this host: {reason}; "
                        "set experiment.runner.liveness_port to another one"
                    )
                time.sleep(TICK_SECONDS)
        return None

    # -- the loop ---------------------------------------------------------------------------

    def _run_once(self, wakeup: socket.socket) -> None:
        """Wait for events for a moment, and perform all actions that are due."""
        if not self._is_recorded and not self.member.is_spare:
            self._record_host()
        is_changing = (
            self.member.attempt.is_ending
            or self.member.attempt.stage is not Stage.RUNNING
            or (self._health_worker is not None and bool(self._health_worker.pids))
        )
        ready = self._wait_for_events(wakeup, TICK_SECONDS if is_changing else IDLE_SECONDS)
        now = time.monotonic()
        self._reap_children()
        self._handle_signals(now)
        self._receive_messages(ready, now)
        self.member.tick(now)
        if self._health_worker is not None:
            for reply in self._health_worker.poll():
                self.member.reply_health(*reply)
        self._send_messages(now)
        self._step_coordinator(now)
        self._notifier.kill_overdue(now)
        self._output_times.record(now)
        self._last_run_at = now

    def _record_host(self) -> None:
        """Start the record of this host, once it has ranks.

        It belongs to the run: that of a spare, which has no ranks in the first attempt, is in the
        directory of that attempt, too.
        """
        self._is_recorded = True
        directory = self._host.run_dir / status_directory(0)
        with suppress(OSError):  # which the recorder meets as well
            make_private_directory(directory)
        self._recorder.start(directory, self._options.node_rank, self._command)

    def _wait_for_events(self, wakeup: socket.socket, seconds: float) -> ReadyEvents:
        """Return the selector's events within this time."""
        ready = self._selector.select(seconds)
        if any(key.fileobj is wakeup for key, _ in ready):
            wakeup.recv(4096)
        return ready

    def _reap_children(self) -> None:
        """Reap all ended children, which include orphans of the run."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.member.attempt.on_child_exit(pid, status)
            self._notifier.record_exit(pid, status)
            self._recorder.record_exit(pid, status)
            if self._health_worker is not None:
                self._health_worker.record_exit(pid)

    def _handle_signals(self, now: float) -> None:
        for number in self._signals.take():
            if self._signalled_at == 0.0:
                self._signalled_at = now
                # If another host has already stopped the job, this is not a second signal.
                if self.member.stop_signal is None:
                    self.member.stop(number, cause=self._detect_lost_script())
            elif now - self._signalled_at > SECOND_SIGNAL_SECONDS:
                self.member.attempt.kill()
            elif number == signal.SIGINT and self.member.stop_cause is None:
                # A terminal interrupts the script too, which may have forwarded the signal before,
                # as TERM.
                self.member.stop_signal = number

    def _detect_lost_script(self) -> Failure | None:
        """Return the failure if the script has died; None if it is alive.

        The script waits for this process, so it cannot have ended by itself.
        """
        if os.getppid() == self._script:
            return None
        reason = "lost its script, which was killed; the processes of the script were ended too"
        return host_failure(self._host.name, reason, self._host.output)

    def _receive_messages(self, ready: ReadyEvents, now: float) -> None:
        """Process the messages that have been received."""
        gap = now - self._last_run_at
        if gap > self._options.beat_seconds * 2:
            # Time in which this process itself did not run does not count as silence.
            self._link.excuse_pause(gap, now)
        connections = self._connections
        if connections is None:
            return
        if connections.server is not None:
            for host, message in connections.server.poll(ready, now):
                self._link.receive_message(host, message, now)
        for number, client in list(connections.clients.items()):
            orders = client.poll(ready, now)
            if client.is_new_connection:
                client.is_new_connection = False
                self._link.send_hello(number, now)
            for received_order in orders:
                order = self._link.receive_order(number, received_order, now)
                if order is not None:
                    self._follow_order(order, now)
        if self._link.check(now):
            self._end_health_check()
        notices, self._link.notices = self._link.notices, []
        for notice in notices:
            self._notifier.notify(notice)

    def _follow_order(self, order: Order, now: float) -> None:
        """Follow an order of the coordinator. All but a few end a hardware check."""
        if isinstance(order, MeasureHealth):
            if self._health_worker is None:
                self._health_worker = self._create_health_worker()
            self._health_worker.execute(order)
        elif not isinstance(order, (KeepAlive, DumpStacks, ShareJobState)):
            self._end_health_check()
        self.member.follow_order(order, now)

    def _create_health_worker(self) -> HealthWorker:
        # Only these runs pay for the imports.
        from flagscale.health.messages import WorkerSettings
        from flagscale.launcher.health_worker import LIFETIME_SECONDS, HealthWorker

        options = self._options
        # Other hosts reach the coordinator at this address, and find theirs by the way there.
        addresses = self.member.addresses or [options.master_addr]
        first = addresses[self._link.followed_host or 0]
        address, peers = (first, ()) if self._coordinator is not None else ("", (first,))
        return HealthWorker(WorkerSettings(options.device, {}, address, peers, LIFETIME_SECONDS))

    def _end_health_check(self) -> None:
        if self._health_worker is not None:
            self._health_worker.end()

    def _send_messages(self, now: float) -> None:
        """Send this host's messages, also to a coordinator in this process."""
        if now - self._heartbeat_at >= self._options.beat_seconds:
            self._heartbeat_at = now
            self.member.outgoing.append(self.member.heartbeat())
        messages, self.member.outgoing = self.member.outgoing, []
        self._link.send_messages(messages, now)

    def _step_coordinator(self, now: float) -> None:
        coordinator = self._coordinator
        if coordinator is None:
            return
        coordinator.tick(now)
        orders, coordinator.orders = coordinator.orders, []
        for host, order in orders:
            if host in (None, self.member.node_rank) and not isinstance(order, ShareJobState):
                self._follow_order(order, now)
            if self._connections is not None and host != self.member.node_rank:
                self._connections.send_order(host, order)
        notices, coordinator.notices = coordinator.notices, []
        for notice in notices:
            _log_notice(notice)
            self._notifier.notify(notice)
        self._write_summary(coordinator, now)

    def _write_summary(self, coordinator: Coordinator, now: float) -> None:
        """Write the state of the job for the launcher, if it has changed.

        The rate is limited, because a thousand starting hosts cause many changes.
        """
        if coordinator.has_handed_over:  # the job goes on: its successor writes the next record
            return
        is_final = coordinator.phase is JobPhase.OVER
        if coordinator.summary_changed and (is_final or now - self._summary_at >= SUMMARY_SECONDS):
            coordinator.summary_changed, self._summary_at = False, now
            write_record(self._host.run_dir / LIVENESS_FILE, coordinator.summary())

    def _finish_communication(self, wakeup: socket.socket) -> None:
        """Wait until the peers are informed of the end, and until notifications have ended."""
        deadline = time.monotonic() + _END_REPORT_SECONDS
        while self._end_unreported() and time.monotonic() < deadline:
            self._run_once(wakeup)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._has_connected_hosts() and time.monotonic() < deadline:
            self._run_once(wakeup)
        if self._coordinator is not None:
            self._coordinator.complete_stop(time.monotonic())
            self._step_coordinator(time.monotonic())
        if self._connections is not None:
            self._connections.close()
        while self._notifier.kill_overdue(time.monotonic()):
            self._wait_for_events(wakeup, TICK_SECONDS)
            self._reap_children()

    def _end_unreported(self) -> bool:
        """Return True if this host's part was over before its agent reached the coordinator.

        It would wait for a message of this host until it considers it lost.
        """
        return (
            self._connections is not None
            and self._coordinator is None
            and not self._link.was_reached
            and not self.member.has_given_up
        )

    def _has_connected_hosts(self) -> bool:
        """Return True if other hosts may have to be informed of the end."""
        if self._connections is None or self._connections.server is None:
            return False
        job_is_over = self._coordinator is None or self._coordinator.phase is JobPhase.OVER
        return not job_is_over or self._connections.server.has_connections()

    def _record_end(self, code: int, started: float, oom_kills: int | None) -> int:
        """Record the end of the job; no peer is connected any more that could change it."""
        self._output_times.record(time.monotonic(), final=True)
        self._recorder.stop()
        self._end_health_check()
        member = self.member
        failure = member.stop_cause or member.failure
        if self._coordinator is not None and member.stop_signal is None:
            failure = self._coordinator.failure
        sweep_result = member.attempt.sweep_result
        run_dir = self._host.run_dir
        write_record(
            run_dir / EXIT_FILE,
            {
                "code": code,
                "phase": "job",
                "signal": member.stop_signal if member.stop_cause is None else None,
                "started": round(started, 3),
                "ended": round(time.time(), 3),
                "out_of_memory_kills": oom_kills,
                "swept": [*sweep_result.terminated, *sweep_result.killed],
                "left": list(sweep_result.survivors),
                "attempt": member.attempt_number + 1,
                "failure": to_plain(failure) if code else None,
            },
            expendable_path=run_dir / AGENT_FILE,
        )
        return code


def _log_notice(notice: Notice) -> None:
    """Print a line to the host's output for an event that is notified."""
    if notice.event in ("stalled", "restarted", "failed") and notice.failure is not None:
        prefixes = {"restarted": "the job starts again after", "failed": "first failure:"}
        prefix = prefixes.get(notice.event, "")
        log_line(f"{prefix} {notice.failure.headline()}".lstrip())
    if notice.remark:
        log_line(notice.remark)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an agent, and return the exit code of its host's part of the job."""
    run_id = os.environ.get(RUN_ID_VARIABLE, "")
    command_line = parse_command_line(sys.argv[1:] if arguments is None else arguments, run_id)
    run_dir = command_line.options.run_dir
    if command_line.sweep:
        return identity.sweep_after_agent(run_id, run_dir, command_line.options.stop_grace)
    live_agent = identity.find_live_agent(run_id, run_dir)
    if live_agent is not None:
        log_line(f"run {run_id} is alive already (agent {live_agent})")
        return 1
    several_hosts = command_line.options.liveness_port is not None
    return Agent(command_line, run_id, secret.take_secret(run_dir) if several_hosts else None).run()


if __name__ == "__main__":
    sys.exit(main())
