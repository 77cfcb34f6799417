"""Command line shared by ``run.py`` and the ``flagscale`` command.

It follows Hydra's: ``--config-path`` (here relative to the current directory), ``--config-name``,
overrides, ``--cfg job``, ``--help``. A mistake prints one message and exits with the code in
``flagscale.errors``; only an internal error shows a traceback. Only runs write files.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flagscale.cli_errors import run_command
from flagscale.config.actions import ACTIONS, OPTIONS, Action, action_names, call_function
from flagscale.errors import ConfigError

_HELP_TEXT = """\
One YAML describes an experiment; action= selects what to do with it.

  python run.py --config-path ./examples/llama3/conf --config-name train action=run

actions
{actions}

overrides, in Hydra's syntax
  train=8b                              another file of the config group `train`
  train.model.num_layers=2              another value
  experiment.exp_dir=/data/run7         another directory
  ~train.data.split                     without this key
  +experiment.envs.NCCL_DEBUG=INFO      one more key

  -m train.model.seed=1,2               one run per value, in exp_dir/seed=1, …; --jobs N at a time

--cfg job prints the composed configuration without secrets: --resolve fills in interpolations,
--package KEY selects a section. With --config-name, --help lists the config groups.
"""

_UNSUPPORTED_FLAGS = {
    **dict.fromkeys(
        ("--config-dir", "-cd"),
        "all files are below --config-path, so that every error has one location",
    ),
    "--experimental-rerun": "start the scripts of a run again by hand, or use action=run",
    **dict.fromkeys(
        ("--info", "-i", "--hydra-help"),
        "only Hydra's own command line supports it; --cfg all prints the composed configuration, "
        "--help the choices",
    ),
    **dict.fromkeys(("--shell-completion", "-sc"), "only Hydra's own command line supports it"),
}
"""Flags of Hydra that are not supported, with the reason."""

# Number of new objects after which the garbage collector runs.
_GC_THRESHOLD = 50_000


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint="python run.py --help")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Execute a command line and exit."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    # Modules and plans live as long as this program. Scanning all of them for garbage again and
    # again would take a tenth of the start.
    gc.set_threshold(_GC_THRESHOLD)
    sys.exit(run_command(lambda: dispatch(argv)))


def dispatch(argv: list[str]) -> int:
    """Parse a command line in Hydra's syntax and execute it."""
    for flag in (text.partition("=")[0] for text in argv):
        if flag in _UNSUPPORTED_FLAGS:
            raise ConfigError(f"{flag}: {_UNSUPPORTED_FLAGS[flag]}")
    options = _parser().parse_intermixed_args(argv)
    if options.help or not argv:
        print(_format_help(options))
        return 0 if argv else 2
    if options.cfg:
        return _print_config(options)
    directory = _config_directory(options)
    if options.multirun or options.jobs is not None:
        return run_sweep_action(directory, options.config_name, options.overrides, options)
    return run_action(directory, options.config_name, options.overrides)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="run.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    add_sweep_options(parser)
    parser.add_argument("overrides", nargs="*")
    return parser


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that may apply to many runs."""
    text = "one run per combination of the values of key=a,b"
    parser.add_argument("--multirun", "-m", action="store_true", help=text)
    text = "with -m: number of concurrent runs"
    parser.add_argument("--jobs", "-j", type=_parse_positive, metavar="N", help=text)


def _parse_positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def run_sweep_action(
    directory: Path, name: str, overrides: Sequence[str], options: argparse.Namespace
) -> int:
    """Perform the action on every run of a sweep, see :func:`flagscale.sweep.run_sweep`."""
    if not options.multirun:
        raise ConfigError("--jobs needs -m: only a sweep has several runs")
    return call_function("flagscale.sweep:run_sweep", directory, name, overrides, options.jobs or 1)


def _format_help(options: argparse.Namespace) -> str:
    text = _HELP_TEXT.format(
        actions="\n".join(_format_action(ACTIONS[name]) for name in action_names())
    )
    if not options.config_name:
        return text
    from flagscale.config.compose import config_file
    from flagscale.config.show import config_groups

    file = config_file(_config_directory(options), options.config_name)
    rows = (
        f"  {name}: {', '.join(choices)}" for name, choices in config_groups(file.parent).items()
    )
    return "\n".join([text, f"Config groups next to {file.name}", *rows])


def _format_action(action: Action) -> str:
    from flagscale.config.schema import Options

    examples = ", ".join(OPTIONS[name].example for name in action.options)
    default = " (the default)" if action.name == Options.action else ""
    return f"  {action.name:<9} {action.help}{default}{f' ({examples})' if examples else ''}"


def _config_directory(options: argparse.Namespace) -> Path:
    """Return ``--config-path``, relative to the current directory, which is also the default."""
    if not options.config_name:
        raise ConfigError(
            "--config-name is missing",
            hint="for example --config-path ./examples/llama3/conf --config-name train",
        )
    return Path(options.config_path or ".").absolute()


def run_action(directory: Path, name: str, overrides: Sequence[str]) -> int:
    """Compose and check the experiment, then perform its action."""
    from flagscale.config.load import load

    loaded = load(directory, name, overrides)
    function = ACTIONS[loaded.options.action].function
    return call_function(function, loaded.experiment, loaded.options)


def _print_config(options: argparse.Namespace) -> int:
    """Print the composed configuration, and a note on stderr if secrets are hidden."""
    from flagscale.config.compose import config_file
    from flagscale.config.show import show_config
    from flagscale.config.sources import trace_sources

    sources = trace_sources(
        config_file(_config_directory(options), options.config_name), options.overrides
    )
    text, hidden = show_config(
        sources, options.cfg, package=options.package, resolved=options.resolve
    )
    print(text, end="")
    if hidden:
        print("note: values that look like secrets are shown as <hidden>", file=sys.stderr)
    return 0
