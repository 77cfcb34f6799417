"""The action ``auto_tune``: search for the fastest layout of an experiment."""

from __future__ import annotations

from flagscale.config.schema import Experiment, Options
from flagscale.errors import ConfigError
from flagscale.files import strict_json
from flagscale.tune.problem import make_problem
from flagscale.tune.show import render_space, space_record
from flagscale.tune.space import SearchProblem, Space, enumerate_space


def tune_experiment(experiment: Experiment, options: Options) -> int:
    """Find the fastest layout, or with ``dry`` list the layouts; return the exit code.

    Raises:
        ConfigError: No layout is legal and fits.
    """
    from flagscale.launcher.show import view

    problem = make_problem(experiment, probing=not options.dry)
    space = enumerate_space(problem)
    _require_candidates(problem, space)
    if options.json:
        print(strict_json(space_record(problem, space), 2), flush=True)
        return 0
    view.make_console().print(render_space(problem, space))
    return 0


def _require_candidates(problem: SearchProblem, space: Space) -> None:
    if space.candidates:
        return
    machine = problem.machine
    if space.too_large:
        smallest = space.too_large[0]
        raise ConfigError(
            f"no layout fits {machine.describe()}: the smallest, {smallest}, takes "
            f"{smallest.memory_bytes / 2**30:.1f} GiB of a rank",
            hint="use more devices, a smaller model or shorter sequences",
        )
    raise ConfigError(
        f"no layout is legal on {machine.describe()} with a batch of "
        f"{problem.values['global_batch_size']} sequences and the values of experiment.auto_tuner",
        hint="remove values of experiment.auto_tuner.space, or change global_batch_size",
    )
