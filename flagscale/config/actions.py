"""Table of actions: one row for each thing that can be done with an experiment.

The command lines, their help, the values of ``action``, the checks and the called functions all
come from this table. Functions are named in entry-point form (``module:name``) and imported when
they are called, so that checking a configuration imports none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal, NamedTuple

Purpose = Literal["launch", "plan", "find"]
"""Reason for loading an experiment: to launch it (everything must be right), to plan it (data and
tokenizer may be on other machines), or to find a run of it (only ``experiment`` must be right, and
the arguments of training are not read)."""


class Option(NamedTuple):
    """An option of the launcher. Its type and default are those of the field of the same name of
    ``schema.Options``.
    """

    help: str
    example: str
    """Example, as an override."""
    letter: str = ""
    """Short flag of the ``flagscale`` command."""


OPTIONS = {
    "follow": Option("keep printing until the run ends", "follow=true", "-f"),
    "rank": Option("only this rank's lines", "rank=0"),
    "lines": Option("only this many last lines of each host", "lines=50", "-n"),
    "host": Option("only this host: its script, or its lines", "host=node07"),
    "grep": Option("only lines in which this regular expression is found", "grep=loss"),
    "since": Option("only lines since then: 10m (ago), 14:02, or 2026-11-26T14:02", "since=10m"),
    "level": Option("only warnings and errors, or only errors, with tracebacks", "level=error"),
    "json": Option("print JSON, for programs", "json=true"),
    "csv": Option("write the table of a sweep to this CSV file", "csv=runs.csv"),
    "dry": Option("list the layouts in the order of predicted time; start nothing", "dry=true"),
    "run_best": Option("start a run with the best layout afterwards", "run_best=true"),
    "project": Option(
        "predict the layouts of this many hosts from measurements of these", "project=nodes=64"
    ),
}


class Action(NamedTuple):
    """One action.

    ``function`` is ``module:name``; it is called with the experiment and the options, and returns
    the exit code. An action without a ``purpose`` needs no experiment: only the ``flagscale``
    command has it, and its function gets the options alone.
    """

    name: str
    help: str
    """Description in one line."""
    purpose: Purpose | None
    function: str
    options: tuple[str, ...] = ()
    """Names of the accepted ``OPTIONS``."""
    alias: str = ""
    """Another name of the ``flagscale`` command, which its help shows."""

    @property
    def command(self) -> str:
        """Name of the ``flagscale`` command."""
        return self.alias or self.name


ACTIONS = {
    action.name: action
    for action in (
        Action(
            "run",
            "start in the background; return when every rank is ready",
            "launch",
            "flagscale.launcher.actions:run_experiment",
        ),
        Action(
            "dryrun",
            "print the plan and the scripts; start nothing",
            "plan",
            "flagscale.launcher.preview:print_dry_run",
            ("host", "json"),
        ),
        Action(
            "test",
            "run in the foreground, show every line, exit with the job's code",
            "launch",
            "flagscale.launcher.actions:run_experiment",
        ),
        Action(
            "check",
            "find problems that would keep a run from starting",
            "plan",
            "flagscale.launcher.preview:print_checks",
            ("json",),
        ),
        Action(
            "estimate",
            "calculate memory and time of a step, without devices",
            "plan",
            "flagscale.launcher.preview:print_estimate",
            ("json",),
        ),
        Action(
            "auto_tune",
            "find the fastest layout by calculation and short runs",
            "plan",
            "flagscale.tune.command:tune_experiment",
            ("dry", "run_best", "project", "json"),
            alias="tune",
        ),
        Action(
            "query",
            "show state, step, loss, speed and the first failure",
            "find",
            "flagscale.launcher.actions:run_on_existing",
            ("follow", "json", "csv"),
        ),
        Action(
            "logs",
            "show the output, host:rank in front of every line",
            "find",
            "flagscale.launcher.actions:run_on_existing",
            ("follow", "rank", "lines", "host", "grep", "since", "level"),
        ),
        Action(
            "stop",
            "end this run, and nothing else",
            "find",
            "flagscale.launcher.actions:run_on_existing",
        ),
    )
}


def actions_by_command() -> dict[str, Action]:
    """Return the actions by the names of their commands."""
    return {name: row for row in ACTIONS.values() for name in (row.command, row.name)}


def call_function(function: str, *arguments: object) -> int:
    """Import and call ``module:name``, and return its exit code."""
    module, _, name = function.partition(":")
    code: int = getattr(import_module(module), name)(*arguments)
    return code


def action_names() -> tuple[str, ...]:
    """Return the values that ``action`` of a YAML can have."""
    return tuple(action.name for action in ACTIONS.values() if action.purpose is not None)


def describe_actions() -> str:
    """Return a sentence that describes every action of a YAML."""
    return (
        "; ".join(f"`{name}`: {ACTIONS[name].help.replace(';', ',')}" for name in action_names())
        + "."
    )


def describe_option(name: str) -> str:
    """Return the description of an option, with the actions that accept it."""
    accepting_actions = [
        f"`{action.name}`" for action in ACTIONS.values() if name in action.options
    ]
    return f"{' and '.join(accepting_actions)}: {OPTIONS[name].help}."
