"""Actions that start nothing: ``dryrun``, ``check`` and ``estimate``.

Modules that observe runs are not imported, to keep these actions fast.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.schema import Experiment, Options
from flagscale.errors import ConfigError, Problem
from flagscale.files import format_json
from flagscale.hosts.names import compress_names
from flagscale.launcher.runners.base import runner_for_experiment
from flagscale.output_streams import format_for_terminal

if TYPE_CHECKING:
    from flagscale.launcher.launch_record import LaunchRecord
    from flagscale.launcher.planning.model import HostPlan
    from flagscale.launcher.preflight.checks import Check


def print_dry_run(
    experiment: Experiment, options: Options, *, launch_record: LaunchRecord | None = None
) -> int:
    """Print the plan that ``run`` would start, and its scripts. Writes nothing.

    ``launch_record`` is that of the run whose copies of the code are used again.
    """
    if experiment.runner.snapshot:
        from flagscale.launcher.code_snapshot import use_snapshot

        experiment = use_snapshot(experiment, create=False, record=launch_record).experiment
    plan = runner_for_experiment(experiment).plan(experiment)
    hosts = plan.hosts if options.host is None else (_find_host(options.host, plan.hosts),)
    if options.json:
        record = {**plan.to_json(), "hosts": (host.to_json() for host in hosts)}
        print(format_json(record), end="")
        return 0
    from flagscale.launcher.show.plan import format_plan

    print(format_for_terminal(format_plan(plan, hosts)), end="")
    return 0


def _find_host(name: str, hosts: Sequence[HostPlan]) -> HostPlan:
    """Return the host with this name; raise ConfigError if the plan has none."""
    for host in hosts:
        if host.name == name:
            return host
    names = [host.name for host in hosts]
    hint = did_you_mean(name, names) or f"; the plan has {compress_names(names)}"
    raise ConfigError(Problem("host", f"no host of the plan is called {name}{hint}"))


def print_checks(experiment: Experiment, options: Options) -> int:
    """Print the results of all checks. Return 3 if a host does not answer, 2 if another check
    fails.
    """
    from flagscale.launcher.preflight.checks import compute_exit_code

    with runner_for_experiment(experiment).prepare(
        experiment, checking=True, fresh=True
    ) as prepared_run:
        checks = [*prepared_run.checks, *prepared_run.check_hardware()]
    if experiment.runner.require_clean:
        checks = [*checks, _check_clean(experiment)]
    if options.json:
        print(json.dumps([vars(check) for check in checks], indent=2, ensure_ascii=False))
        return compute_exit_code(checks)
    from flagscale.launcher.show import view

    view.make_console().print(view.checks_table(checks))
    for note in prepared_run.plan.notes:
        print(f"note: {note}")
    return compute_exit_code(checks)


def _check_clean(experiment: Experiment) -> Check:
    """Return the check that commits identify the code."""
    from flagscale.launcher.code_version import require_clean
    from flagscale.launcher.preflight.checks import Check

    try:
        require_clean(experiment)
    except ConfigError as error:
        return Check("known code", False, error.message, error.hint or "")
    return Check("known code", True, "no file is changed or untracked")


def print_estimate(experiment: Experiment, options: Options) -> int:
    """Print memory, floating-point operations and, if known, step time of each pipeline stage.
    Return 2 if a stage exceeds the memory of its devices.
    """
    from flagscale.estimate.notes import describe_excess
    from flagscale.estimate.plan import estimate_experiment
    from flagscale.estimate.show import render_estimate, to_json

    step_estimate = estimate_experiment(
        experiment, runner_for_experiment(experiment).plan(experiment).hosts
    )

    if options.json:
        print(json.dumps(to_json(step_estimate), indent=2, ensure_ascii=False))
    else:
        from flagscale.launcher.show import view

        view.make_console().print(render_estimate(step_estimate))
    return 2 if any(describe_excess(step_estimate)) else 0
