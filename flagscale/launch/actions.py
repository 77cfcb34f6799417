"""What ``action=…`` does. Each returns the exit code of the command."""

from __future__ import annotations

import json
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from flagscale.config.schema import Experiment, Options
from flagscale.config.secrets import redact, redact_overrides
from flagscale.errors import ConfigError, RunStateError
from flagscale.hosts.names import compress
from flagscale.launch import logs
from flagscale.launch.layout import Layout
from flagscale.launch.preparing import Prepared, hosts_of, prepared, unprobed_plan
from flagscale.launch.show import places
from flagscale.launch.state import RunState, load_state

if TYPE_CHECKING:
    from flagscale.launch.runners.base import Runner, Stopped
    from flagscale.launch.snapshot import Snapshot

_FOLLOW_SECONDS = 1.0
_FOLLOW_LINES = 100


class Interrupted(KeyboardInterrupt):
    """A signal other than Ctrl-C's asked this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


def dryrun(experiment: Experiment, options: Options) -> int:
    """Print the plan that ``run`` would start, and its scripts. Writes nothing."""
    made = unprobed_plan(experiment)
    if options.json:
        print(json.dumps(made.to_json(), indent=2, ensure_ascii=False))
        return 0
    from flagscale.launch.show.view import plan_text

    print(plan_text(made), end="")
    return 0


def check(experiment: Experiment, options: Options) -> int:
    """Show what a run needs and whether it is there: 3 if a host does not answer, 2 if anything
    else is wrong."""
    from flagscale.launch.preflight.local import exit_code

    with prepared(experiment, checking=True, fresh=True) as ready:
        checks = ready.checks
    if options.json:
        print(json.dumps([vars(one) for one in checks], indent=2, ensure_ascii=False))
        return exit_code(checks)
    from flagscale.launch.show import view

    view.console().print(view.checks_table(checks))
    for note in ready.plan.notes:
        print(f"note: {note}")
    return exit_code(checks)


def run(experiment: Experiment, options: Options) -> int:
    """Start the run; in the background return once it is as far as ``runner.wait_for`` says, in
    the foreground stay and return the job's code."""
    from flagscale.launch.preflight.local import require, warnings

    foreground = experiment.runner.foreground or options.action == "test"
    texts = (_config_text(experiment), _overrides_text(experiment))
    # The one thing that is no mistake in the configuration, so it has a message of its own.
    _refuse_if_alive(experiment)
    with prepared(experiment, checking=experiment.runner.preflight, texts=texts) as ready:
        require(ready.checks)
        ready.copy_code()
        for text in (*ready.plan.notes, *warnings(ready.checks)):
            print(f"note: {text}", file=sys.stderr)
        state = ready.runner.submit(ready.plan, foreground=foreground)
        code = (
            _stay(ready.runner, state)
            if foreground
            else _await_start(ready, state, experiment.runner.wait_for)
        )
    print("\n".join(places.lines(ready.plan, state)))
    return code


def _refuse_if_alive(experiment: Experiment) -> None:
    """Refuse to start beside a run of this directory, on this machine or on hosts that take no
    part any more; those that do are asked later, with everything else."""
    from flagscale.launch.runners import runner_of
    from flagscale.launch.snapshot import Phase
    from flagscale.launch.state import refuse_if_alive

    state = load_state(Layout(experiment.exp_dir).state)
    if state is None or not state.over_ssh:
        refuse_if_alive(state)
        return
    now = {host.name for host in hosts_of(experiment)}
    if now.issuperset(host.name for host in state.hosts):
        return
    runner = runner_of(state)
    rows = runner.query(state).hosts
    runner.close()
    living = [row.host for row in rows if row.phase in (Phase.STARTING, Phase.RUNNING)]
    if living:
        raise RunStateError(
            f"run {state.run_id} of {state.name} is alive on {compress(living)}",
            hint="stop it with action=stop, or give this one another experiment.exp_dir",
        )
    silent = [row.host for row in rows if row.phase is Phase.UNREACHABLE]
    if silent:
        text = f"note: run {state.run_id} may still live on {compress(silent)}, which do not answer"
        print(text, file=sys.stderr)


def _await_start(ready: Prepared, state: RunState, wait_for: str) -> int:
    from flagscale.launch.start import wait_until_started

    try:
        seen = wait_until_started(state, ready.runner, ready.plan.start_timeout, wait_for)
    except KeyboardInterrupt:
        _interrupt(ready.runner, state)
        raise
    print(f"run {state.run_id} of {state.name}: {seen}")
    return 0


def _stay(runner: Runner, state: RunState) -> int:
    """Show the output until the job ends; Ctrl-C ends the job."""
    from flagscale.launch.show import ticker
    from flagscale.launch.snapshot import Phase

    output = logs.RunOutput(state)

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        with ticker.shown(state) as show:
            logs.follow(output, lambda: runner.ended(state), show)
    except KeyboardInterrupt:
        print(f"flagscale: stopping run {state.run_id}", file=sys.stderr, flush=True)
        _interrupt(runner, state)
        runner.bring_output(state)
        for line in output.read(final=True):
            print(line, flush=True)
        raise
    code = runner.wait(state)
    end = runner.query(load_state(Layout(state.exp_dir).state) or state)
    if end.failure is not None:
        print(f"first failure: {end.failure.describe()}", file=sys.stderr)
    if end.phase is Phase.STOPPED:
        print(f"flagscale: run {state.run_id} was stopped", file=sys.stderr)
        # Ranks that have saved what they had end with 0, but the job is not done.
        return code or 128 + signal.SIGTERM
    return code


