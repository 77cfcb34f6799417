"""The ``flagscale`` command: one verb an action, and the tools."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from flagscale import __version__
from flagscale.errors import ConfigError
from flagscale.guard import guard
from flagscale.launch.entry import act

_DESCRIPTION = "One YAML, one command: launch LLM training, watch it and stop it."
_EPILOG = """\
examples
  flagscale check examples/llama3/conf/train.yaml             what would keep it from starting?
  flagscale run examples/llama3/conf/train.yaml               start in the background
  flagscale run examples/llama3/conf/train.yaml train=8b train.model.num_layers=4
  flagscale query examples/llama3/conf/train.yaml --follow    watch it until it ends
  flagscale logs examples/llama3/conf/train.yaml --rank 0 --lines 50
  flagscale stop examples/llama3/conf/train.yaml              end this run and nothing else
  flagscale explain experiment.runner.nproc_per_node          what does this key mean?
  flagscale unpatch --backend Megatron-LM                     fetch and adapt the backend
  flagscale comm list                                         which backends work here?

`flagscale run CONF/train.yaml x=y` is `python run.py --config-path CONF --config-name train x=y`.
"""

_ACTIONS = {
    "run": "start in the background; return when every rank is ready",
    "test": "run in the foreground, show every line, exit with the job's code",
    "dryrun": "print the plan and the scripts; start nothing",
    "check": "look for what would keep a run from starting",
    "query": "tell state, step, loss, speed and the first failure",
    "logs": "show the output, host:rank in front of every line",
    "stop": "end the run that was last started with this configuration",
}
_PATCHING = {
    "unpatch": ("main_unpatch", "fetch a backend's source and adapt it"),
    "patch": ("main_patch", "turn edits of a backend's source into patches"),
    "patch-status": ("main_status", "tell what is applied to a backend's source"),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(guard(lambda: _dispatch(words)))


def _dispatch(words: list[str]) -> int:
    if words[:2] == ["config", "explain"]:
        words = words[1:]
    if words[:1] and words[0] in _PATCHING:
        # These parse their own options.
        function: Callable[[list[str]], int] = getattr(
            import_module("flagscale.patching.cli"), _PATCHING[words[0]][0]
        )
        return function(words[1:])
    if words[:1] == ["comm"]:
        from flagscale.bench.cli import main_comm

        return main_comm(words[1:])
    parser = _parser()
    if not words:
        parser.print_help()
        return 2
    options, overrides = parser.parse_known_args(words)
    if options.command == "version":
        print(f"flagscale {__version__}")
        return 0
    if options.command == "explain":
        return _explain(options.key)
    return _act(options, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flagscale",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flagscale {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _ACTIONS.items():
        _add_action(commands.add_parser(name, help=text, description=text), name)
    explain = commands.add_parser("explain", help="what a key of the configuration means")
    explain.add_argument("key", help="such as experiment.runner.tee or train.model.num_layers")
    commands.add_parser("version", help="print the version")
    comm = "communication backends: list, bench, groups, pipeline, tune"
    commands.add_parser("comm", help=comm, add_help=False)
    for name, (_, text) in _PATCHING.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _add_action(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the experiment's YAML")
    if name in ("query", "logs"):
        parser.add_argument("--follow", "-f", action="store_true", help="keep on until it ends")
    if name in ("query", "dryrun", "check"):
        parser.add_argument("--json", action="store_true", help="for programs")
    if name == "logs":
        parser.add_argument("--rank", type=int, help="only this rank's lines")
        parser.add_argument("--lines", "-n", type=int, help="only the last so many lines")
    parser.add_argument(
        "overrides",
        nargs="*",
        # Without a default argparse would call them required.
        default=[],
        metavar="key=value",
        help="overrides, as Hydra knows them",
    )


def _act(options: argparse.Namespace, rest: list[str]) -> int:
    # argparse takes neither overrides after an option nor `~key` for positional arguments alone.
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}", hint=f"flagscale {options.command} -h")
    from flagscale.config.overrides import parse

    overrides = [*options.overrides, *rest]
    for override in overrides:
        parsed = parse(override)
        if parsed is not None and parsed.key == "action":
            raise ConfigError(
                f"{override}: `flagscale {options.command}` is an action already",
                hint="leave it out, or give another command",
            )
    overrides.append(f"action={options.command}")
    for name in ("follow", "json"):
        if getattr(options, name, False):
            overrides.append(f"{name}=true")
    for name in ("rank", "lines"):
        value = getattr(options, name, None)
        if value is not None:
            overrides.append(f"{name}={value}")
    config: Path = options.config
    return act(config.parent.absolute(), config.name, overrides)


def _explain(key: str) -> int:
    from flagscale.config.explain import explain

    print(explain(key))
    return 0


if __name__ == "__main__":
    main()
