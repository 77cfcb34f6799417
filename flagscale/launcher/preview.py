"""What can be told before a run: its plan, and what would keep it from starting. Nothing that looks
after runs is loaded here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flagscale.config.arguments.values import did_you_mean
from flagscale.config.schema import Experiment, Options
from flagscale.errors import ConfigError, Problem
from flagscale.files import json_text
from flagscale.hosts.names import compress
from flagscale.launcher.runners.base import runner_for

if TYPE_CHECKING:
    from flagscale.launcher.planning.model import HostPlan


def dryrun(experiment: Experiment, options: Options) -> int:
    """Print the plan that ``run`` would start, and its scripts. Writes nothing."""
    made = runner_for(experiment).plan(experiment)
    hosts = made.hosts if options.host is None else (_named(options.host, made.hosts),)
    if options.json:
        record = {**made.to_json(), "hosts": (host.to_json() for host in hosts)}
        print(json_text(record), end="")
        return 0
    from flagscale.launcher.show.plan import plan_text

    print(plan_text(made, hosts), end="")
    return 0


def _named(name: str, hosts: Sequence[HostPlan]) -> HostPlan:
    """The host of this name."""
    for host in hosts:
        if host.name == name:
            return host
    names = [host.name for host in hosts]
    near = did_you_mean(name, names) or f"; the plan has {compress(names)}"
    raise ConfigError(Problem("host", f"no host of the plan is called {name}{near}"))


def check(experiment: Experiment, options: Options) -> int:
    """Show what a run needs and whether it is there: 3 if a host does not answer, 2 if anything
    else is wrong."""
    from flagscale.launcher.preflight.checks import exit_code

    with runner_for(experiment).prepare(experiment, checking=True, fresh=True) as ready:
        checks = ready.checks
    if options.json:
        print(json.dumps([vars(one) for one in checks], indent=2, ensure_ascii=False))
        return exit_code(checks)
    from flagscale.launcher.show import view

    view.console().print(view.checks_table(checks))
    for note in ready.plan.notes:
        print(f"note: {note}")
    return exit_code(checks)


def estimate(experiment: Experiment, options: Options) -> int:
    """Show what a step takes of each stage's ranks: memory, arithmetic and, where that is known,
    time. 2 if it does not fit."""
    from flagscale.estimate.notes import does_not_fit
    from flagscale.estimate.plan import of_experiment
    from flagscale.estimate.show import as_json, report

    made = of_experiment(experiment, runner_for(experiment).plan(experiment).hosts)

    if options.json:
        print(json.dumps(as_json(made), indent=2, ensure_ascii=False))
    else:
        from flagscale.launcher.show import view

        view.console().print(report(made))
    return 2 if any(does_not_fit(made)) else 0
