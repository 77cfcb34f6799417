"""What ``action=…`` does. Each returns the exit code of the command."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from flagscale.config.checks import check_world, notes
from flagscale.config.schema import Experiment, Options
from flagscale.config.secrets import HIDDEN, is_secret_name, redact
from flagscale.errors import ConfigError, RunStateError
from flagscale.launch import devices, logs, places, ports
from flagscale.launch.hosts import choose_hosts
from flagscale.launch.layout import Layout
from flagscale.launch.plan import LaunchPlan, Machine, plan, wanted_port
from flagscale.launch.state import RunState, load_state, new_run_id

if TYPE_CHECKING:
    from flagscale.launch.runners.local import LocalRunner
    from flagscale.launch.snapshot import Snapshot

PROJECT = Path(__file__).resolve().parents[2]
_FOLLOW_SECONDS = 1.0
_FOLLOW_LINES = 100


class Interrupted(KeyboardInterrupt):
    """A signal other than Ctrl-C's asked this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


def this_machine() -> Machine:
    return Machine(
        python=sys.executable,
        project=PROJECT,
        workdir=Path.cwd(),
        cpus=len(os.sched_getaffinity(0)),
        gpus=devices.installed_gpus(),
        environment=dict(os.environ),
    )


def make_plan(experiment: Experiment, machine: Machine) -> LaunchPlan:
    """The plan of a run that starts now. Raises :class:`ConfigError` with what cannot work."""
    runner = experiment.runner
    hosts = choose_hosts(runner.hostfile, runner.nnodes)
    port = wanted_port(runner) or ports.free_port()
    made = plan(experiment, hosts, machine, run_id=new_run_id(), master_port=port)
    problems = check_world(experiment, made.world_size)
    if problems:
        raise ConfigError(problems)
    return replace(made, notes=tuple(notes(experiment, made.world_size)))


def dryrun(experiment: Experiment, options: Options) -> int:
    """Print the plan that ``run`` would start, and its scripts. Writes nothing."""
    made = make_plan(experiment, this_machine())
    if options.json:
        print(json.dumps(made.to_json(), indent=2, ensure_ascii=False))
        return 0
    from flagscale.launch.view import plan_text

    print(plan_text(made), end="")
    return 0


def check(experiment: Experiment, options: Options) -> int:
    """Show what a run needs and whether it is there; 2 if something is not."""
    from flagscale.launch.preflight import preflight

    machine = this_machine()
    made = make_plan(experiment, machine)
    checks = preflight(experiment, made, machine)
    if options.json:
        print(json.dumps([vars(one) for one in checks], indent=2, ensure_ascii=False))
    else:
        from flagscale.launch import view

        view.console().print(view.checks_table(checks))
        for note in made.notes:
            print(f"note: {note}")
    return 0 if all(one.ok for one in checks) else 2


def run(experiment: Experiment, options: Options) -> int:
    """Start the run; in the background return once every rank has joined, in the foreground stay
    and return the job's code."""
    from flagscale.launch.preflight import preflight, require, warnings
    from flagscale.launch.runners.local import LocalRunner
    from flagscale.launch.start import wait_until_started
    from flagscale.launch.state import refuse_if_alive

    foreground = experiment.runner.foreground or options.action == "test"
    machine = this_machine()
    made = make_plan(experiment, machine)
    # The one thing that is no mistake in the configuration, so it has a message of its own.
    refuse_if_alive(load_state(made.layout.state))
    checks = preflight(experiment, made, machine)
    require(checks)
    for text in (*made.notes, *warnings(checks)):
        print(f"note: {text}", file=sys.stderr)
    runner = LocalRunner(_config_text(experiment), _overrides_text(experiment))
    state = runner.submit(made, foreground=foreground)
    if foreground:
        code = _stay(runner, state)
        print("\n".join(places.lines(made, state)))
        return code
    try:
        seen = wait_until_started(state, runner, made.start_timeout)
    except KeyboardInterrupt:
        runner.stop(state)
        raise
    print(f"run {state.run_id} of {state.name}: {seen}")
    print("\n".join(places.lines(made, state)))
    return 0


