"""The way in, shared by ``run.py`` and the ``flagscale`` command.

Hydra's command line as its users know it: ``--config-path`` (here relative to the current
directory), ``--config-name``, overrides, ``--cfg job``, ``--help``. A mistake prints one message
and ends with the exit code of ``flagscale.errors``; only an error of this program itself shows a
traceback. Nothing but the run writes files.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flagscale.errors import ConfigError
from flagscale.guard import guard

_TEACHING = """\
One YAML describes an experiment; action= says what to do with it.

  python run.py --config-path ./examples/llama3/conf --config-name train action=run

actions
  run      start in the background, return when every rank is ready (the default)
  test     stay in the foreground and show every line; exit with the job's code
  dryrun   print the plan and the scripts, start nothing
  check    look for what would keep a run from starting
  query    state, step, loss, speed, first failure    (follow=true, json=true)
  logs     output, host:rank in front of every line   (follow=true, rank=0, lines=50)
  stop     end this run, and nothing else

overrides, as Hydra knows them
  train=8b                              another file of the config group `train`
  train.model.num_layers=2              another value
  experiment.exp_dir=/data/run7         another place
  ~train.data.split                     without this key
  +experiment.envs.NCCL_DEBUG=INFO      one more key

--cfg job prints the composed configuration; with --config-name, --help lists the config groups.
"""

# New objects after which the garbage collector looks for cycles.
_OBJECTS = 50_000

# Hydra must not make directories or configure logging: the launcher's files are its own.
_QUIET = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra.job.chdir=false",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Do what a command line says and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # What modules and plans are made of lives as long as this program: to look through all of it
    # for garbage over and over would take a tenth of the start.
    gc.set_threshold(_OBJECTS)
    sys.exit(guard(lambda: dispatch(words)))


def dispatch(words: list[str]) -> int:
    """Parse Hydra's command line and act on it."""
    if not words or (words[0] in ("--help", "-h") and len(words) == 1):
        print(_TEACHING)
        return 0 if words else 2
    from hydra._internal.utils import get_args_parser

    # Python 3.14 looks into the help of options, and one of Hydra's is no text until it is shown.
    argparse.ArgumentParser._check_help = lambda *_: None  # type: ignore[attr-defined]
    options = get_args_parser().parse_args(words)
    if options.multirun:
        raise ConfigError(
            "--multirun: an experiment directory holds one run at a time",
            hint="start each with its own experiment.exp_dir",
        )
    if options.config_dir or options.experimental_rerun:
        raise ConfigError("--config-dir and --experimental-rerun are not supported")
    if _only_shows(options):
        return _show(options)
    return act(_directory(options), options.config_name or "", options.overrides)


def _only_shows(options: argparse.Namespace) -> bool:
    shows = (options.help, options.hydra_help, options.shell_completion, options.cfg, options.info)
    return any(shows)


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
    from flagscale.config.compose import compose, config_file
    from flagscale.config.load import load_experiment, load_options
    from flagscale.launch.actions import perform

    config = compose(directory, name, overrides)
    file = config_file(directory, name)
    options = load_options(config, config_file=file, overrides=overrides)
    experiment = load_experiment(config, config_file=file, overrides=overrides)
    return perform(experiment, options)


def _show(options: argparse.Namespace) -> int:
    """What Hydra itself prints: the configuration, its groups, its own help."""
    from flagscale.config.compose import compose, config_file
    from flagscale.config.overrides import normalize

    words = _words_for_hydra(options)
    overrides = normalize(options.overrides)
    if options.shell_completion:
        overrides = options.overrides  # Hydra's own: install=bash and the like
    elif not options.hydra_help:
        directory = _directory(options)
        # Composed by us first: a mistake then has our message.
        compose(directory, options.config_name, options.overrides)
        file = config_file(directory, options.config_name)
        words += ["--config-path", str(file.parent), "--config-name", file.stem]
    sys.argv = [sys.argv[0], *words, *_QUIET, *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    import hydra

    hydra.main(version_base=None, config_path=None)(_never_run)()
    return 0


def _never_run(_config: object) -> None:
    """Hydra wants a task; showing a configuration never comes to it."""


def _words_for_hydra(options: argparse.Namespace) -> list[str]:
    words = [
        flag
        for flag, given in (
            ("--help", options.help),
            ("--hydra-help", options.hydra_help),
            ("--shell-completion", options.shell_completion),
            ("--resolve", options.resolve),
        )
        if given
    ]
    for flag in ("cfg", "info", "package"):
        value = getattr(options, flag)
        if value:
            words += [f"--{flag}", str(value)]
    return words
