"""The supervisor between a host's script and torchrun: standard library alone, one a host.

``python -m flagscale.launcher.agent --options JSON -- COMMAND …`` starts the command and sees to it
that nothing of the run outlives it:

- TERM, INT and HUP end the job in order: TERM to the ranks, then to torchrun, and after the grace
  period KILL. A second signal, later than a second, cuts the grace period short.
- Orphans of the run come to the agent, which is a child subreaper, and when the command has ended
  every process that carries the run's ``FLAGSCALE_RUN_ID`` is ended too.
- If the script above dies, the agent gets TERM from the kernel; if the agent dies, the command
  does, and ``--sweep`` (called by the script) ends what is left.
- The agents of a run share one fate (``liveness``): a failure anywhere ends the job everywhere, or
  starts it again everywhere; a host that cannot hear the others any more ends its part.
- How it all ended is written to ``exit.json`` in the run's directory before the agent ends with the
  job's code.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence

from flagscale.files import plain
from flagscale.hosts.kernel import become_subreaper, die_with, out_of_memory_kills
from flagscale.launcher.layout import AGENT_FILE, EXIT_FILE, LIVENESS_FILE, HostFiles
from flagscale.launcher.liveness import identity, secret
from flagscale.launcher.liveness.agent_log import keep, say
from flagscale.launcher.liveness.attempt import Stage
from flagscale.launcher.liveness.coordinator import Coordinator
from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.liveness.job import Notice, held, unreached
from flagscale.launcher.liveness.member import Member
from flagscale.launcher.liveness.messages import JobPhase
from flagscale.launcher.liveness.network import Client, Ready, Server, allow_files
from flagscale.launcher.liveness.options import CommandLine, own_output, parse
from flagscale.launcher.notify import Notifier
from flagscale.status import RUN_ID_VARIABLE

IMPATIENCE_SECONDS = 1.0
TICK_SECONDS = 0.1
IDLE_SECONDS = 0.25
# How often at most the launcher is told how the job stands.
SUMMARY_SECONDS = 0.2
# What is left at the end for peers to hear of it.
FAREWELL_SECONDS = 3.0
# What a host that never met host 0 takes to tell it that it has ended.
_MEETING_SECONDS = 6.0
_BIND_SECONDS = 10.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """The signals by which an agent is told to end its job, for its loop to look at."""

    def __init__(self) -> None:
        self.pending: list[int] = []

    def listen(self) -> socket.socket:
        """From now on keep signals, and have them wake up whoever waits for the socket."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in FORWARDED:
            signal.signal(number, lambda number, _frame: self.pending.append(number))
        return reader

    def take(self) -> list[int]:
        taken, self.pending = self.pending, []
        return taken