def _stay(runner: LocalRunner, state: RunState) -> int:
    """Show the output until the job ends; Ctrl-C ends the job."""
    from flagscale.launch import ticker

    output = logs.RunOutput(state)

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        with ticker.shown(state) as show:
            logs.follow(output, runner.script_ended, show)
    except KeyboardInterrupt:
        print(f"flagscale: stopping run {state.run_id}", file=sys.stderr, flush=True)
        runner.stop(state)
        for line in output.read(final=True):
            print(line, flush=True)
        raise
    code = runner.wait(state)
    failure = runner.query(load_state(Layout(state.exp_dir).state) or state).failure
    if failure is not None:
        print(f"first failure: {failure.describe()}", file=sys.stderr)
    return code


def query(experiment: Experiment, options: Options) -> int:
    """Tell the state of the run; with ``follow`` until it ends, and then 1 if it failed."""
    from flagscale.launch.snapshot import EventReader, Phase, take
    from flagscale.launch.watch import watch

    state = _require_state(experiment)
    reader = EventReader(state.hosts)

    def look() -> Snapshot:
        return take(load_state(Layout(experiment.exp_dir).state) or state, reader)

    last = watch(look, follow=options.follow, as_json=options.json, every=_FOLLOW_SECONDS)
    return 1 if options.follow and last.phase in (Phase.FAILED, Phase.LOST) else 0


def show_logs(experiment: Experiment, options: Options) -> int:
    """Print the output of the run, every line with host and rank."""
    state = _require_state(experiment)
    if options.rank is not None and options.rank >= state.world_size:
        ranks = f"ranks 0 to {state.world_size - 1}"
        raise ConfigError(f"rank={options.rank}: run {state.run_id} has {ranks}")
    if not options.follow:
        for line in _last(logs.lines_of(state, options.rank), options.lines):
            print(line)
        return 0
    output = logs.RunOutput(state, options.rank)
    lines = _FOLLOW_LINES if options.lines is None else options.lines
    for line in _last(list(output.read()), lines):
        print(line)
    sys.stdout.flush()
    logs.follow(output, lambda: not state.is_alive(), lambda line: print(line, flush=True))
    return 0


def _last(lines: list[str], count: int | None) -> list[str]:
    return lines if count is None else lines[len(lines) - count :] if count < len(lines) else lines


def stop(experiment: Experiment, _options: Options) -> int:
    """End the run that was last started in this directory, if it lives."""
    from flagscale.launch.runners.local import LocalRunner

    layout = Layout(experiment.exp_dir)
    state = load_state(layout.state)
    if state is None:
        print(f"no run was started in {experiment.exp_dir}; nothing to stop")
        return 0
    runner = LocalRunner()
    if not state.is_alive():
        phase = runner.query(state).phase.value
        print(f"run {state.run_id} of {state.name} has ended already ({phase}); nothing to stop")
        return 0
    began = time.monotonic()
    swept = runner.stop(state)
    if swept.left:
        pids = ", ".join(map(str, swept.left))
        raise RunStateError(f"run {state.run_id}: these processes survive a KILL: {pids}")
    print(f"run {state.run_id} of {state.name} stopped in {time.monotonic() - began:.1f} s")
    return 0


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
    """The overrides as a YAML list, the values of secret names hidden."""
    import yaml

    shown = []
    for override in experiment.overrides:
        key, equals, value = override.partition("=")
        secret = bool(value) and is_secret_name(key.rpartition(".")[2])
        shown.append(f"{key}{equals}{HIDDEN if secret else value}")
    return yaml.safe_dump(shown, allow_unicode=True)


ACTIONS: dict[str, Callable[[Experiment, Options], int]] = {
    "run": run,
    "test": run,
    "dryrun": dryrun,
    "check": check,
    "query": query,
    "logs": show_logs,
    "stop": stop,
}


def perform(experiment: Experiment, options: Options) -> int:
    """Do ``options.action``."""
    return ACTIONS[options.action](experiment, options)
