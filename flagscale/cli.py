"""The ``flagscale`` command: one subcommand per action of :mod:`flagscale.config.actions`, and the
tools.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flagscale import __version__
from flagscale.cli_errors import run_command
from flagscale.config.actions import ACTIONS, OPTIONS, Action, call_function
from flagscale.config.arguments.spec.values import to_word
from flagscale.config.documented import documented_fields, key_types
from flagscale.config.schema import BACKEND_SOURCE, PROJECT, Options
from flagscale.errors import ConfigError, RunStateError
from flagscale.launcher.entry import add_sweep_options, run_action, run_sweep_action
from flagscale.module_command import python_arguments

if TYPE_CHECKING:
    from flagscale.launcher.state import RunState

_DESCRIPTION = "One YAML, one command: launch LLM training, watch it and stop it."
_EPILOG = """\
examples
  flagscale check examples/llama3/conf/train.yaml             check before a run
  flagscale run examples/llama3/conf/train.yaml               start in the background
  flagscale run examples/llama3/conf/train.yaml train=8b num_layers=4 lr=3e-4
  flagscale run examples/llama3/conf/train.yaml -m train.model.seed=1,2,3 --jobs 2
  flagscale query examples/llama3/conf/train.yaml --follow    watch it until it ends
  flagscale logs examples/llama3/conf/train.yaml --rank 0 --lines 50
  flagscale logs examples/llama3/conf/train.yaml --level error --since 10m
  flagscale stop examples/llama3/conf/train.yaml              end this run and nothing else
  flagscale runs                                              list your runs
  flagscale stop 20261120                                     by the beginning of its id
  flagscale report 20261120 20261119                          one page: curves, events, failure
  flagscale explain experiment.runner.nproc_per_node          show the meaning of a key
  flagscale unpatch --backend Megatron-LM                     fetch and adapt the backend
  flagscale comm list                                         list usable backends
  flagscale bench traffic --hosts node[1-4] --tail 3          load their network to a known tail
  flagscale convert /models/Llama-3.2-1B checkpoints/llama    from Hugging Face, or back

