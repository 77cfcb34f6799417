"""Hydra overrides from the command line: what they set, and the leading ``++`` Hydra wants.

Hydra asks for ``+key=value`` when a YAML has not mentioned a key. For keys that the schema knows
this is a formality that launcher options (``follow=true``) and arguments
(``train.model.kv_channels=32``) should not need, so :func:`normalize` adds it. Unknown keys keep
Hydra's rule, so a mistyped one is still an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.config import schema
from flagscale.config.arguments.maps import NAME as BACKEND_OPTIONS
from flagscale.config.arguments.registry import lookup, registry
from flagscale.config.arguments.values import did_you_mean
from flagscale.config.documented import kinds
from flagscale.config.torchrun import PASSED_ON

TOP_LEVEL = ("experiment", "train", "action", "hydra")
SUBSECTIONS: dict[str, type] = {
    "task": schema.Task,
    "runner": schema.Runner,
    "runner.notify": schema.Notify,
    "runner.slurm": schema.Slurm,
    "runner.slurm.container": schema.Container,
    "cmds": schema.Commands,
}
"""Sections of ``experiment`` whose keys the schema lists."""

_OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[^=\s]+?)(?:=(?P<value>.*))?", re.DOTALL)
_QUOTED = re.compile(r"""(['"]).*\1""", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """One override's parts: ``mark`` is "", "+", "++" or "~"; ``value`` None without ``=``."""

    mark: str
    key: str
    value: str | None

    def __str__(self) -> str:
        return f"{self.mark}{self.key}" + ("" if self.value is None else f"={self.value}")


def parse(text: str) -> Override | None:
    """The parts of an override; None where Hydra has to judge the text itself."""
    found = _OVERRIDE.fullmatch(text)
    return Override(found["mark"] or "", found["key"], found["value"]) if found else None


def normalize(overrides: Iterable[str]) -> list[str]:
    """Overrides as Hydra wants them. Environment values and texts stay exactly as typed, commas
    included, which Hydra would otherwise take for a sweep."""
    return [_normalized(text) for text in overrides]


def set_keys(overrides: Sequence[str]) -> dict[str, str]:
    """The dotted keys that overrides set, each with the text of its value."""
    parsed = [found for text in overrides if (found := parse(text)) is not None]
    return {o.key: o.value for o in parsed if o.mark != "~" and o.value is not None}


def _normalized(text: str) -> str:
    override = parse(text)
    if override is None or override.value is None or override.mark == "~":
        return text
    mark = override.mark or ("++" if is_known(override.key) else "")
    value = _literal(override.value) if takes_text(override.key) else override.value
    return str(Override(mark, override.key, value))


def is_known(key: str) -> bool:
    """Whether a dotted key is one that the schema or the argument registry has."""
    head, _, rest = key.partition(".")
    if not rest:
        return key in schema.documented(schema.Options)
    leaf = key.rpartition(".")[2]
    if head in schema.SPECIFIC_SECTIONS:
        return rest.count(".") >= 1
    if head == "train":
        return _is_backend_option(rest) or (
            rest.count(".") >= 1 and lookup(leaf.replace("-", "_")) is not None
        )
    return head == "experiment" and _is_known_experiment_key(rest)


def _is_backend_option(rest: str) -> bool:
    """``system.comm.NAME``: which names there are is for the backend's adapter to say."""
    section, _, name = rest.partition(".")
    return section in schema.SECTIONS and name.startswith(f"{BACKEND_OPTIONS}.")


_FREE = ("envs.", "runner.slurm.extra.", "runner.slurm.device_type_specific.")
"""Sections of ``experiment`` in which a user chooses names."""


def _is_known_experiment_key(rest: str) -> bool:
    section, _, name = rest.rpartition(".")
    if f"{rest}.".startswith(_FREE) or rest in SUBSECTIONS:
        return True
    if not section:
        return name in schema.documented(schema.Experiment)
    found = SUBSECTIONS.get(section)
    if found is None:
        return False
    return name in schema.documented(found) or (section == "runner" and name in PASSED_ON)


def did_you_mean_key(key: str) -> str:
    """The end of a message about an unknown dotted key; empty when nothing comes close."""
    path = key.split(".")
    if path[0] == "train" and len(path) > 2:
        return did_you_mean(path[-1], registry())
    return did_you_mean(path[-1], _names_beside(path))


def _names_beside(path: list[str]) -> Iterable[str]:
    """What could stand in the place of a dotted key's last part."""
    if len(path) == 1:
        return [*TOP_LEVEL, *schema.SPECIFIC_SECTIONS, *schema.documented(schema.Options)]
    if path[0] == "train":
        return schema.SECTIONS
    if len(path) == 2:
        return [*schema.documented(schema.Experiment), *sections_of("")]
    section = ".".join(path[1:-1])
    found = SUBSECTIONS.get(section)
    passed_on = PASSED_ON if section == "runner" else ()
    return [*schema.documented(found), *sections_of(section), *passed_on] if found else []


def sections_of(section: str) -> list[str]:
    """The names of the sections in a section of ``experiment``, or in itself."""
    above = (known.rpartition(".") for known in (*SUBSECTIONS, "envs"))
    return [name for parent, _, name in above if parent == section]


_COMMAND = "experiment.task.command"
"""A list, or a text that is split into one."""


def takes_text(key: str) -> bool:
    """Whether the value of a dotted key is a text, whatever it looks like."""
    if (
        key == _COMMAND
        or key.startswith("experiment.envs.")
        or _is_backend_option(key.removeprefix("train."))
    ):
        return True
    if key.startswith("experiment."):
        section, _, name = key.removeprefix("experiment.").rpartition(".")
        kind = SUBSECTIONS.get(section) if section else schema.Experiment
        item = kinds(kind).get(name) if kind is not None else None
        return item is not None and item.base in (str, Path) and not item.many
    found = lookup(key.rpartition(".")[2]) if key.startswith("train.") else None
    return found is not None and found[0].kind == "str" and not found[0].many


def _literal(value: str) -> str:
    """A value quoted for Hydra, unless it is null, empty, quoted or a container already."""
    if value in ("", "null") or value[0] in "[{" or _QUOTED.fullmatch(value):
        return value
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}" + "\\" * trailing + "'"
