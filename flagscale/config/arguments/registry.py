"""Every argument that a train YAML may give, by name. Reading it needs no torch.

Three sources: megatron.core's config dataclasses (a generated list), this project's training
arguments (which win over the core's of equal name) and the aliases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flagscale.config.arguments.aliases import ALIASES, Alias
from flagscale.config.arguments.bounds import BOUNDS, CHOICES
from flagscale.config.arguments.spec import Argument, declared
from flagscale.config.arguments.training import TRAINING_GROUPS
from flagscale.config.arguments.values import nearest

_CORE_LIST = Path(__file__).with_name("generated") / "megatron_core.json"


@lru_cache(maxsize=1)
def _core() -> list[dict[str, Any]]:
    with _CORE_LIST.open("rb") as file:
        found: list[dict[str, Any]] = json.load(file)["arguments"]
    return found


def _core_argument(record: Mapping[str, Any]) -> Argument:
    choices = CHOICES.get(record["name"], record["choices"])
    minimum, maximum = BOUNDS.get(record["name"], (None, None))
    return Argument(
        name=record["name"],
        kind=record["kind"],
        doc=record["doc"],
        default=record["default"],
        section=record["section"],
        many=record["many"],
        choices=None if choices is None else tuple(choices),
        minimum=minimum,
        maximum=maximum,
        origin=f"megatron.core {record['class']}",
    )


@lru_cache(maxsize=1)
def arguments() -> Mapping[str, Argument]:
    """The arguments that the training program has, by name: no aliases."""
    found = {record["name"]: _core_argument(record) for record in _core()}
    for group, section in TRAINING_GROUPS:
        found.update((argument.name, argument) for argument in declared(group, section))
    return MappingProxyType(found)


@lru_cache(maxsize=1)
def aliases() -> Mapping[str, Alias]:
    """The aliases by name. A name that the training program has itself is no alias."""
    return MappingProxyType({a.name: a for a in ALIASES if a.name not in arguments()})


def _alias_argument(alias: Alias) -> Argument:
    if alias.rule == "same":
        target = arguments()[alias.target]
        return Argument(**{**vars(target), "name": alias.name, "origin": f"alias of {target.name}"})
    doc = alias.doc or {
        "opposite": f"The opposite of `{alias.target}`",
        "value": f"`{alias.target}: {alias.value}`",
    }.get(alias.rule, "")
    section = arguments()[alias.target].section if alias.target else "model"
    return Argument(alias.name, "bool", doc, False, section, origin=f"alias of {alias.target}")


@lru_cache(maxsize=1)
def registry() -> Mapping[str, Argument]:
    """Arguments and aliases by name, snake case. An alias's ``origin`` says what it stands for."""
    found = dict(arguments())
    found.update((alias.name, _alias_argument(alias)) for alias in aliases().values())
    return MappingProxyType(found)


@lru_cache(maxsize=1)
def one_or_many() -> frozenset[str]:
    """Arguments that take one value or a list, which mean different things: a single value of
    theirs stays a single value."""
    return frozenset(record["name"] for record in _core() if record["single"])


def lookup(name: str) -> tuple[Argument, Alias | None] | None:
    """What a name in snake case stands for: its argument and, where it is one, the alias.

    ``no_x`` of a boolean ``x`` is its opposite.
    """
    if name in registry():
        return registry()[name], aliases().get(name)
    positive = registry().get(name[3:]) if name.startswith("no_") else None
    if positive is None or positive.kind != "bool" or positive.name in aliases():
        return None
    alias = Alias(name, positive.name, "opposite")
    return _alias_argument(alias), alias


def closest(name: str) -> list[str]:
    """The names that look most like ``name``, best first; empty when nothing comes close."""
    return nearest(name.strip("-").replace("-", "_"), registry())
