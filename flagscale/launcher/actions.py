"""Actions that start an experiment, and the dispatch of ``query``, ``logs`` and ``stop``.

Functions for commands return the exit code.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from flagscale.cli_errors import Interrupted
from flagscale.config.command_hints import action_command
from flagscale.config.interpolation import restore_references
from flagscale.config.schema import Experiment, Options, documented_fields
from flagscale.config.secrets import redact, redact_overrides
from flagscale.errors import RunStateError
from flagscale.hosts.kernel import handle_hangup
from flagscale.hosts.names import compress_names
from flagscale.launcher import logs, run_commands, runs
from flagscale.launcher.code_snapshot import use_snapshot
from flagscale.launcher.code_version import read_checkouts, require_clean
from flagscale.launcher.launch_record import RecordedSnapshot, Rerun, make_launch_record
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.runners.base import ConfigTexts, Runner, runner_for_experiment
from flagscale.launcher.show import output_paths
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import RunState, alive_message, load_state, reload_state
from flagscale.launcher.sweep_runs import find_sweep
from flagscale.output_streams import (
    escape_controls,
    format_for_terminal,
    lossy_standard_streams,
)

NO_RERUN = Rerun()
_LIVE_PHASES = (Phase.PENDING, Phase.STARTING, Phase.RUNNING)


def _print_note(note: str) -> None:
    print(escape_controls(f"note: {note}"), file=sys.stderr)


def run_experiment(experiment: Experiment, options: Options, *, rerun: Rerun = NO_RERUN) -> int:
    """Start the run. ``rerun`` is the run whose recorded configuration it is.

    In the background, return when it has reached ``runner.wait_for``. In the foreground, return the
    job's exit code after it has ended. Output that cannot be written does not end the run.
    """
    with lossy_standard_streams():
        return _run_experiment(experiment, options, rerun)


def _run_experiment(experiment: Experiment, options: Options, rerun: Rerun) -> int:
    foreground = experiment.runner.foreground or options.action == "test"
    code = 0
    with _submit_run(experiment, foreground=foreground, rerun=rerun) as (
        runner,
        plan,
        state,
    ):
        if foreground:
            code = _follow_to_end(runner, state)
        else:
            progress = _await_start(runner, plan, state, experiment.runner.wait_for)
            print(f"run {state.run_id} of {state.name}: {progress}")
    print("\n".join(output_paths.format_output_paths(plan, state)))
    return code


def launch_in_background(
    experiment: Experiment,
    *,
    started: Callable[[RunState], object] = lambda _state: None,
    note: Callable[[str], object] = _print_note,
) -> RunState:
    """Start the run in the background, as :func:`run_experiment` does, for a program.

    Args:
        experiment: The experiment.
        started: Called with the run's state, before waiting for the run to start.
        note: Called with the text of each note.

    Returns:
        The state of the started run.
    """
    with _submit_run(experiment, started=started, note=note) as (runner, plan, state):
        progress = _await_start(runner, plan, state, experiment.runner.wait_for)
    log_line(f"run {state.run_id} of {state.name}: {progress}")
    return state


@contextmanager
def launch_attached(
    experiment: Experiment, *, note: Callable[[str], object] = _print_note
) -> Iterator[tuple[Runner, RunState]]:
    """Start the run, and end it with the block, or with this process on this machine.

    Signals that would end this process are raised as exceptions from then on.
    """
    with _submit_run(experiment, foreground=True, note=note) as (runner, _, state):
        try:
            yield runner, state
        finally:
            if not runner.ended(state):
                run_commands.interrupt_run(runner, state)


@contextmanager
def _submit_run(
    experiment: Experiment,
    *,
    foreground: bool = False,
    rerun: Rerun = NO_RERUN,
    started: Callable[[RunState], object] = lambda _state: None,
    note: Callable[[str], object] = _print_note,
) -> Iterator[tuple[Runner, LaunchPlan, RunState]]:
    """Start the run, and wait for its hosts unless ``runner.wait_for`` is ``none``."""
    from flagscale.launcher.preflight.checks import require_passed, warning_lines

    if experiment.runner.require_clean and rerun.record is None:
        require_clean(experiment)
    snapshot = use_snapshot(experiment, create=True, record=rerun.record)
    config_texts = make_config_texts(experiment, rerun, snapshot.copies)
    experiment = snapshot.experiment
    runner = runner_for_experiment(experiment)
    with runner.prepare(experiment, checking=experiment.runner.preflight) as ready:
        # A live run is no mistake in the configuration, so it is reported first.
        _refuse_hidden_live_run(ready.plan)
        require_passed(ready.checks)
        ready.copy_code()
        hardware_checks = ready.check_hardware()
        require_passed(hardware_checks)
        warnings = warning_lines([*ready.checks, *hardware_checks])
        for text in (*snapshot.notes, *ready.plan.notes, *warnings):
            note(text)
        for live_run in runs.find_elsewhere(experiment):
            note(f"run {live_run.run_id} of this configuration lives in {live_run.exp_dir}")
        try:
            with runs.register_run(ready.plan, experiment) as update:
                state = runner.submit(ready.plan, config_texts, foreground=foreground)
                update(state)
            started(state)
            if foreground or experiment.runner.wait_for != "none":
                if foreground:
                    interrupt_on_signals()
                # A scheduler may take hours to allocate the hosts.
                state = runner.await_hosts(state)
                update(state)
        except KeyboardInterrupt:
            _stop_submitted_run(runner, ready.plan)
            raise
        yield runner, ready.plan, state


def _stop_submitted_run(runner: Runner, plan: LaunchPlan) -> None:
    """Stop a run if its state was saved, which every runner does before it starts anything."""
    state = load_state(plan.layout.state)
    if state is not None and state.run_id == plan.run_id:
        log_line(f"stopping run {state.run_id}: its job was submitted already")
        run_commands.interrupt_run(runner, state)


def _refuse_hidden_live_run(plan: LaunchPlan) -> None:
    """Refuse to start next to a live run of this directory that the preflight cannot see.

    These are runs whose files are gone, and runs on hosts that take no part any more.
    """
    state = runs.find_in_directory(plan.exp_dir)
    if state is None:
        return
    plan_hosts = (
        {host.name for host in plan.hosts} if state.runner.type == plan.runner.type else set()
    )
    if plan.layout.state.exists() and plan_hosts.issuperset(host.name for host in state.hosts):
        return
    rows = runs.query_run(state).hosts
    live_hosts = [row.host for row in rows if row.phase in _LIVE_PHASES]
    if live_hosts:
        message, hint = alive_message(state, live_hosts)
        raise RunStateError(message, hint=hint)
    unreachable_hosts = [row.host for row in rows if row.phase is Phase.UNREACHABLE]
    if unreachable_hosts:
        _print_note(
            f"run {state.run_id} may still live on {compress_names(unreachable_hosts)}, which do "
            "not answer"
        )


def _await_start(runner: Runner, plan: LaunchPlan, state: RunState, wait_for: str) -> str:
    """Wait until the run has reached ``wait_for``, and return a description of its progress."""
    from flagscale.launcher.start import wait_until_started

    try:
        return wait_until_started(state, runner, plan.start_timeout, wait_for)
    except KeyboardInterrupt:
        log_line(f"interrupted before it had started: stopping run {state.run_id}")
        run_commands.interrupt_run(runner, state)
        raise


def _follow_to_end(runner: Runner, state: RunState) -> int:
    """Show the output until the job ends. Ctrl-C ends the job."""
    from flagscale.launcher.show import ticker
    from flagscale.launcher.show.stopped_output import without_torchrun_report

    outputs = logs.host_outputs(state)
    interrupt_on_signals()
    try:
        with ticker.progress_display(lambda: runner.query(state)) as show:
            for line in logs.follow_lines(outputs, lambda: runner.ended(state)):
                show(format_for_terminal(line))
    except KeyboardInterrupt:
        log_line(f"stopping run {state.run_id}")
        run_commands.interrupt_run(runner, state)
        runner.bring_output(state)
        for output in outputs:
            for line in without_torchrun_report(output.read(final=True)):
                print(format_for_terminal(line), flush=True)
        raise
    code = runner.wait(state)
    final_snapshot = runner.query(reload_state(state))
    if final_snapshot.failure is not None:
        text = f"first failure: {final_snapshot.failure.describe()}"
        print(escape_controls(text), file=sys.stderr)
    if final_snapshot.phase is Phase.STOPPED:
        log_line(f"run {state.run_id} was stopped")
        # Ranks that have saved a checkpoint exit with 0, but the job is not done.
        return code or 128 + signal.SIGTERM
    return code


def interrupt_on_signals() -> None:
    """Treat SIGTERM and SIGHUP as Ctrl-C from now on, so that they end the attached runs.

    A SIGHUP that was ignored when this process started, as under nohup, stays ignored.
    """

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    signal.signal(signal.SIGTERM, interrupt)
    handle_hangup(interrupt)


def run_on_existing(experiment: Experiment, options: Options) -> int:
    """Perform the action of ``options`` on the run of this experiment, see :mod:`.run_commands`.

    If only a sweep was started in its directory, ``query`` shows the sweep.
    """
    state = runs.find_of_experiment(experiment)
    if state is not None:
        return run_commands.ACTIONS[options.action](state, options)
    text = f"no run was started in {experiment.exp_dir}"
    sweep = find_sweep(str(experiment.exp_dir))
    if sweep is not None:
        # Whoever means all runs of a sweep names its directory.
        if options.action == "query":
            return run_commands.run_on_sweep(sweep, options)
        text += f" itself; name the directory for the {len(sweep.runs)} runs of the sweep there"
    if options.action == "stop":
        print(f"{text}; nothing to stop")
        return 0
    raise RunStateError(
        text, hint=f"start one with {action_command('run')}; `flagscale runs` lists yours"
    )


def make_config_texts(
    experiment: Experiment, rerun: Rerun = NO_RERUN, snapshot: RecordedSnapshot | None = None
) -> ConfigTexts:
    """Return the files that are stored with a run, which uses these copies of its code."""
    import yaml

    config = redact(restore_references(experiment.resolved))
    overrides = redact_overrides(experiment.overrides)
    if rerun.record is not None:
        code, changes = list(rerun.record.code), rerun.changes
    else:
        checkouts = read_checkouts(experiment.task, experiment.exp_dir)
        code = [state.version for state in checkouts]
        changes = "\n".join(filter(None, (state.format_diff() for state in checkouts)))
    return ConfigTexts(
        yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        yaml.safe_dump(overrides, allow_unicode=True),
        make_launch_record(experiment, code, rerun.run_id, snapshot).format(),
        yaml.safe_dump(composed_config(experiment), sort_keys=False, allow_unicode=True),
        changes,
    )


def composed_config(experiment: Experiment) -> dict[Any, Any]:
    """Return the configuration from which the run can be started again, without secrets."""
    options = documented_fields(Options)
    return redact({key: value for key, value in experiment.composed.items() if key not in options})