def _end(runner: Runner, state: RunState) -> Stopped:
    """End a run, and warn of what that has cost."""
    from flagscale.launch.runners.base import cost

    since = time.time()
    stopped = runner.stop(state)
    lost = cost(state, stopped, since)
    if lost:
        print(f"warning: {lost}", file=sys.stderr, flush=True)
    return stopped


def _interrupt(runner: Runner, state: RunState) -> None:
    """End a run on whose launcher a signal has called: no error may take its place."""
    from flagscale.launch.runners.base import require_recorded

    try:
        require_recorded(state, _end(runner, state))
    except RunStateError as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)


def query(experiment: Experiment, options: Options) -> int:
    """Tell the state of the run; with ``follow`` until it ends. 1 if it failed while it was
    followed, 3 if a host does not answer."""
    from flagscale.launch.runners import runner_of
    from flagscale.launch.show.watch import watch
    from flagscale.launch.snapshot import Phase

    state = _require_state(experiment)
    runner = runner_of(state)

    def look() -> Snapshot:
        now = load_state(Layout(experiment.exp_dir).state) or state
        return runner.query(now, with_lines=options.follow)

    try:
        last = watch(look, follow=options.follow, as_json=options.json, every=_FOLLOW_SECONDS)
    finally:
        runner.close()
    if options.follow and last.phase in (Phase.FAILED, Phase.LOST):
        return 1
    return 3 if any(row.phase is Phase.UNREACHABLE for row in last.hosts) else 0


def show_logs(experiment: Experiment, options: Options) -> int:
    """Print the output of the run, every line with host and rank."""
    from flagscale.launch.runners import runner_of

    state = _require_state(experiment)
    if options.rank is not None and options.rank >= state.world_size:
        ranks = f"ranks 0 to {state.world_size - 1}"
        raise ConfigError(f"rank={options.rank}: run {state.run_id} has {ranks}")
    runner = runner_of(state)
    if not options.follow:
        for line in _last(runner.logs(state, options.rank), options.lines):
            print(line)
        runner.close()
        return 0
    runner.bring_output(state)
    output = logs.RunOutput(state, options.rank)
    lines = _FOLLOW_LINES if options.lines is None else options.lines
    for line in _last(list(output.read()), lines):
        print(line)
    sys.stdout.flush()
    logs.follow(output, lambda: runner.ended(state), lambda line: print(line, flush=True))
    runner.close()
    return 0


def _last(lines: list[str], count: int | None) -> list[str]:
    return lines if count is None else lines[len(lines) - count :] if count < len(lines) else lines


def stop(experiment: Experiment, _options: Options) -> int:
    """End the run that was last started in this directory, if it lives; 3 if that is not known of
    every host. What keeps the disk from recording it is told once the run has ended."""
    from flagscale.launch.runners import runner_of
    from flagscale.launch.runners.base import require_recorded, require_stopped

    layout = Layout(experiment.exp_dir)
    state = load_state(layout.state)
    if state is None:
        print(f"no run was started in {experiment.exp_dir}; nothing to stop")
        return 0
    runner = runner_of(state)
    began = time.monotonic()
    if state.over_ssh or state.is_alive():
        stopped = _end(runner, state)
        runner.close()
        require_stopped(state, stopped)
        if stopped.swept:
            seconds = time.monotonic() - began
            print(f"run {state.run_id} of {state.name} stopped in {seconds:.1f} s", flush=True)
            require_recorded(state, stopped)
            return 0
    print(f"run {state.run_id} of {state.name} has ended already{_how(runner, state)}")
    return 0


def _how(runner: Runner, state: RunState) -> str:
    """How a run that nothing was found of has ended, where this machine can tell. Raises
    :class:`RunStateError` where it has not."""
    if state.over_ssh:
        return "; nothing to stop"
    phase = runner.query(state).phase
    if not phase.ended:
        raise RunStateError(
            f"run {state.run_id} of {state.name} is {phase.value}, but none of its processes was "
            "found to end",
            hint="stop it again, as the user who started it",
        )
    return f" ({phase.value}); nothing to stop"


def _require_state(experiment: Experiment) -> RunState:
    state = load_state(Layout(experiment.exp_dir).state)
    if state is None:
        raise RunStateError(
            f"no run was started in {experiment.exp_dir}", hint="start one with action=run"
        )
    return state


def _config_text(experiment: Experiment) -> str:
    """The resolved configuration without its secrets."""
    import yaml

    return yaml.safe_dump(redact(experiment.resolved), sort_keys=False, allow_unicode=True)


def _overrides_text(experiment: Experiment) -> str:
    """The overrides as a YAML list without their secrets."""
    import yaml

    return yaml.safe_dump(redact_overrides(experiment.overrides), allow_unicode=True)
