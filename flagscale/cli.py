"""The ``flagscale`` command: one verb an action, and the tools."""

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
from flagscale.cli_errors import guard
from flagscale.config.actions import ACTIONS, OPTIONS, Action, call
from flagscale.config.arguments.values import word
from flagscale.config.documented import kinds
from flagscale.config.schema import BACKEND_SOURCE, PROJECT, Options
from flagscale.errors import ConfigError, RunStateError
from flagscale.launcher.entry import act, act_each, add_sweep
from flagscale.modules import started

if TYPE_CHECKING:
    from flagscale.launcher.state import RunState

_DESCRIPTION = "One YAML, one command: launch LLM training, watch it and stop it."
_EPILOG = """\
examples
  flagscale check examples/llama3/conf/train.yaml             what would keep it from starting?
  flagscale run examples/llama3/conf/train.yaml               start in the background
  flagscale run examples/llama3/conf/train.yaml train=8b train.model.num_layers=4
  flagscale run examples/llama3/conf/train.yaml -m train.model.seed=1,2,3 --jobs 2
  flagscale query examples/llama3/conf/train.yaml --follow    watch it until it ends
  flagscale logs examples/llama3/conf/train.yaml --rank 0 --lines 50
  flagscale stop examples/llama3/conf/train.yaml              end this run and nothing else
  flagscale runs                                              what is running, and where?
  flagscale stop 20261120                                     by the beginning of its id
  flagscale report 20261120 20261119                          one page: curves, events, failure
  flagscale explain experiment.runner.nproc_per_node          what does this key mean?
  flagscale unpatch --backend Megatron-LM                     fetch and adapt the backend
  flagscale comm list                                         which backends work here?
  flagscale bench traffic --hosts node[1-4] --tail 3          load their network to a known tail
  flagscale convert /models/Llama-3.2-1B checkpoints/llama    from Hugging Face, or back

`flagscale run CONF/train.yaml x=y` is `python run.py --config-path CONF --config-name train x=y`.
"""

