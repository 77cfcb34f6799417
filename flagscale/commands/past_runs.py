"""Commands on runs of the past: ``flagscale runs``, ``report`` and ``rerun``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.commands.argument_types import is_yaml, parse_natural
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from flagscale.launcher.state import RunState


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``flagscale runs``."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="an id, a directory or a YAML: every run of that experiment, with its attempts; the "
        "directory of a sweep: its table",
    )
    parser.add_argument("--all", "-a", action="store_true", help="include runs that ended long ago")
    parser.add_argument(
        "--state",
        "-s",
        metavar="STATE",
        help="only runs in these states, such as failed,lost; live and ended are several",
    )
    parser.add_argument(
        "--name",
        metavar="PATTERN",
        help="only runs of this name: a part, or a pattern with *",
    )
    parser.add_argument(
        "--host", metavar="PATTERN", help="only runs on this host, such as 'node0*'"
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="only runs that are alive or ended since: 12h, 2d, 2026-11-20 or 08:30",
    )
    parser.add_argument(
        "--limit", "-n", type=parse_natural, metavar="N", help="only the N newest of these"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the list to a CSV file")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``flagscale report``."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="an id or its beginning: that run; a directory or a YAML: all runs of the directory "
        "as one curve; the directory of a sweep: its table and curves; DIR/auto_tuner: a search of "
        "auto_tune; overrides of YAMLs as key=value",
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="output file (default: report_<run id>.html in the current directory, with the names "
        "of all that is reported)",
    )
    parser.add_argument("--open", action="store_true", help="show it in a browser")
    parser.add_argument(
        "--json",
        action="store_true",
        help="write no page; print what the runs were (code, software, hardware, data) and what "
        "differs between them, for programs",
    )


def add_code_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a start that stand for keys about its code. Their overrides are collected
    in ``key_options``.
    """
    for flag, help_text in (
        ("--require-clean", "refuse to start if files of the code are changed or untracked"),
        ("--snapshot", "run a copy of the code as it is now"),
    ):
        key = flag.removeprefix("--").replace("-", "_")
        parser.add_argument(
            flag,
            dest="key_options",
            action="append_const",
            const=f"experiment.runner.{key}=true",
            help=help_text,
        )


def add_rerun_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``flagscale rerun``."""
    parser.add_argument(
        "run", metavar="RUN", help="an id or its beginning, a directory or a YAML: its last run"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="overrides in Hydra's syntax; experiment.exp_dir=DIR is the directory (default: that "
        "of the run with _rerun_1 or the next free number)",
    )
    parser.add_argument(
        "--best", action="store_true", help="RUN is the directory of a sweep: its best run"
    )
    parser.add_argument(
        "--dryrun", action="store_true", help="print the plan and the scripts; start nothing"
    )
    add_code_arguments(parser)


def list_runs(options: argparse.Namespace, rest: list[str]) -> int:
    """List the runs that the options select, and return the exit code."""
    from flagscale.launcher import listing
    from flagscale.launcher.moments import parse_moment
    from flagscale.launcher.run_filter import RunFilter, parse_states

    if rest:
        raise ConfigError(f"unknown argument {rest[0]}", hint="flagscale runs -h")

    run_filter = RunFilter(
        parse_states(options.state or ""),
        options.name or "",
        options.host or "",
        None if options.since is None else parse_moment(options.since, "--since "),
        options.limit,
    )
    return listing.list_runs(
        options.run,
        include_old=options.all,
        as_json=options.json,
        csv_file=options.csv,
        run_filter=run_filter,
    )


def find_run_of_yaml(text: str, overrides: Sequence[str]) -> RunState:
    """Return the last run of a YAML.

    Raises:
        ConfigError: there is none.
    """
    from flagscale.config.load import load
    from flagscale.launcher import runs
    from flagscale.launcher.sweep_runs import find_sweep

    path = Path(text)
    experiment = load(path.parent.absolute(), path.name, [*overrides, "action=query"]).experiment
    state = runs.find_of_experiment(experiment)
    if state is None:
        hint = "`flagscale runs` lists yours"
        if find_sweep(str(experiment.exp_dir)) is not None:
            hint = f"a sweep was: name its directory, {experiment.exp_dir}"
        raise ConfigError(f"no run was started in {experiment.exp_dir}", hint=hint)
    return state


def rerun(options: argparse.Namespace, extra_words: list[str]) -> int:
    """Start a run again, and return the exit code."""
    from flagscale.launcher.code_snapshot import continue_in_snapshot
    from flagscale.launcher.launch_record import read_launch_record
    from flagscale.launcher.layout import Layout
    from flagscale.launcher.rerun import find_run_to_repeat
    from flagscale.launcher.rerun import rerun as start_again

    if unknown_options := [text for text in extra_words if text.startswith("-")]:
        raise ConfigError(f"unknown option {unknown_options[0]}", hint="flagscale rerun -h")
    overrides = [*options.overrides, *extra_words, *(options.key_options or ())]
    if is_yaml(options.run) and not options.best:
        state = find_run_of_yaml(options.run, [])
    else:
        state = find_run_to_repeat(options.run, best=options.best)
    record = read_launch_record(Layout(state.exp_dir), state.run_id)
    if not _disable_snapshot(overrides):
        continue_in_snapshot(record, ["rerun", *options.words])
    return start_again(state, overrides, only_plan=options.dryrun)


def _disable_snapshot(overrides: Sequence[str]) -> bool:
    """Return True if overrides set ``runner.snapshot`` to false, by its key or a short name."""
    from flagscale.config.overrides import assigned_keys

    return any(
        key.rpartition(".")[2] == "snapshot" and value.lower() == "false"
        for key, value in assigned_keys(overrides).items()
    )
