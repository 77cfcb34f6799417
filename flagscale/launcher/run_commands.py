"""Commands on existing runs: query, logs, stop. Their functions return the exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

from flagscale.config.schema import Options
from flagscale.errors import ConfigError, FlagscaleError, RunStateError, UnreachableError
from flagscale.launcher import logs, runs, snapshot, sweep_runs
from flagscale.launcher.log_query import FOLLOWED_LINES, LogQuery, parse_query
from flagscale.launcher.remote_logs import read_filtered_lines
from flagscale.launcher.runners.base import Runner, filtering_runner, runner_for_run
from flagscale.launcher.snapshot import Phase, Snapshot
from flagscale.launcher.state import RunState, reload_state
from flagscale.launcher.stop_result import (
    StopResult,
    describe_lost_work,
    require_recorded,
    require_stopped,
)
from flagscale.launcher.sweep_runs import StoredSweep
from flagscale.output_streams import format_for_terminal

_FOLLOW_SECONDS = 1.0


def run_named_action(text: str, options: Options) -> int:
    """Perform the action of ``options`` on the run or sweep that a text names.

    See :func:`.runs.find_run` and :func:`.sweep_runs.find_sweep`.
    """
    sweep = sweep_runs.find_sweep(text)
    if sweep is None:
        return ACTIONS[options.action](runs.require_run(text), options)
    return run_on_sweep(sweep, options)


def run_on_sweep(sweep: StoredSweep, options: Options) -> int:
    """Perform the action of ``options`` on all runs of a sweep.

    Raises:
        ConfigError: The action is for one run.
    """
    if options.action == "query" and not options.follow:
        return _print_sweep(sweep, options)
    if options.action == "stop":
        return _stop_sweep(sweep, options)
    action = f"{options.action} --follow" if options.follow else options.action
    raise ConfigError(
        f"{sweep.directory}: {action} is of one run, and this is a sweep of {len(sweep.runs)}",
        hint=f"name one of its runs, such as {sweep.runs[0].exp_dir}",
    )


def _print_sweep(sweep: StoredSweep, options: Options) -> int:
    """Print the state of each run of a sweep; return 3 if some host does not answer."""
    sweep.query()
    sweep_runs.print_sweep(sweep.runs, options)
    return 3 if any(run.phase == Phase.UNREACHABLE.value for run in sweep.runs) else 0


def _stop_sweep(sweep: StoredSweep, options: Options) -> int:
    """End the live runs of a sweep; return the worst exit code of those that could not be ended."""
    exit_code = 0
    for run in sweep.runs:
        run.query()
        if run.state is None:
            # A damaged state: the run may live.
            exit_code = max(exit_code, 1 if run.failure_reason else 0)
            continue
        if run.snapshot is not None and run.snapshot.phase.ended:
            continue
        run.failure_reason = ""
        try:
            stop_run(run.state)
            run.query()
        except FlagscaleError as error:
            run.failure_reason = error.message
            exit_code = max(exit_code, error.exit_code)
    sweep_runs.print_sweep(sweep.runs, options)
    return exit_code


def print_state(state: RunState, options: Options) -> int:
    """Print the state of a run; with ``follow``, until it ends.

    Return 1 if it failed while being followed, 3 if a host does not answer.

    Raises:
        ConfigError: A CSV file was requested, which is of a sweep.
    """
    from flagscale.launcher.show.view import show_snapshots

    if options.csv is not None:
        raise ConfigError(
            f"csv: run {state.run_id} is one run; the table is of a sweep's directory"
        )

    def take_snapshot() -> Snapshot:
        now = reload_state(state)  # The state records a stop.
        return runs.remember_outcome(now, runner.query(now, with_lines=options.follow))

    with closing(runner_for_run(state)) as runner:
        last = show_snapshots(
            take_snapshot,
            follow=options.follow,
            as_json=options.json,
            interval_seconds=_FOLLOW_SECONDS,
        )
    if options.follow and last.phase in (Phase.FAILED, Phase.LOST):
        return 1
    return 3 if any(row.phase is Phase.UNREACHABLE for row in last.hosts) else 0


def print_logs(state: RunState, options: Options) -> int:
    """Print the output of a run, with host and rank in front of every line."""
    with closing(runner_for_run(state)) as runner:
        filtering = None if state.shared_fs else filtering_runner(runner)
        if filtering is not None and (query := parse_query(state, options)).selects_lines:
            lines = read_filtered_lines(filtering, state, query, follow=options.follow)
        else:
            runner.bring_output(state)
            # With a scheduler, hosts have names after they are allocated.
            state = reload_state(state)
            query = parse_query(state, options)
            if options.follow:
                lines = _follow_logs(runner, state, query)
            else:
                lines = logs.read_lines(state, query)
        has_no_output = True
        for line in lines:
            has_no_output = False
            print(format_for_terminal(line), flush=options.follow)
    if has_no_output and options.lines != 0 and not options.follow:
        _note_missing_lines(state, query)
    return 0


def _follow_logs(runner: Runner, state: RunState, query: LogQuery) -> Iterator[str]:
    outputs = logs.host_outputs(state, query)
    count = query.count
    if count is None and query.since is None:
        count = FOLLOWED_LINES
    for output in outputs:
        yield from output.read() if count is None else output.last_lines(count)
    yield from logs.follow_lines(outputs, lambda: runner.ended(state))


def _note_missing_lines(state: RunState, query: LogQuery) -> None:
    subject = f"run {state.run_id}" if query.rank is None else f"rank {query.rank}"
    files = ", ".join(str(state.hosts[index].output) for index in query.hosts)
    filters = (query.pattern, query.level, query.since)
    what = "nothing" if all(value is None for value in filters) else "no such lines"
    print(f"note: {subject} has written {what} so far; its log is {files}", file=sys.stderr)


def stop(state: RunState, _options: Options) -> int:
    """End a run if it is alive."""

    def report_duration(seconds: float) -> None:
        print(f"run {state.run_id} of {state.name} stopped in {seconds:.1f} s", flush=True)

    phase = stop_run(state, report_duration)
    if phase is not None:
        message = f"has ended already ({phase.value}); nothing to stop"
        print(f"run {state.run_id} of {state.name} {message}")
    return 0


def stop_run(
    state: RunState, report_duration: Callable[[float], None] = lambda _seconds: None
) -> Phase | None:
    """End a run. Return None, or its phase if it had ended before.

    Args:
        state: State of the run.
        report_duration: Called with the duration of the stop in seconds, before an error about
            recording the stop is raised.

    Raises:
        UnreachableError: The run may still be alive on hosts that do not answer.
        RunStateError: The run is alive, or its stop could not be recorded.
    """
    start_time = time.monotonic()
    with closing(runner_for_run(state)) as runner:
        result = end_run(runner, state)
        require_stopped(state, result)
        if result.ended_processes:
            report_duration(time.monotonic() - start_time)
            stopped_state = replace(reload_state(state), stop_requested=time.time())
            runs.remember_outcome(stopped_state, snapshot.take_snapshot(stopped_state, {}))
            require_recorded(state, result)
            return None
        phase = runs.remember_outcome(state, runner.query(state)).phase
    if phase.ended:
        return phase
    raise RunStateError(
        f"run {state.run_id} of {state.name} is {phase.value}, but none of its processes was "
        "found to end",
        hint="stop it again, as the user who started it",
    )


ACTIONS = {"query": print_state, "logs": print_logs, "stop": stop}


def end_run(runner: Runner, state: RunState) -> StopResult:
    """End a run, and print a warning about lost work."""
    since = time.time()
    result = runner.stop(state)
    lost_work = describe_lost_work(state, result, since)
    if lost_work:
        print(f"warning: {lost_work}", file=sys.stderr, flush=True)
    return result


def interrupt_run(runner: Runner, state: RunState) -> None:
    """End a run whose launcher received a signal. Errors are printed, not raised."""
    try:
        require_recorded(state, end_run(runner, state))
    except (RunStateError, UnreachableError) as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)
