"""What is done with a run that was started before, whoever found it. Each function that stands for
a command returns its exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from flagscale.config.schema import Options
from flagscale.errors import RunStateError, UnreachableError
from flagscale.launcher import logs, runs, snapshot
from flagscale.launcher.runners.base import Runner, runner_of
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.launcher.state import RunState, latest
from flagscale.launcher.stop_result import Stopped, cost, require_recorded, require_stopped

_FOLLOW_SECONDS = 1.0
_FOLLOW_LINES = 100


def act(text: str, options: Options) -> int:
    """Do the action of ``options`` with the run that a text names, see :func:`.runs.find`."""
    return ACTIONS[options.action](runs.named(text), options)


def query(state: RunState, options: Options) -> int:
    """Tell the state of a run; with ``follow`` until it ends. 1 if it failed while it was
    followed, 3 if a host does not answer."""
    from flagscale.launcher.show.view import watch

    def look() -> Snapshot:
        now = latest(state)  # a stop is told by the state
        return runs.remember(now, runner.query(now, with_lines=options.follow))

    with closing(runner_of(state)) as runner:
        last = watch(look, follow=options.follow, as_json=options.json, every=_FOLLOW_SECONDS)
    if options.follow and last.phase in (Phase.FAILED, Phase.LOST):
        return 1
    return 3 if any(row.phase is Phase.UNREACHABLE for row in last.hosts) else 0


def show_logs(state: RunState, options: Options) -> int:
    """Print the output of a run, every line with host and rank."""
    with closing(runner_of(state)) as runner:
        runner.bring_output(state)
        # A scheduler's hosts have names once they are given.
        state = latest(state)
        if options.follow:
            _follow(runner, state, options)
            return 0
        silent = True
        for line in logs.lines_of(state, options.rank, options.lines):
            silent = False
            print(line)
    if silent and options.lines != 0:
        who = f"run {state.run_id}" if options.rank is None else f"rank {options.rank}"
        files = ", ".join(str(output.path) for output in logs.of_hosts(state, options.rank))
        print(f"note: {who} has written nothing so far; its log is {files}", file=sys.stderr)
    return 0


def _follow(runner: Runner, state: RunState, options: Options) -> None:
    outputs = logs.of_hosts(state, options.rank)
    for output in outputs:
        for line in output.last(_FOLLOW_LINES if options.lines is None else options.lines):
            print(line)
    sys.stdout.flush()
    for line in logs.follow(outputs, lambda: runner.ended(state)):
        print(line, flush=True)


def stop(state: RunState, _options: Options) -> int:
    """End a run, if it lives."""

    def tell(seconds: float) -> None:
        print(f"run {state.run_id} of {state.name} stopped in {seconds:.1f} s", flush=True)

    phase = finish(state, tell)
    if phase is not None:
        ended = f"has ended already ({phase.value}); nothing to stop"
        print(f"run {state.run_id} of {state.name} {ended}")
    return 0


def finish(state: RunState, tell: Callable[[float], None] = lambda _seconds: None) -> Phase | None:
    """End a run: None, or what it was if it had ended before. ``tell`` hears how many seconds that
    took, before what keeps the disk from recording it is raised. Raises
    :class:`UnreachableError` where it may live on, and :class:`RunStateError` where it does."""
    began = time.monotonic()
    with closing(runner_of(state)) as runner:
        stopped = end(runner, state)
        require_stopped(state, stopped)
        if stopped.swept:
            tell(time.monotonic() - began)
            now = replace(latest(state), stop_requested=time.time())
            runs.remember(now, snapshot.take(now, {}))
            require_recorded(state, stopped)
            return None
        phase = runs.remember(state, runner.query(state)).phase
    if phase.ended:
        return phase
    raise RunStateError(
        f"run {state.run_id} of {state.name} is {phase.value}, but none of its processes was "
        "found to end",
        hint="stop it again, as the user who started it",
    )


ACTIONS = {"query": query, "logs": show_logs, "stop": stop}


def end(runner: Runner, state: RunState) -> Stopped:
    """End a run, and warn of what that has cost."""
    since = time.time()
    stopped = runner.stop(state)
    lost = cost(state, stopped, since)
    if lost:
        print(f"warning: {lost}", file=sys.stderr, flush=True)
    return stopped


def interrupt(runner: Runner, state: RunState) -> None:
    """End a run on whose launcher a signal has called: no error may take its place."""
    try:
        require_recorded(state, end(runner, state))
    except (RunStateError, UnreachableError) as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)