`flagscale run CONF/train.yaml x=y` is `python run.py --config-path CONF --config-name train x=y`.
"""

_TOOLS = ("explain", "runs", "report", "version", "comm", "bench", "convert")
"""Commands that are not actions."""
_RUNS_HELP = "list your runs: state, step, age and directory"
_REPORT_HELP = "write a run's page, or one of several side by side: curves, events, hosts, failure"
_PATCH_COMMANDS = {
    "unpatch": ("main_unpatch", "fetch a backend's source and adapt it"),
    "patch": ("main_patch", "turn edits of a backend's source into patches"),
    "patch-status": ("main_status", "show the patches that are applied to a backend's source"),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run_command(lambda: _dispatch(argv)))


def _dispatch(argv: list[str]) -> int:
    """Run the subcommand of a command line, and return its exit code."""
    if argv[:2] == ["config", "explain"]:
        argv = argv[1:]
    if argv[:1] and argv[0] in _PATCH_COMMANDS:
        # These parse their own options.
        function: Callable[[list[str]], int] = getattr(
            import_module("flagscale.patching.cli"), _PATCH_COMMANDS[argv[0]][0]
        )
        return function(argv[1:])
    if argv[:1] == ["convert"]:
        return _convert(argv[1:])
    if argv[:1] == ["comm"]:
        from flagscale.bench.cli import main_comm

        return main_comm(argv[1:])
    if argv[:1] == ["bench"]:
        from flagscale.bench.cli import main_bench

        return main_bench(argv[1:])
    parser = _create_parser()
    if argv and not argv[0].startswith("-"):
        _require_command(argv[0])
    if not argv:
        parser.print_help()
        return 2
    options, overrides = parser.parse_known_args(argv)
    handler: Callable[[argparse.Namespace, list[str]], int] = options.handler
    return handler(options, overrides)


def _require_command(word: str) -> None:
    """Raise an error with a suggestion for a word that is not a command."""
    from flagscale.cli_suggestions import suggest_command

    commands = (*ACTIONS, *_TOOLS, *_PATCH_COMMANDS)
    if word not in commands:
        raise ConfigError(suggest_command(word, commands), hint="`flagscale -h` lists all commands")


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flagscale",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flagscale {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for action in ACTIONS.values():
        subparser = commands.add_parser(action.name, help=action.help, description=action.help)
        subparser.set_defaults(handler=_run_action)
        _add_action_arguments(subparser, action)
    explain = commands.add_parser("explain", help="show the meaning of a configuration key")
    explain.add_argument(
        "key",
        nargs="+",
        help="such as experiment.runner.tee or train.model.num_layers; or words, such as learning "
        "rate; a YAML adds where it has the key",
    )
    explain.set_defaults(handler=_explain_key)
    runs = commands.add_parser("runs", help=_RUNS_HELP, description=_RUNS_HELP)
    runs.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="an id, a directory or a YAML: every run of that experiment, with its attempts",
    )
    runs.add_argument("--all", "-a", action="store_true", help="include runs that ended long ago")
    runs.add_argument("--json", action="store_true", help="print JSON, for programs")
    runs.set_defaults(handler=_list_runs)
    report = commands.add_parser("report", help=_REPORT_HELP, description=_REPORT_HELP)
    report.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="an id, its beginning, a directory or a YAML; overrides of YAMLs as key=value",
    )
    report.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="output file (default: report_<run id>.html in the current directory)",
    )
    report.add_argument("--open", action="store_true", help="show it in a browser")
    report.set_defaults(handler=_write_report)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(handler=_print_version)
    commands.add_parser(
        "comm",
        help="communication backends: list, bench, groups, pipeline, agreement, tune",
        add_help=False,
    )
    commands.add_parser(
        "bench",
        help="benchmarks: collectives, groups, pipeline, agreement, traffic, training",
        add_help=False,
    )
    commands.add_parser(
        "convert",
        help="convert a model between Hugging Face and training checkpoints",
        add_help=False,
    )
    for name, (_, help_text) in _PATCH_COMMANDS.items():
        commands.add_parser(name, help=help_text, add_help=False)
    return parser


def _add_action_arguments(parser: argparse.ArgumentParser, action: Action) -> None:
    """Add the arguments and options of an action."""
    if action.purpose is not None:
        config_help = "the experiment's YAML"
        if action.purpose == "find":
            config_help += ", or a run: its id or directory"
        parser.add_argument("config", metavar="CONFIG", help=config_help)
    for name in action.options:
        option = OPTIONS[name]
        flags = [f"--{name}", *filter(None, (option.letter,))]
        value_type = key_types(Options)[name].base
        if value_type is bool:
            parser.add_argument(*flags, action="store_const", const=True, help=option.help)
        else:
            parser.add_argument(
                *flags,
                type=_parse_natural if value_type is int else str,
                choices=documented_fields(Options)[name].metadata["choices"],
                help=option.help,
            )
    if action.purpose is not None:
        add_sweep_options(parser)
        # Without a default the error message of argparse would call them required.
        parser.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="key=value",
            help="overrides in Hydra's syntax",
        )


def _convert(argv: list[str]) -> NoReturn:
    """Replace this process with the converter, which needs torch; the launcher does not."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    module = "flagscale.train.checkpoint.formats.convert"
    paths = [str(BACKEND_SOURCE), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *python_arguments(module), *argv], environment)


def _parse_natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, found {text!r}")
    return int(text)


def _run_action(options: argparse.Namespace, extra_words: list[str]) -> int:
    """Run an action with an experiment or a run."""
    # argparse does not treat overrides after an option, or `~key`, as positional arguments.
    action = ACTIONS[options.command]
    unknown_options = [
        text for text in extra_words if text.startswith("-") or action.purpose is None
    ]
    if unknown_options:
        raise _unknown_option(unknown_options[0], extra_words, action)
    values = {name: getattr(options, name) for name in action.options}
    given_options = {name: value for name, value in values.items() if value is not None}
    if action.purpose is None:
        return call_function(action.function, Options(action=action.name, **given_options))
    overrides = [*options.overrides, *extra_words]
    is_sweep = options.multirun or options.jobs is not None
    if action.purpose == "find" and not is_sweep and not _is_yaml(options.config):
        if overrides:
            raise ConfigError(f"{overrides[0]}: an existing run takes no overrides")
        run_options = Options(action=action.name, **given_options)
        return call_function(
            "flagscale.launcher.run_commands:run_named_action", options.config, run_options
        )
    _reject_action_override(overrides, action)
    overrides.append(f"action={action.name}")
    overrides += [f"{name}={to_word(value)}" for name, value in given_options.items()]
    config = Path(options.config)
    if is_sweep:
        return run_sweep_action(config.parent.absolute(), config.name, overrides, options)
    return run_action(config.parent.absolute(), config.name, overrides)


