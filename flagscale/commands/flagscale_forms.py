"""Command lines of FlagScale 1.0 and later, as those of this project.

``flagscale train MODEL [-c YAML] [--dryrun]`` and ``flagscale run -p DIR -n NAME -a ACTION`` become
``flagscale ACTION YAML``, so that everything else about them is defined once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.errors import ConfigError

_FLAGS = {
    "stop": ("stop", "end the run, as `flagscale stop`"),
    "dryrun": ("dryrun", "print the plan and the scripts, as `flagscale dryrun`"),
    "test": ("test", "run in the foreground, as `flagscale test`"),
    "query": ("query", "show state, step and loss, as `flagscale query`"),
    "tune": ("auto_tune", "the same as action=auto_tune"),
}
"""Flags of ``flagscale train``: the action of each, and its help."""
_EXAMPLES = Path("examples")


class ActionCall(NamedTuple):
    """An action, the YAML that it is for, and the other words of the command line."""

    action: str
    config: Path
    words: list[str]


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``flagscale train``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a YAML, or a name: examples/MODEL/conf/train.yaml in the current directory",
    )
    _add_train_options(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="overrides in Hydra's syntax",
    )


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", "-c", type=Path, metavar="YAML", help="the experiment's YAML")
    flags = parser.add_mutually_exclusive_group()
    for name, (action, text) in _FLAGS.items():
        flags.add_argument(f"--{name}", dest="flag", action="store_const", const=action, help=text)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add FlagScale's options to those of ``flagscale run``."""
    group = parser.add_argument_group("in place of CONFIG, as in FlagScale")
    group.add_argument("--config-path", "-p", type=Path, metavar="DIR", help="directory of a YAML")
    group.add_argument("--config-name", "-n", metavar="NAME", help="name of the YAML")
    group.add_argument("--action", "-a", metavar="ACTION", help="another action than run")


def read_train_form(options: argparse.Namespace) -> ActionCall:
    """Return the action that a command line of ``flagscale train`` stands for.

    Raises:
        ConfigError: no YAML belongs to the model.
    """
    words = _other_words(options.words, _add_train_options)
    words.remove(options.model)
    config = options.config
    if config is None and words and _is_yaml(words[0]):
        config = Path(words.pop(0))  # FlagScale before 1.0: `train MODEL YAML`
    if config is None:
        config = Path(options.model) if _is_yaml(options.model) else _model_config(options.model)
    return ActionCall(options.flag or "run", config, words)


def read_run_form(options: argparse.Namespace) -> ActionCall | None:
    """Return the action that FlagScale's options of ``flagscale run`` stand for, or None if it has
    none of them.

    Raises:
        ConfigError: the options name no YAML.
    """
    if options.config_path is None and options.config_name is None and options.action is None:
        return None
    if options.config_name is None:
        missing = "-n NAME" if options.config_path is not None else "-p DIR -n NAME"
        raise ConfigError(
            f"{missing} is missing", hint="flagscale run -p DIR -n NAME [-a ACTION] [key=value]"
        )
    name = options.config_name.removesuffix(".yaml").removesuffix(".yml")
    config = (options.config_path or Path()) / f"{name}.yaml"
    words = _other_words(options.words, add_run_arguments)
    return ActionCall(options.action or "run", config, words)


def _other_words(
    words: Sequence[str], add_options: Callable[[argparse.ArgumentParser], None]
) -> list[str]:
    """Return the words of a command line, in order, without these options and their values."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    _, others = parser.parse_known_args(list(words))
    return others


def _is_yaml(text: str) -> bool:
    """Return True if a text is meant as the path of a YAML and not as a model or an override."""
    return "=" not in text and text.endswith((".yaml", ".yml"))


def _model_config(model: str) -> Path:
    """Return the YAML of a model in ``examples``.

    Raises:
        ConfigError: there is none, with the models that there are.
    """
    config = _EXAMPLES / model / "conf" / "train.yaml"
    if config.is_file():
        return config
    models = sorted(path.parts[-3] for path in _EXAMPLES.glob("*/conf/train.yaml"))
    available = f"; there are {', '.join(models)}" if models else ""
    hint = "give the path of a YAML, or write a new experiment: flagscale init"
    raise ConfigError(
        f"no {config} in {Path.cwd()}{available}{did_you_mean(model, models)}",
        hint=hint,
    )
