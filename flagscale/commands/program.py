"""Runs of a program without a YAML: ``flagscale run --hosts a,b --nproc 4 train.py ARGUMENTS``.

The command line becomes the configuration that a YAML with ``task: {type: command}`` would have, so
the run is planned, started, observed and stopped as any other.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from flagscale.commands.argument_types import is_yaml, split_hosts
from flagscale.config.secrets import is_secret
from flagscale.errors import ConfigError

PROGRAM_ACTIONS = ("run", "test", "dryrun", "check")
"""Actions that accept a program in place of a YAML."""
_NPROC_FLAGS = ("--nproc", "--nproc-per-node", "--nproc_per_node")
"""The others are torchrun's."""
_OPTIONS = ("--hosts", *_NPROC_FLAGS, "--name", "--exp-dir", "--env")
_OTHER_VALUE_OPTIONS = ("--jobs", "-j", "--host", "--config-path", "-p", "--config-name", "-n")
VALUE_OPTIONS = frozenset((*_OPTIONS, *_OTHER_VALUE_OPTIONS, "--action", "-a"))
"""Options of these actions whose next word is their value."""
_OVERRIDE = re.compile(r"~[\w.@/-]+|(\+\+?|~)?[\w.@/-]+=.*", re.DOTALL)
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYS = {
    "hosts": "experiment.runner.hosts",
    "nproc": "experiment.runner.nproc_per_node",
    "name": "experiment.exp_name",
    "exp_dir": "experiment.exp_dir",
    "env": "experiment.envs.NAME",
}
"""Keys of a YAML that correspond to the options."""


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a program to those of an action."""
    group = parser.add_argument_group(
        "a program in place of CONFIG",
        "[options] [key=value ...] -- PROGRAM ARGUMENTS, or without -- if PROGRAM ends in .py or "
        "one of these options is given",
    )
    group.add_argument(
        "--hosts",
        metavar="HOST,...",
        help="hosts over SSH, such as a,b or node[01-16]; default: this machine",
    )
    group.add_argument(
        *_NPROC_FLAGS,
        metavar="N",
        help="processes per host; auto: one per device; default: 1. RANK, WORLD_SIZE, MASTER_ADDR, "
        "... are set as by torchrun",
    )
    group.add_argument("--name", help="name of the run; default: the program's")
    group.add_argument(
        "--exp-dir", metavar="DIR", help="directory of scripts and logs; default: ./outputs_NAME"
    )
    group.add_argument(
        "--env",
        action="append",
        metavar="NAME=VALUE",
        help="environment variable of every process; NAME alone: its value here",
    )


def split_program(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words after an action into options and overrides, and a program with its arguments,
    which is empty if there is none.

    A program begins after ``--``, or at a word that ends in ``.py``, or, next to one of the
    program's options, at the first word that is neither an option nor an override.
    """
    index, has_option = 0, False
    while index < len(words):
        word = words[index]
        if word == "--":
            return list(words[:index]), list(words[index + 1 :])
        if word.startswith("-"):
            has_option |= word.partition("=")[0] in _OPTIONS
            index += 1 + (word in VALUE_OPTIONS)
        elif _OVERRIDE.fullmatch(word):
            index += 1
        elif word.endswith(".py") or (has_option and not word.endswith((".yaml", ".yml"))):
            return list(words[:index]), list(words[index:])
        else:
            end = words.index("--", index) if "--" in words[index:] else len(words)
            return list(words[:end]), list(words[end + 1 :])
    return list(words), []


def reject_program_options(options: argparse.Namespace) -> None:
    """Raise an error for an option of a program next to a YAML, with the key to write instead."""
    for name, key in _KEYS.items():
        if (value := getattr(options, name, None)) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is for a program without a YAML",
                hint=f"with a YAML, set the key {key}: {_key_override(key, value)}",
            )


def _key_override(key: str, value: object) -> str:
    """Return the override of a key with the value of an option, if that is a plain word."""
    word = str(value) if isinstance(value, (str, int)) else "VALUE"
    if key.endswith(".hosts"):
        return shlex.quote(f"{key}=[{word}]")
    return f"{key}={shlex.quote(word)}"