def _unknown_option(option: str, words: Sequence[str], action: Action) -> ConfigError:
    from flagscale.cli_suggestions import suggest_override

    hint = f"flagscale {action.name} -h"
    if action.purpose is not None:
        hint = suggest_override(option, words[words.index(option) + 1 :]) or hint
    return ConfigError(f"unknown option {option.partition('=')[0]}", hint=hint)


def _reject_action_override(overrides: Sequence[str], action: Action) -> None:
    """Raise an error for an override ``action=…``, because the subcommand is the action."""
    from flagscale.config.overrides import parse_override

    for override in overrides:
        parsed = parse_override(override)
        if parsed is not None and parsed.key == "action":
            raise ConfigError(
                f"{override}: `flagscale {action.name}` is an action already",
                hint="leave it out, or give another command",
            )


def _is_yaml(text: str) -> bool:
    """Return True if a text names a YAML file, which need not exist if its suffix is given."""
    return text.endswith((".yaml", ".yml")) or Path(f"{text}.yaml").is_file()


def _explain_key(options: argparse.Namespace, _rest: list[str]) -> int:
    from flagscale.config.compose import config_file
    from flagscale.config.explain import explain
    from flagscale.config.sources import trace_sources

    files = [Path(word) for word in options.key if word.endswith((".yaml", ".yml"))]
    overrides = [word for word in options.key if files and "=" in word]
    words = [word for word in options.key if Path(word) not in files and word not in overrides]
    if not words:
        raise ConfigError("explain: which key?", hint=f"flagscale explain lr {files[0]}")
    sources = (
        trace_sources(config_file(files[0].parent, files[0].name), overrides) if files else None
    )
    print(explain(" ".join(words), sources))
    return 0


def _list_runs(options: argparse.Namespace, _rest: list[str]) -> int:
    from flagscale.launcher.listing import list_runs

    return list_runs(options.run, include_old=options.all, as_json=options.json)


def _write_report(options: argparse.Namespace, extra_words: list[str]) -> int:
    from flagscale.report.command import write_report

    if unknown_options := [text for text in extra_words if text.startswith("-")]:
        raise ConfigError(f"unknown option {unknown_options[0]}", hint="flagscale report -h")
    arguments = [*options.runs, *extra_words]
    overrides = [
        text
        for text in arguments
        if "=" in text and not text.startswith((".", "/", "~")) and not Path(text).exists()
    ]
    if overrides and not any(map(_is_yaml, arguments)):
        text = f"{overrides[0]} is an override, and none of these is a YAML's run"
        raise ConfigError(text, hint="flagscale report -h")
    states = [_find_run(text, overrides) for text in arguments if text not in overrides]
    distinct_states = {(state.run_id, state.exp_dir): state for state in states}
    return write_report(list(distinct_states.values()), options.output, show=options.open)


def _find_run(text: str, overrides: Sequence[str]) -> RunState:
    """Return the run of an id, a directory or a YAML."""
    from flagscale.launcher import runs

    if not _is_yaml(text):
        try:
            return runs.require_run(text)
        except RunStateError as error:
            raise ConfigError(error.message, hint=error.hint) from error
    from flagscale.config.load import load

    path = Path(text)
    experiment = load(path.parent.absolute(), path.name, [*overrides, "action=query"]).experiment
    state = runs.find_of_experiment(experiment)
    if state is None:
        hint = "`flagscale runs` lists yours"
        raise ConfigError(f"no run was started in {experiment.exp_dir}", hint=hint)
    return state


def _print_version(_options: argparse.Namespace, _rest: list[str]) -> int:
    print(f"flagscale {__version__}")
    return 0


if __name__ == "__main__":
    main()
