"""What a key of a YAML means: one list of all keys, and the answer about one of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flagscale.config import schema
from flagscale.config.arguments import idle
from flagscale.config.arguments.foreign import EXPERIMENT, refusal, remark
from flagscale.config.arguments.registry import (
    aliases,
    arguments,
    closest,
    lookup,
    registry,
)
from flagscale.config.arguments.spec import Argument
from flagscale.config.arguments.values import did_you_mean, expected, nearest, word
from flagscale.config.documented import kinds
from flagscale.config.overrides import SUBSECTIONS
from flagscale.config.torchrun import PASSED_ON, SET_BY_LAUNCHER
from flagscale.errors import ConfigError, Problem

_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Path: "a path",
}
REQUIRED = "required"


@dataclass(frozen=True)
class Entry:
    """One key: ``default`` is text, "" where there is none; ``flag`` only for arguments."""

    key: str
    expects: str
    default: str
    doc: str
    flag: str = ""
    origin: str = ""

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


def default_text(value: Any) -> str:
    """A default as a YAML would write it; empty for "nothing"."""
    if value is None or value == "":
        return ""
    if isinstance(value, Path):
        return value.relative_to(schema.PROJECT).as_posix()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(word(item) for item in value) + "]"
    return word(value)


def _schema_entries(kind: type, prefix: str) -> Iterator[Entry]:
    for key, item in schema.documented(kind).items():
        found, choices = kinds(kind)[key], item.metadata["choices"]
        expects = " or ".join([_KINDS[found.base], *found.literals])
        if choices:
            expects = "one of " + ", ".join(choices)
        if found.many:
            expects = f"a list, each item {expects}"
        default = REQUIRED if item.default is MISSING else default_text(item.default)
        yield Entry(f"{prefix}{key}", expects, default, item.metadata["doc"])


def argument_entry(argument: Argument) -> Entry:
    """An argument of the training program as an entry."""
    return Entry(
        key=f"train.{argument.section}.{argument.name}",
        expects=expected(argument),
        default=default_text(argument.default),
        doc=_with(argument.doc, idle.about(argument.name)),
        flag=argument.flag,
        origin=f"from {argument.origin}",
    )


def _with(doc: str, more: str) -> str:
    """A text and a sentence behind it."""
    if not more:
        return doc
    return f"{doc}{'' if doc.endswith(('.', '!', '?')) else '.'} {more}".lstrip(". ")


@lru_cache(maxsize=1)
def experiment_entries() -> tuple[Entry, ...]:
    """Every key that is not an argument, in the order of the documentation."""
    found = [*_schema_entries(schema.Experiment, "experiment.")]
    for name, kind in SUBSECTIONS.items():
        found += _schema_entries(kind, f"experiment.{name}.")
    found += [
        Entry(
            "experiment.runner.slurm.device_type_specific",
            "a section for each device type",
            "",
            "What unlike nodes are asked for by, in one heterogeneous job, of which each type is a "
            "component: `nodes` (without a hostfile), `partition`, `gpus_per_node`, `mem`, "
            "`constraint`, `reservation`. What is not given is as for all.",
        ),
        Entry(
            "experiment.runner.slurm.extra",
            "a section of options",
            "",
            "Any other option of sbatch by its long name: `{licenses: matlab, hold: true}`. `true` "
            "is an option without a value. Those that the launcher gives itself are refused.",
        ),
        Entry(
            "experiment.envs",
            "variables and their values",
            "",
            "Environment of every rank. Values reach it exactly as the YAML writes them: no shell "
            "fills in a `$NAME`. `${host:NAME}` stands for the host's own variable, whatever this "
            "section gives it: `PATH: /opt/x/bin:${host:PATH}`. One that is unset is empty, and in "
            "a variable whose name ends in PATH the `:` beside it goes too. `\\${host:NAME}` is "
            "meant literally.",
        ),
        Entry(
            "experiment.envs.device_type_specific",
            "a section of variables for each device type",
            "",
            "Wins over `envs` on hosts whose hostfile line has that `type=`. A type that no line "
            "of the hostfile has is refused.",
        ),
        Entry(
            "experiment.envs.node_specific",
            "a section of variables for each host",
            "",
            "Wins over `envs` and `device_type_specific` on the host of that name. A name that the "
            "hostfile does not have is refused.",
        ),
    ]
    found += [
        Entry(
            "device_type_specific",
            "a section for each device type",
            "",
            "What is different on hosts whose hostfile line has that `type=`: arguments of the "
            "training program that may differ by host, which docs/configuration.md lists (null "
            "takes one away), `build_dir`, `python`, `conda` and `cmds`. "
            "Wins over `train`, `experiment.runner` and `experiment.cmds`. A type that no line of "
            "the hostfile has is refused.",
        ),
        Entry(
            "node_specific",
            "a section for each host",
            "",
            "The same for the host of that name; wins over `device_type_specific`. A name that the "
            "hostfile does not have is refused; without a hostfile the only name is `localhost`.",
        ),
    ]
    return (*found, *_schema_entries(schema.Options, ""))


def _find(key: str) -> list[Entry]:
    exact = [e for e in experiment_entries() if f".{e.key}".endswith(f".{key}")]
    if exact:
        return exact
    name = key.strip("-").rpartition(".")[2].replace("-", "_")
    found = lookup(name)
    if found is None:
        return []
    argument, alias = found
    if alias is None:
        return [argument_entry(argument)]
    entry = Entry(
        key=f"train.{argument.section}.{name}",
        expects=expected(argument),
        default="",
        doc=argument.doc,
        flag="--" + name.replace("_", "-"),
        origin=argument.origin.strip() if alias.target else "accepted, without effect",
    )
    return [entry] + ([argument_entry(arguments()[alias.target])] if alias.target else [])


def explain(key: str) -> str:
    """What a key means: dotted (``train.model.num_layers``), bare (``num_layers``), a flag, or a
    section.

    Raises ConfigError for an unknown key, naming the nearest ones.
    """
    name = key.strip("-").rpartition(".")[2].replace("-", "_")
    entries = _find(key)
    if entries:
        return "\n\n".join(_text(entry) for entry in entries)
    if section := _section(key):
        return section
    if name in PASSED_ON:
        return f"experiment.runner.{name}\n  Passed on to torchrun, whose option it is."
    reason = refusal(name) or SET_BY_LAUNCHER.get(name)
    if reason:
        return f"{name}\n  Cannot be given: {reason}."
    if reason := remark(name) or EXPERIMENT.get(name):
        return f"{name}\n  May be given and has no effect: {reason}."
    names = [e.name for e in experiment_entries()]
    near = closest(name)
    hint = did_you_mean(name, [*near, *names, *PASSED_ON])
    if not hint:
        some = nearest(name, [*names, *PASSED_ON, *registry()], least=0)
        hint = f"; the names that look most like it are {', '.join(some)}"
    raise ConfigError(Problem(key, f"unknown key{hint}"))


def _section(key: str) -> str:
    """What is in a section, given whole or by its last name; empty if it is none."""
    every = [entry.key for entry in experiment_entries()]
    every += [f"train.{argument.section}.{argument.name}" for argument in arguments().values()]
    for section in (key, f"experiment.{key}", f"train.{key}"):
        start = f"{section}."
        inside = [one.removeprefix(start) for one in every if one.startswith(start)]
        names = [one.partition(".")[0] for one in inside]
        if names:
            listed = textwrap.wrap(
                ", ".join(dict.fromkeys(names)),
                92,
                initial_indent="  ",
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
            return "\n".join([section, f"  a section; `explain {start}KEY` tells more:", *listed])
    return ""


def _text(entry: Entry) -> str:
    lines = [f"{entry.key}" + (f"  ({entry.flag})" if entry.flag else "")]
    lines += textwrap.wrap(entry.doc, 92, initial_indent="  ", subsequent_indent="  ")
    default = entry.default or "none"
    lines.append(f"  takes {entry.expects}; default: {default}")
    if entry.origin:
        lines.append(f"  {entry.origin}")
    return "\n".join(lines)


def alias_rows() -> Iterator[tuple[str, str]]:
    """Each alias with what it stands for."""
    for alias in sorted(aliases().values(), key=lambda a: a.name):
        if alias.rule == "same":
            yield alias.name, f"`{alias.target}`"
        elif alias.rule == "opposite":
            yield alias.name, f"the opposite of `{alias.target}`"
        elif alias.rule == "value":
            yield alias.name, f"`{alias.target}: {alias.value}`"
        else:
            yield alias.name, f"no effect: {alias.doc}"