def reject_yaml_options(options: argparse.Namespace, program: Sequence[str]) -> None:
    """Raise an error for an option that names a YAML next to a program."""
    for name, flag in (("config_path", "-p"), ("config_name", "-n"), ("action", "-a")):
        if (value := getattr(options, name, None)) is not None:
            raise ConfigError(
                f"{flag} {value} is for a YAML, and {program[0]} is a program",
                hint="processes per host are --nproc N, hosts --hosts a,b",
            )


def reject_bare_program(words: Sequence[str], config: str, action: str) -> None:
    """Raise an error for a program that is given where the YAML ``config`` is expected."""
    if not is_yaml(config) and shutil.which(config) is not None:
        program = words[words.index(config) :]
        hint = f"to run it without a YAML: flagscale {action} -- {shlex.join(program)}"
        raise ConfigError(f"{config} is a program, not a YAML", hint=hint)


def program_config(program: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of a program's run, as a YAML would have it.

    Raises:
        ConfigError: an option has a wrong value.
    """
    from flagscale.config.interpolation import escape_interpolations

    name = options.name if options.name is not None else program_name(program)
    runner: dict[str, Any] = {}
    if options.hosts is not None:
        runner["hosts"] = split_hosts(options.hosts)
    if options.nproc is not None:
        runner["nproc_per_node"] = _parse_nproc(options.nproc)
    return {
        "experiment": {
            "exp_name": escape_interpolations(name),
            "exp_dir": escape_interpolations(options.exp_dir or f"./outputs_{name}"),
            "task": {"type": "command", "command": [*map(escape_interpolations, program)]},
            "runner": runner,
            "envs": {
                variable: text if is_inherited else escape_interpolations(text)
                for variable, text, is_inherited in map(_parse_variable, options.env or ())
            },
        }
    }


def describe_choices(config: dict[str, Any], options: argparse.Namespace) -> str:
    """Return a note about the choices that the user has not made; empty if there is none."""
    if options.exp_dir is not None:
        return ""
    directory = config["experiment"]["exp_dir"]
    return f"scripts and logs are in {directory}; --exp-dir DIR chooses another directory"


def program_name(program: Sequence[str]) -> str:
    """Return a name for the run of a program: that of its script or module, or of the program."""
    first, *arguments = program
    if PurePath(first).name.startswith("python"):
        script = next((word for word in arguments if not word.startswith("-")), first)
    else:
        script = arguments[0] if first == "-m" and arguments else first
    name = PurePath(script).name.removesuffix(".py")
    return _UNSAFE_CHARACTERS.sub("_", name).strip("._-") or "program"


def _parse_nproc(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--nproc: expected a whole number from 1 or auto, found {text!r}")
    return int(text)


def _parse_variable(text: str) -> tuple[str, str, bool]:
    """Return the name of a variable, its text in a configuration, and True if its value is that of
    this process.
    """
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(f"--env: expected NAME=VALUE or NAME, found {text!r}")
    if equals:
        if is_secret(name, value):
            message = f"--env {name}: looks like a secret, which the process list shows"
            raise ConfigError(message, hint=f"export {name}, and give --env {name}")
        return name, value, False
    if name not in os.environ:
        raise ConfigError(f"--env {name}: this machine has no variable {name}")
    return name, f"${{oc.env:{name}}}", True


def run_program(
    action: str, program: Sequence[str], overrides: Sequence[str], options: argparse.Namespace
) -> int:
    """Perform an action on a program, and return the exit code."""
    from flagscale import api
    from flagscale.config.actions import ACTIONS, call_function
    from flagscale.config.schema import Options

    row = ACTIONS[action]
    config = program_config(program, options)
    experiment = api.load(config, overrides, row.purpose or "launch")
    if note := describe_choices(config, options):
        print(f"note: {note}", file=sys.stderr)
    values = {name: getattr(options, name) for name in row.options}
    given_options = {name: value for name, value in values.items() if value is not None}
    return call_function(row.function, experiment, Options(action=action, **given_options))