_RUNS = "list your runs: state, step, age and directory"
_REPORT = "write a run's page, or one of several side by side: curves, events, hosts, failure"
_PATCHING = {
    "unpatch": ("main_unpatch", "fetch a backend's source and adapt it"),
    "patch": ("main_patch", "turn edits of a backend's source into patches"),
    "patch-status": ("main_status", "tell what is applied to a backend's source"),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(guard(lambda: _dispatch(argv)))


def _dispatch(argv: list[str]) -> int:
    if argv[:2] == ["config", "explain"]:
        argv = argv[1:]
    if argv[:1] and argv[0] in _PATCHING:
        # These parse their own options.
        function: Callable[[list[str]], int] = getattr(
            import_module("flagscale.patching.cli"), _PATCHING[argv[0]][0]
        )
        return function(argv[1:])
    if argv[:1] == ["convert"]:
        return _convert(argv[1:])
    if argv[:1] == ["comm"]:
        from flagscale.bench.cli import main_comm

        return main_comm(argv[1:])
    if argv[:1] == ["bench"]:
        from flagscale.bench.bench_commands import main_bench

        return main_bench(argv[1:])
    parser = _parser()
    if not argv:
        parser.print_help()
        return 2
    options, overrides = parser.parse_known_args(argv)
    do: Callable[[argparse.Namespace, list[str]], int] = options.do
    return do(options, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flagscale",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flagscale {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for action in ACTIONS.values():
        made = commands.add_parser(action.name, help=action.help, description=action.help)
        made.set_defaults(do=_act)
        _add_action(made, action)
    explain = commands.add_parser("explain", help="what a key of the configuration means")
    explain.add_argument("key", help="such as experiment.runner.tee or train.model.num_layers")
    explain.set_defaults(do=_explain)
    runs = commands.add_parser("runs", help=_RUNS, description=_RUNS)
    text = "an id, a directory or a YAML: every run of that experiment, with its attempts"
    runs.add_argument("run", nargs="?", metavar="RUN", help=text)
    runs.add_argument("--all", "-a", action="store_true", help="also what has ended long ago")
    runs.add_argument("--json", action="store_true", help="print JSON, for programs")
    runs.set_defaults(do=_runs)
    report = commands.add_parser("report", help=_REPORT, description=_REPORT)
    text = "an id, its beginning, a directory or a YAML; overrides of YAMLs (key=value) go between"
    report.add_argument("runs", nargs="+", metavar="RUN", help=text)
    text = "where to write it (report_<run id>.html in the current directory)"
    report.add_argument("--output", "-o", type=Path, metavar="FILE", help=text)
    report.add_argument("--open", action="store_true", help="show it in a browser")
    report.set_defaults(do=_report)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(do=_version)
    comm = "communication backends: list, bench, groups, pipeline, tune"
    commands.add_parser("comm", help=comm, add_help=False)
    bench = "benchmarks under traffic: traffic, training"
    commands.add_parser("bench", help=bench, add_help=False)
    convert = "a model between Hugging Face and checkpoints of training"
    commands.add_parser("convert", help=convert, add_help=False)
    for name, (_, text) in _PATCHING.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _add_action(parser: argparse.ArgumentParser, action: Action) -> None:
    if action.purpose is not None:
        takes_runs = action.purpose == "find"
        text = "the experiment's YAML" + (", or a run: its id or directory" if takes_runs else "")
        parser.add_argument("config", metavar="CONFIG", help=text)
    for name in action.options:
        option = OPTIONS[name]
        flags = [f"--{name}", *filter(None, (option.letter,))]
        base = kinds(Options)[name].base
        if base is bool:
            parser.add_argument(*flags, action="store_const", const=True, help=option.help)
        else:
            parser.add_argument(*flags, type=_natural if base is int else str, help=option.help)
    if action.purpose is not None:
        # Without a default argparse would call them required.
        add_sweep(parser)
        text = "overrides, as Hydra knows them"
        parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)


def _convert(argv: list[str]) -> NoReturn:
    """Become the program that converts: it needs torch, and this one does without."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    module = "flagscale.train.checkpoint.formats.convert"
    paths = [str(BACKEND_SOURCE), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *started(module), *argv], environment)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, found {text!r}")
    return int(text)


def _act(options: argparse.Namespace, rest: list[str]) -> int:
    # argparse takes neither overrides after an option nor `~key` for positional arguments alone.
    action = ACTIONS[options.command]
    unknown = [text for text in rest if text.startswith("-") or action.purpose is None]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}", hint=f"flagscale {action.name} -h")
    values = {name: getattr(options, name) for name in action.options}
    given = {name: value for name, value in values.items() if value is not None}
    if action.purpose is None:
        return call(action.function, Options(action=action.name, **given))
    overrides = [*options.overrides, *rest]
    several = options.multirun or options.jobs is not None
    if action.purpose == "find" and not several and not _is_yaml(options.config):
        if overrides:
            raise ConfigError(f"{overrides[0]}: a run that is there has no overrides")
        named = Options(action=action.name, **given)
        return call("flagscale.launcher.run_commands:act", options.config, named)
    _refuse_action(overrides, action)
    overrides.append(f"action={action.name}")
    overrides += [f"{name}={word(value)}" for name, value in given.items()]
    config = Path(options.config)
    if several:
        return act_each(config.parent.absolute(), config.name, overrides, options)
    return act(config.parent.absolute(), config.name, overrides)


def _refuse_action(overrides: Sequence[str], action: Action) -> None:
    """Refuse an ``action=…`` beside the one that the command is."""
    from flagscale.config.overrides import parse

    for override in overrides:
        parsed = parse(override)
        if parsed is not None and parsed.key == "action":
            raise ConfigError(
                f"{override}: `flagscale {action.name}` is an action already",
                hint="leave it out, or give another command",
            )


def _is_yaml(text: str) -> bool:
    """Whether a text names a YAML, there or not; its suffix may be missing where it is there."""
    return text.endswith((".yaml", ".yml")) or Path(f"{text}.yaml").is_file()


def _explain(options: argparse.Namespace, _rest: list[str]) -> int:
    from flagscale.config.explain import explain

    print(explain(options.key))
    return 0


def _runs(options: argparse.Namespace, _rest: list[str]) -> int:
    from flagscale.launcher.listing import show

    return show(options.run, everything=options.all, as_json=options.json)


def _report(options: argparse.Namespace, rest: list[str]) -> int:
    from flagscale.report.command import report

    if unknown := [text for text in rest if text.startswith("-")]:
        raise ConfigError(f"unknown option {unknown[0]}", hint="flagscale report -h")
    words = [*options.runs, *rest]
    overrides = [
        word
        for word in words
        if "=" in word and not word.startswith((".", "/", "~")) and not Path(word).exists()
    ]
    if overrides and not any(map(_is_yaml, words)):
        text = f"{overrides[0]} is an override, and none of these is a YAML's run"
        raise ConfigError(text, hint="flagscale report -h")
    states = [_run(word, overrides) for word in words if word not in overrides]
    once = {(state.run_id, state.exp_dir): state for state in states}
    return report(list(once.values()), options.output, show=options.open)


def _run(text: str, overrides: Sequence[str]) -> RunState:
    """The run that is named, or the one of a YAML."""
    from flagscale.launcher import runs

    if not _is_yaml(text):
        try:
            return runs.named(text)
        except RunStateError as error:
            raise ConfigError(error.message, hint=error.hint) from error
    from flagscale.config.load import load

    path = Path(text)
    experiment = load(path.parent.absolute(), path.name, [*overrides, "action=query"]).experiment
    state = runs.of(experiment)
    if state is None:
        known = "`flagscale runs` lists yours"
        raise ConfigError(f"no run was started in {experiment.exp_dir}", hint=known)
    return state


def _version(_options: argparse.Namespace, _rest: list[str]) -> int:
    print(f"flagscale {__version__}")
    return 0


if __name__ == "__main__":
    main()
