"""What can be done with an experiment: a row an action.

Command lines, their help, ``action`` of the YAML, what is checked for it and what is called come
from this table alone. It is data: the functions are named, not imported, so that those who only
check a configuration load none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal, NamedTuple

Purpose = Literal["launch", "plan", "find"]
"""What an experiment is loaded for: to start it (everything must be right), to plan it (data and
tokenizer may be elsewhere), or to find a run of it (only ``experiment`` must be right)."""


class Option(NamedTuple):
    """An option of the launcher; its type and default are those of the field of ``Options``."""

    help: str
    example: str
    """As an override."""
    letter: str = ""
    """The short flag of the ``flagscale`` command."""


OPTIONS = {
    "follow": Option("keep on until the run ends", "follow=true", "-f"),
    "rank": Option("only this rank's lines", "rank=0"),
    "lines": Option("only the last so many lines of each host", "lines=50", "-n"),
    "host": Option("the script of this host alone, not one for all alike", "host=node07"),
    "json": Option("print JSON, for programs", "json=true"),
}


class Action(NamedTuple):
    """One action.

    ``function`` is ``module:name``; it is called with the experiment and the options, and returns
    the exit code. Without a ``purpose`` an action needs no experiment: only the ``flagscale``
    command has it, and its function gets the options alone.
    """

    name: str
    help: str
    """One line."""
    purpose: Purpose | None
    function: str
    options: tuple[str, ...] = ()
    """Names of ``OPTIONS``."""


_LAUNCH = "flagscale.launcher.actions"
_PREVIEW = "flagscale.launcher.preview"

ACTIONS = {
    action.name: action
    for action in (
        Action(
            "run",
            "start in the background; return when every rank is ready",
            "launch",
            f"{_LAUNCH}:run",
        ),
        Action(
            "dryrun",
            "print the plan and the scripts; start nothing",
            "plan",
            f"{_PREVIEW}:dryrun",
            ("host", "json"),
        ),
        Action(
            "test",
            "run in the foreground, show every line, exit with the job's code",
            "launch",
            f"{_LAUNCH}:run",
        ),
        Action(
            "check",
            "look for what would keep a run from starting",
            "plan",
            f"{_PREVIEW}:check",
            ("json",),
        ),
        Action(
            "estimate",
            "tell memory and time of a step by calculation, without devices",
            "plan",
            f"{_PREVIEW}:estimate",
            ("json",),
        ),
        Action(
            "query",
            "tell state, step, loss, speed and the first failure",
            "find",
            f"{_LAUNCH}:attend",
            ("follow", "json"),
        ),
        Action(
            "logs",
            "show the output, host:rank in front of every line",
            "find",
            f"{_LAUNCH}:attend",
            ("follow", "rank", "lines"),
        ),
        Action("stop", "end this run, and nothing else", "find", f"{_LAUNCH}:attend"),
    )
}


def call(function: str, *arguments: object) -> int:
    """Call ``module:name``; its exit code."""
    module, _, name = function.partition(":")
    code: int = getattr(import_module(module), name)(*arguments)
    return code


def names() -> tuple[str, ...]:
    """What a YAML's ``action`` may be."""
    return tuple(action.name for action in ACTIONS.values() if action.purpose is not None)


def actions_doc() -> str:
    """Every action of a YAML and what it does, in one sentence."""
    return "; ".join(f"`{name}`: {ACTIONS[name].help.replace(';', ',')}" for name in names()) + "."


def option_doc(name: str) -> str:
    """What an option does, and for which actions."""
    takers = [f"`{action.name}`" for action in ACTIONS.values() if name in action.options]
    return f"{' and '.join(takers)}: {OPTIONS[name].help}."
