"""What ``action=…`` does with an experiment. Each returns the exit code of the command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from flagscale.cli_errors import Interrupted
from flagscale.config.interpolation import readable
from flagscale.config.schema import Experiment, Options
from flagscale.config.secrets import redact, redact_overrides
from flagscale.errors import RunStateError
from flagscale.hosts.names import compress
from flagscale.launcher import logs, run_commands, runs
from flagscale.launcher.liveness.agent_log import say
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.runners.base import Runner, Texts, runner_for
from flagscale.launcher.show import places
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import RunState, alive_message, latest

_LIVING = (Phase.PENDING, Phase.STARTING, Phase.RUNNING)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def run(experiment: Experiment, options: Options) -> int:
    """Start the run; in the background return once it is as far as ``runner.wait_for`` says, in
    the foreground stay and return the job's code."""
    foreground = experiment.runner.foreground or options.action == "test"
    code = 0
    with _submitted(experiment, foreground=foreground) as (runner, plan, state):
        if foreground:
            code = _stay(runner, state)
        else:
            seen = _await_start(runner, plan, state, experiment.runner.wait_for)
            print(f"run {state.run_id} of {state.name}: {seen}")
    print("\n".join(places.lines(plan, state)))
    return code


def launch(
    experiment: Experiment,
    *,
    started: Callable[[RunState], object] = lambda _state: None,
    note: Callable[[str], object] = _note,
) -> RunState:
    """Start the run in the background, as :func:`run` does, for a program. ``started`` hears of it
    before it is waited for, ``note`` what there is to know of it."""
    with _submitted(experiment, started=started, note=note) as (runner, plan, state):
        seen = _await_start(runner, plan, state, experiment.runner.wait_for)
    say(f"run {state.run_id} of {state.name}: {seen}")
    return state


@contextmanager
def _submitted(
    experiment: Experiment,
    *,
    foreground: bool = False,
    started: Callable[[RunState], object] = lambda _state: None,
    note: Callable[[str], object] = _note,
) -> Iterator[tuple[Runner, LaunchPlan, RunState]]:
    """Start the run, and wait for its hosts where anybody waits for it at all."""
    from flagscale.launcher.preflight.checks import require, warnings

    texts = _texts(experiment)
    runner = runner_for(experiment)
    with runner.prepare(experiment, checking=experiment.runner.preflight) as ready:
        # The one thing that is no mistake in the configuration, so it comes first.
        _refuse_beside(ready.plan)
        require(ready.checks)
        ready.copy_code()
        for text in (*ready.plan.notes, *warnings(ready.checks)):
            note(text)
        for other in runs.elsewhere(experiment):
            note(f"run {other.run_id} of this configuration lives in {other.exp_dir}")
        with runs.registered(ready.plan, experiment) as update:
            state = runner.submit(ready.plan, texts, foreground=foreground)
            update(state)
        started(state)
        if foreground or experiment.runner.wait_for != "none":
            state = _await_hosts(runner, state, foreground=foreground)
            update(state)
        yield runner, ready.plan, state


def _refuse_beside(plan: LaunchPlan) -> None:
    """Refuse to start beside a run of this directory whose files are gone, or on hosts that take
    no part any more; the others are asked with everything else."""
    state = runs.of_directory(plan.exp_dir)
    if state is None:
        return
    asked = {host.name for host in plan.hosts} if state.runner.type == plan.runner.type else set()
    if plan.layout.state.exists() and asked.issuperset(host.name for host in state.hosts):
        return
    rows = runs.query(state).hosts
    living = [row.host for row in rows if row.phase in _LIVING]
    if living:
        message, hint = alive_message(state, living)
        raise RunStateError(message, hint=hint)
    silent = [row.host for row in rows if row.phase is Phase.UNREACHABLE]
    if silent:
        _note(f"run {state.run_id} may still live on {compress(silent)}, which do not answer")


def _await_hosts(runner: Runner, state: RunState, *, foreground: bool) -> RunState:
    """Wait until the run's hosts are there, which may take a scheduler hours; Ctrl-C ends the
    run."""
    if foreground:
        be_interrupted()
    try:
        return runner.await_hosts(state)
    except KeyboardInterrupt:
        say(f"stopping run {state.run_id}")
        run_commands.interrupt(runner, state)
        raise


def _await_start(runner: Runner, plan: LaunchPlan, state: RunState, wait_for: str) -> str:
    """What was seen of a run that is as far as is waited for."""
    from flagscale.launcher.start import wait_until_started

    try:
        return wait_until_started(state, runner, plan.start_timeout, wait_for)
    except KeyboardInterrupt:
        run_commands.interrupt(runner, state)
        raise


def _stay(runner: Runner, state: RunState) -> int:
    """Show the output until the job ends; Ctrl-C ends the job."""
    from flagscale.launcher.show import ticker

    outputs = logs.of_hosts(state)
    be_interrupted()
    try:
        with ticker.shown(lambda: runner.query(state)) as show:
            for line in logs.follow(outputs, lambda: runner.ended(state)):
                show(line)
    except KeyboardInterrupt:
        say(f"stopping run {state.run_id}")
        run_commands.interrupt(runner, state)
        runner.bring_output(state)
        for line in (line for output in outputs for line in output.read(final=True)):
            print(line, flush=True)
        raise
    code = runner.wait(state)
    end = runner.query(latest(state))
    if end.failure is not None:
        print(f"first failure: {end.failure.describe()}", file=sys.stderr)
    if end.phase is Phase.STOPPED:
        say(f"run {state.run_id} was stopped")
        # Ranks that have saved what they had end with 0, but the job is not done.
        return code or 128 + signal.SIGTERM
    return code


def be_interrupted() -> None:
    """From now on signals that end a program end the runs that it stays with, as Ctrl-C does."""

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def attend(experiment: Experiment, options: Options) -> int:
    """Do the action of ``options`` with the run of this experiment, see :mod:`.attending`."""
    state = runs.of(experiment)
    if state is not None:
        return run_commands.ACTIONS[options.action](state, options)
    text = f"no run was started in {experiment.exp_dir}"
    if options.action == "stop":
        print(f"{text}; nothing to stop")
        return 0
    raise RunStateError(text, hint="start one with action=run; `flagscale runs` lists yours")


def _texts(experiment: Experiment) -> Texts:
    """The resolved configuration, and the overrides as a YAML list, without their secrets."""
    import yaml

    shown = redact(readable(experiment.resolved))
    overrides = redact_overrides(experiment.overrides)
    return Texts(
        yaml.safe_dump(shown, sort_keys=False, allow_unicode=True),
        yaml.safe_dump(overrides, allow_unicode=True),
    )
