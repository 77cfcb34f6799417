"""The action ``auto_tune``: search for the fastest layout of an experiment."""

from __future__ import annotations

from flagscale.config.schema import Experiment, Options
from flagscale.errors import ConfigError, JobError
from flagscale.estimate.plan import GIB
from flagscale.files import strict_json, write_json
from flagscale.launcher.actions import run_experiment
from flagscale.launcher.layout import TUNER_ANSWER_FILE, TUNER_DIRECTORY
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.show import view
from flagscale.output_streams import lossy_standard_streams
from flagscale.tune.answer import (
    expectations,
    first_failure,
    format_winner,
    load_winner,
    trial_rows,
    winner_overrides,
    write_best,
    write_history,
)
from flagscale.tune.problem import make_problem
from flagscale.tune.projection import (
    Projection,
    parse_target,
    project,
    projection_record,
    render_projection,
)
from flagscale.tune.records import lock_records, open_records
from flagscale.tune.search import Result, Search
from flagscale.tune.session import run_search
from flagscale.tune.show import describe_space, render_space, render_trials, space_record
from flagscale.tune.space import SearchProblem, Space, enumerate_space


def tune_experiment(experiment: Experiment, options: Options) -> int:
    """Find the fastest layout, or with ``dry`` list the layouts; return the exit code.

    Raises:
        ConfigError: No layout is legal and fits.
    """
    target = parse_target(options.project) if options.project is not None else None
    problem = make_problem(experiment, probing=not options.dry)
    space = enumerate_space(problem)
    _require_candidates(problem, space)
    if options.dry:
        if options.json:
            print(strict_json(space_record(problem, space), 2), flush=True)
        else:
            view.make_console().print(render_space(problem, space))
        return 0
    for line in describe_space(problem, space):
        log_line(line)
    with lock_records(experiment.exp_dir), lossy_standard_streams():
        records, note = open_records(experiment.exp_dir, problem)
        if note:
            log_line(f"note: {note}")
        search, reason = run_search(experiment, problem, space, records)
        if target is not None and search.results:
            _print_projection(project(problem, search.belief, search.results, target), options)
            return 0
        winner = _report(experiment, problem, search, reason, as_json=options.json)
    if options.run_best or experiment.tuner.control.run_best:
        best = load_winner(experiment, problem, winner, "launch")
        return run_experiment(best, Options(action="run"))
    return 0


def _print_projection(projection: Projection, options: Options) -> None:
    if options.json:
        print(strict_json(projection_record(projection), 2), flush=True)
    else:
        view.make_console().print(render_projection(projection))


def _report(
    experiment: Experiment,
    problem: SearchProblem,
    search: Search,
    reason: str,
    *,
    as_json: bool,
) -> Result:
    """Print and write the answer, and return the winner.

    Raises:
        JobError: No layout could be measured; with the first failure.
    """
    rows = list(trial_rows(search, problem))
    directory = experiment.exp_dir / TUNER_DIRECTORY
    (directory / TUNER_ANSWER_FILE).unlink(missing_ok=True)
    write_history(directory, rows)
    winner = search.winner
    if winner is None:
        failure = first_failure(search.trials) or next(iter(search.failures), None)
        found = "none was tried" if failure is None else f"the first failure: {failure.failure}"
        log = f"\n  log: {failure.log}" if failure is not None and failure.log else ""
        raise JobError(f"no layout was measured ({reason}); {found}{log}", exit_code=1)
    path = write_best(experiment, problem, winner)
    record = {
        "name": experiment.name,
        "machine": problem.machine.describe(),
        "reason": reason,
        "best": winner.layout.key,
        "overrides": winner_overrides(experiment, problem, winner.layout.setting),
        "yaml": str(path),
        "trials": rows,
        **expectations(search),
    }
    write_json(directory / TUNER_ANSWER_FILE, record, durable=False)
    if as_json:
        print(strict_json(record, 2), flush=True)
        return winner
    view.make_console().print(render_trials(rows, search, problem))
    print(f"the search ended: {reason}")
    print("\n".join(format_winner(experiment, problem, winner, path)), flush=True)
    return winner


def _require_candidates(problem: SearchProblem, space: Space) -> None:
    if space.candidates:
        return
    machine = problem.machine
    if space.too_large:
        smallest = space.too_large[0]
        raise ConfigError(
            f"no layout fits {machine.describe()}: the smallest, {smallest}, takes "
            f"{smallest.memory_bytes / GIB:.1f} GiB of a rank",
            hint="use more devices, a smaller model or shorter sequences",
        )
    raise ConfigError(
        f"no layout is legal on {machine.describe()} with a batch of "
        f"{problem.values['global_batch_size']} sequences and the values of experiment.auto_tuner",
        hint="remove values of experiment.auto_tuner.space, or change global_batch_size",
    )