class Agent:
    """One host's supervisor; on host 0 the job's coordinator too."""

    def __init__(self, line: CommandLine, run_id: str, key: bytes | None) -> None:
        options = self._options = line.options
        output = own_output(options.run_dir)
        self._host = HostFiles(
            options.name, options.first_rank, options.nproc, options.run_dir, output
        )
        self._run_id = run_id
        self._key = key
        self._selector = selectors.DefaultSelector()
        self._signals = Signals()
        self._signalled_at = 0.0
        now = time.monotonic()
        self._port = options.liveness_port if key is not None else None
        alone = self._port is None
        number = 0 if alone else options.node_rank
        earlier = options.earlier_starts
        # Where agents do not know each other, their ranks share nothing that others do not know.
        ranks = {} if alone and options.liveness_port is not None else secret.of_ranks(key)
        self.member = Member(
            number, self._host, run_id, options.stop_grace, line.command, earlier, ranks
        )
        self._coordinator: Coordinator | None = None
        if number == 0:
            names = [options.name] if alone else options.names
            places = options.places_by_host
            self._coordinator = Coordinator(options, names, now, output, self._port, places)
        self._server: Server | None = None
        self._client: Client | None = None
        self._notifier = Notifier(options.notify_on, run_id, options.run_name, options.attempts)
        self._began = self._heard = self._turned = now
        self._reached = self._met = False
        self._beat_at = 0.0
        self._summary_at = -SUMMARY_SECONDS
        self._script = 0

    def run(self) -> int:
        """Start the command, stay until the job is over, leave nothing behind; the exit code."""
        # A signal before the command is up is kept and passed on once it is.
        wakeup = self._signals.listen()
        self._selector.register(wakeup, selectors.EVENT_READ)
        become_subreaper()
        self._script = os.getppid()
        die_with(self._script, signal.SIGTERM)()
        started, kills_before = time.time(), out_of_memory_kills()
        fault = identity.announce(self._host.run_dir, self._options.earlier_starts) or self._open()
        if fault is not None:
            say(fault)
            return self._record(1, started, None)
        try:
            self._watch(wakeup)
        except BaseException:
            # Whatever it is: nothing that nobody watches may live on.
            self.member.attempt.kill()
            raise
        return self._record(self.member.code(), started, out_of_memory_kills(kills_before))

    def _watch(self, wakeup: socket.socket) -> None:
        if self._coordinator is not None:
            # Before any rank can report a failure, so that people learn whether it is final.
            self._write_summary(self._coordinator, time.monotonic())
        self.member.begin(0)
        while not self.member.over:
            self._turn(wakeup)
        self._farewell(wakeup)

    def _open(self) -> str | None:
        """Listen for the other agents, or get ready to talk to host 0; what went wrong."""
        options = self._options
        port = self._port
        if port is None or self._key is None:
            if options.liveness_port is not None:
                say("no secret of this run: this host's job is watched by itself")
            return None
        if options.node_rank:
            self._client = Client(self._key, (options.master_addr, port), self._selector)
            return None
        count = len(options.names)
        allowed = allow_files(count)
        if allowed is not None:
            say(f"{allowed} open files (ulimit -Hn) are too few for {count} hosts")
        deadline = time.monotonic() + _BIND_SECONDS
        while self._server is None:
            try:
                self._server = Server(self._key, port, self._selector, count)
            except OSError as error:
                if time.monotonic() > deadline or self._signals.pending:
                    reason = os.strerror(error.errno or 0)  # `strerror` names the address, too
                    return (
                        f"the agents cannot meet at port {port} of this host: {reason}; "
                        "experiment.runner.liveness_port chooses another one"
                    )
                time.sleep(TICK_SECONDS)
        return None

    # -- the loop ---------------------------------------------------------------------------

    def _turn(self, wakeup: socket.socket) -> None:
        """Wait a moment and look at everything once."""
        quick = self.member.attempt.ending or self.member.attempt.stage is not Stage.RUNNING
        ready = self._wait(wakeup, TICK_SECONDS if quick else IDLE_SECONDS)
        now = time.monotonic()
        self._reap()
        self._take_signals(now)
        self._hear(ready, now)
        self.member.step(now)
        self._speak(now)
        self._coordinate(now)
        self._notifier.step(now)
        self._turned = now

    def _wait(self, wakeup: socket.socket, seconds: float) -> Ready:
        """What has become ready in this time."""
        ready = self._selector.select(seconds)
        if any(key.fileobj is wakeup for key, _ in ready):
            wakeup.recv(4096)
        return ready

    def _reap(self) -> None:
        """Orphans of the run are children too: reap every one."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.member.attempt.reaped(pid, status)
            self._notifier.reaped(pid, status)

    def _take_signals(self, now: float) -> None:
        for number in self._signals.take():
            if self._signalled_at == 0.0:
                self._signalled_at = now
                # Another host may have told the job to end before: then this is no second call.
                if self.member.signal is None:
                    self.member.stop(number, cause=self._lost_script())
            elif now - self._signalled_at > IMPATIENCE_SECONDS:
                self.member.attempt.kill()
            elif number == signal.SIGINT and self.member.cause is None:
                # A terminal interrupts the script too, which may have passed it on before, as TERM.
                self.member.signal = number

    def _lost_script(self) -> Failure | None:
        """What the job fails by if nobody asked for its end: the script waits for this process, so
        it cannot have ended by itself."""
        if os.getppid() == self._script:
            return None
        reason = "lost its script, which was killed; what it ran was ended too"
        return Failure(self._host.name, None, None, reason, "", self._host.output)

    def _hear(self, ready: Ready, now: float) -> None:
        """Take what has come over the network."""
        if self._server is not None and self._coordinator is not None:
            for host, message in self._server.poll(ready, now):
                self._coordinator.receive(host, message, now)
        if self._client is None:
            return
        gap = now - self._turned
        if gap > self._options.beat_seconds * 2:
            # Time in which this process itself did not run is not held against the link.
            self._heard += gap
        for order in self._client.poll(ready, now):
            self._heard, self._reached = now, True
            self.member.obey(order, now)
        if self._client.fresh:
            # Who has proven to be host 0 has to answer from now on, even if it never said a word.
            self._client.fresh, self._heard, self._reached = False, now, True
            self._client.send(self.member.hello())
        self._look_at_link(now)

    def _look_at_link(self, now: float) -> None:
        """Whoever does not hear of the coordinator any more ends its part of the job."""
        options = self._options
        if not self._reached and not self._met and self.member.met:
            # Host 0's agent has been there: from now on it has to answer.
            self._met, self._heard = True, now
        expected = self._reached or self._met
        limit = options.lost_host_timeout if expected else options.start_timeout
        if now - self._heard <= limit or self.member.lost or self.member.finished:
            return
        if expected:
            reason = f"was lost: no word from its agent for {limit:g} s"
        else:
            reason = f"was not reached within {limit:g} s of the start{unreached(self._port)}"
        reason += held(options.master_place)
        failure = Failure(options.master_name, None, None, reason, "", self._host.output)
        say(f"{failure.headline()}; the job of this host ends")
        self.member.lose(failure)
        if options.node_rank == 1:
            # Host 0, which tells people otherwise, is the one that cannot.
            self._notifier.tell(Notice("failed", self.member.attempt_number, failure))

    def _speak(self, now: float) -> None:
        """Pass on what this host has to say, and let the coordinator hear of it."""
        if now - self._beat_at >= self._options.beat_seconds:
            self._beat_at = now
            self.member.out.append(self.member.beat())
        messages, self.member.out = self.member.out, []
        for message in messages:
            if self._coordinator is not None:
                self._coordinator.receive(self.member.number, message, now)
            elif self._client is not None:
                self._client.send(message)

    def _coordinate(self, now: float) -> None:
        coordinator = self._coordinator
        if coordinator is None:
            return
        coordinator.tick(now)
        orders, coordinator.orders = coordinator.orders, []
        for host, order in orders:
            if host in (None, self.member.number):
                self.member.obey(order, now)
            if self._server is not None and host != self.member.number:
                self._server.send(host, order)
        notices, coordinator.notices = coordinator.notices, []
        for notice in notices:
            _report(notice)
            self._notifier.tell(notice)
        self._write_summary(coordinator, now)

    def _write_summary(self, coordinator: Coordinator, now: float) -> None:
        """Tell the launcher how the job stands, where that is news. A thousand hosts that start
        have much to tell."""
        last = coordinator.phase is JobPhase.OVER
        if coordinator.news and (last or now - self._summary_at >= SUMMARY_SECONDS):
            coordinator.news, self._summary_at = False, now
            keep(self._host.run_dir / LIVENESS_FILE, coordinator.summary())

    def _farewell(self, wakeup: socket.socket) -> None:
        """Let the others hear the end of it, and notifications end."""
        deadline = time.monotonic() + _MEETING_SECONDS
        while self._untold() and time.monotonic() < deadline:
            self._turn(wakeup)
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self._server is not None and time.monotonic() < deadline:
            self._turn(wakeup)
            over = self._coordinator is None or self._coordinator.phase is JobPhase.OVER
            if over and not self._server.connected():
                break
        if self._coordinator is not None:
            self._coordinator.leave(time.monotonic())
            self._coordinate(time.monotonic())
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()
        self._server = self._client = None
        while self._notifier.step(time.monotonic()):
            self._wait(wakeup, TICK_SECONDS)
            self._reap()

    def _untold(self) -> bool:
        """Whether the part of this host was over before its agent met host 0's, which would wait
        for a word of it until it takes it for lost."""
        return self._client is not None and not self._reached and not self.member.lost

    def _record(self, code: int, started: float, kills: int | None) -> int:
        """Write down how it ended. Peers are not there any more, so nothing can change it."""
        member = self.member
        failure = member.cause or member.failure
        if self._coordinator is not None and member.signal is None:
            failure = self._coordinator.failure
        swept = member.attempt.swept
        run_dir = self._host.run_dir
        keep(
            run_dir / EXIT_FILE,
            {
                "code": code,
                "phase": "job",
                "signal": member.signal if member.cause is None else None,
                "started": round(started, 3),
                "ended": round(time.time(), 3),
                "out_of_memory_kills": kills,
                "swept": [*swept.terminated, *swept.killed],
                "left": list(swept.left),
                "attempt": member.attempt_number + 1,
                "failure": plain(failure) if code else None,
            },
            instead_of=run_dir / AGENT_FILE,
        )
        return code


def _report(notice: Notice) -> None:
    """A line in the host's output for what people may be told of."""
    if notice.event in ("stalled", "restarted", "failed") and notice.failure is not None:
        what = {"restarted": "the job starts again after", "failed": "first failure:"}
        said = what.get(notice.event, "")
        say(f"{said} {notice.failure.headline()}".lstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    run_id = os.environ.get(RUN_ID_VARIABLE, "")
    line = parse(sys.argv[1:] if arguments is None else arguments, run_id)
    run_dir = line.options.run_dir
    if line.sweep:
        return identity.sweep_after_agent(run_id, run_dir, line.options.stop_grace)
    other = identity.already_alive(run_id, run_dir)
    if other is not None:
        say(f"run {run_id} is alive already (agent {other})")
        return 1
    wanted = line.options.liveness_port is not None
    return Agent(line, run_id, secret.take(run_dir) if wanted else None).run()


if __name__ == "__main__":
    sys.exit(main())
