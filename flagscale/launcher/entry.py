"""The way in, shared by ``run.py`` and the ``flagscale`` command.

Hydra's command line as its users know it: ``--config-path`` (here relative to the current
directory), ``--config-name``, overrides, ``--cfg job``, ``--help``. A mistake prints one message
and ends with the exit code of ``flagscale.errors``; only an error of this program itself shows a
traceback. Nothing but the run writes files.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flagscale.cli_errors import guard
from flagscale.config.actions import ACTIONS, OPTIONS, Action, call, names
from flagscale.errors import ConfigError

_TEACHING = """\
One YAML describes an experiment; action= says what to do with it.

  python run.py --config-path ./examples/llama3/conf --config-name train action=run

actions
{actions}

overrides, as Hydra knows them
  train=8b                              another file of the config group `train`
  train.model.num_layers=2              another value
  experiment.exp_dir=/data/run7         another directory
  ~train.data.split                     without this key
  +experiment.envs.NCCL_DEBUG=INFO      one more key

  -m train.model.seed=1,2               a run for each, in exp_dir/seed=1, …; --jobs N at a time

--cfg job prints the composed configuration, its secrets hidden: --resolve with every interpolation
filled in, --package KEY only what is there. With --config-name, --help lists the config groups.
"""

_REFUSED = {
    **dict.fromkeys(
        ("--config-dir", "-cd"), "every file is below --config-path, so that an error has one place"
    ),
    "--experimental-rerun": "the scripts of a run are started again by hand, or by action=run",
    **dict.fromkeys(
        ("--info", "-i", "--hydra-help"),
        "only Hydra's own command line can tell; --cfg all prints what it composes, --help what "
        "there is to choose",
    ),
    **dict.fromkeys(("--shell-completion", "-sc"), "is part of Hydra's own command line alone"),
}
"""Flags of Hydra that are not there, with the reason."""

# New objects after which the garbage collector looks for cycles.
_OBJECTS = 50_000


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint="python run.py --help")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Do what a command line says and exit."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    # What modules and plans are made of lives as long as this program: to look through all of it
    # for garbage over and over would take a tenth of the start.
    gc.set_threshold(_OBJECTS)
    sys.exit(guard(lambda: dispatch(argv)))


def dispatch(argv: list[str]) -> int:
    """Parse a command line as Hydra has it and act on it."""
    for flag in (text.partition("=")[0] for text in argv):
        if flag in _REFUSED:
            raise ConfigError(f"{flag}: {_REFUSED[flag]}")
    options = _parser().parse_intermixed_args(argv)
    if options.help or not argv:
        print(_help(options))
        return 0 if argv else 2
    if options.cfg:
        return _show(options)
    directory = _directory(options)
    if options.multirun or options.jobs is not None:
        return act_each(directory, options.config_name, options.overrides, options)
    return act(directory, options.config_name, options.overrides)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="run.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    add_sweep(parser)
    parser.add_argument("overrides", nargs="*")
    return parser


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """The options of a command that may be of many runs."""
    text = "a run for each combination of the values of key=a,b"
    parser.add_argument("--multirun", "-m", action="store_true", help=text)
    text = "with -m: how many runs at a time"
    parser.add_argument("--jobs", "-j", type=_positive, metavar="N", help=text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def act_each(
    directory: Path, name: str, overrides: Sequence[str], options: argparse.Namespace
) -> int:
    """Do the action of every run of a sweep, see :func:`flagscale.sweep.main`."""
    if not options.multirun:
        raise ConfigError("--jobs: only the runs of a sweep are several; give -m, too")
    return call("flagscale.sweep:main", directory, name, overrides, options.jobs or 1)


def _help(options: argparse.Namespace) -> str:
    text = _TEACHING.format(actions="\n".join(_taught(ACTIONS[name]) for name in names()))
    if not options.config_name:
        return text
    from flagscale.config.compose import config_file
    from flagscale.config.show import groups

    file = config_file(_directory(options), options.config_name)
    rows = (f"  {name}: {', '.join(found)}" for name, found in groups(file.parent).items())
    return "\n".join([text, f"Config groups beside {file.name}", *rows])


def _taught(action: Action) -> str:
    from flagscale.config.schema import Options

    examples = ", ".join(OPTIONS[name].example for name in action.options)
    default = " (the default)" if action.name == Options.action else ""
    return f"  {action.name:<8} {action.help}{default}{f' ({examples})' if examples else ''}"


def _directory(options: argparse.Namespace) -> Path:
    """``--config-path``, relative to the current directory; the latter is the default."""
    if not options.config_name:
        raise ConfigError(
            "--config-name is missing",
            hint="for example --config-path ./examples/llama3/conf --config-name train",
        )
    return Path(options.config_path or ".").absolute()


def act(directory: Path, name: str, overrides: Sequence[str]) -> int:
    """Compose and check the experiment, then do its action."""
    from flagscale.config.load import load

    loaded = load(directory, name, overrides)
    function = ACTIONS[loaded.options.action].function
    return call(function, loaded.experiment, loaded.options)


def _show(options: argparse.Namespace) -> int:
    """Print the composed configuration; that something in it is hidden, beside it."""
    from flagscale.config.compose import config_file
    from flagscale.config.show import shown
    from flagscale.config.sources import trace

    sources = trace(config_file(_directory(options), options.config_name), options.overrides)
    text, hidden = shown(sources, options.cfg, package=options.package, resolved=options.resolve)
    print(text, end="")
    if hidden:
        print("note: what looks like a secret is shown as <hidden>", file=sys.stderr)
    return 0
