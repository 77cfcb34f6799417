"""Hydra overrides of the command line: the keys they set, and the leading ``++`` that Hydra
requires.

Hydra requires ``+key=value`` for a key that the YAML does not mention. For keys that the schema
has, launcher options (``follow=true``) and arguments (``train.model.kv_channels=32``) should not
need it, so :func:`normalize_overrides` adds it. Unknown keys keep Hydra's rule, so a mistyped one
is an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.config import schema
from flagscale.config.arguments.spec.argument import SettingContext
from flagscale.config.arguments.spec.registry import canonical_name, lookup, registry
from flagscale.config.arguments.spec.system_arguments import COMM as BACKEND_OPTIONS
from flagscale.config.arguments.spec.values import did_you_mean, to_word
from flagscale.config.documented import key_types
from flagscale.config.torchrun import TORCHRUN_OPTIONS
from flagscale.config.tuner_schema import TUNER_SECTIONS

TOP_LEVEL = ("experiment", "train", "action", "hydra")
SUBSECTIONS: dict[str, type] = {
    "task": schema.Task,
    "runner": schema.Runner,
    "runner.notify": schema.Notify,
    "runner.slurm": schema.Slurm,
    "runner.slurm.container": schema.Container,
    "cmds": schema.Commands,
    "auto_tuner": schema.Tuner,
    **{f"auto_tuner.{name}": fields for name, fields in TUNER_SECTIONS.items()},
}
"""Sections of ``experiment`` whose keys the schema lists."""
_OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[^=\s]+?)(?:=(?P<value>.*))?", re.DOTALL)
_QUOTED = re.compile(r"""(['"]).*\1""", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """An override, parsed: ``mark`` is "", "+", "++" or "~"; ``value`` is None without ``=``."""

    mark: str
    key: str
    value: str | None

    def __str__(self) -> str:
        return f"{self.mark}{self.key}" + ("" if self.value is None else f"={self.value}")


def parse_override(text: str) -> Override | None:
    """Parse an override; None if the text has no such form, which Hydra then reports."""
    match = _OVERRIDE.fullmatch(text)
    return Override(match["mark"] or "", match["key"], match["value"]) if match else None


def normalize_overrides(overrides: Iterable[str]) -> list[str]:
    """Return overrides with the marks and quotes that Hydra requires.

    Keys that the schema has get ``++``. Values of environment variables and of text keys are
    quoted, so that they stay exactly as typed; Hydra would take a comma for a sweep.
    """
    return [_normalize(text) for text in overrides]


def relocate_overrides(
    overrides: Iterable[str],
    keys: Iterable[str],
    groups: Collection[str] = (),
    *,
    with_arguments: bool = True,
    with_slurm: bool = True,
) -> list[str]:
    """Return overrides with the keys that a YAML has for them.

    A short name stands for its key: ``nnodes=2`` for ``experiment.runner.nnodes=2``, and ``lr=1``
    for ``train.model.lr=1``. Section names have no meaning for an argument, so any of its keys
    replaces the one of the YAML, such as ``train.model.optimizer.lr_scheduler.lr``; if the YAML has
    it in several sections, it is replaced in all of them. Overrides of keys that the YAML has as
    they are, and of unknown names, stay unchanged.

    Args:
        overrides: Overrides, as the user typed them.
        keys: Dotted keys of the YAML, without those of sections.
        groups: Names of config groups, which are no short names.
        with_arguments: Whether short names may stand for arguments of the training program.
        with_slurm: Whether they may stand for keys of Slurm, such as ``nodes``.
    """
    names = _KeyNames(list(keys), groups, with_arguments, with_slurm)
    return [relocated for text in overrides for relocated in _relocate(text, names)]


_SLURM = "experiment.runner.slurm"


class _KeyNames:
    """Names that stand for the keys of a YAML, or for keys that it could have."""

    def __init__(
        self,
        keys: Sequence[str],
        groups: Collection[str],
        with_arguments: bool,
        with_slurm: bool,
    ) -> None:
        self.keys = frozenset(keys)
        self.sections = frozenset(section for key in keys for section in _sections_of(key))
        self.keys_by_argument: dict[str, list[str]] = {}
        for key in keys:
            if key.startswith("train."):
                self.keys_by_argument.setdefault(argument_of(key), []).append(key)
        self._groups = groups
        self._with_arguments = with_arguments
        self._with_slurm = with_slurm

    def full_key(self, key: str) -> str:
        """Return the dotted key that a name stands for; the name itself if it is one already."""
        head = key.partition(".")[0]
        if self._is_top_level(head) or key.partition("@")[0] in self._groups:
            return key
        experiment_key = None if head == "train" else find_experiment_key(key)
        if experiment_key == f"{_SLURM}.{key}" and not self._with_slurm:
            experiment_key = None
        argument_key = self._argument_key(key) if self._with_arguments else None
        return experiment_key or argument_key or key

    def _is_top_level(self, head: str) -> bool:
        if head == "train":
            return False
        option_names = schema.documented_fields(schema.Options)
        known_names = (*TOP_LEVEL, *schema.SPECIFIC_SECTIONS, *option_names)
        return head in known_names or head in self.keys or head in self.sections

    def _argument_key(self, key: str) -> str | None:
        """Return the dotted key of an argument that is named alone, with a section of ``train``,
        or with sections in which the YAML has it; None for other names.
        """
        key = key.removeprefix("train.")
        *sections, name = key.split(".")
        usual = usual_key(name)
        if sections and sections[0] in schema.SECTIONS:
            return f"train.{key}" if usual or _is_backend_option(key) else None
        known_keys = self.keys_by_argument.get(argument_of(name), ())
        is_known = not sections or any(
            set(sections) < set(known.split(".")) for known in known_keys
        )
        return usual if is_known else None


def _sections_of(key: str) -> Iterator[str]:
    while key := key.rpartition(".")[0]:
        yield key


def _relocate(text: str, names: _KeyNames) -> list[str]:
    override = parse_override(text)
    if override is None or override.mark == "+" or override.key in names.keys:
        return [text]
    keys = [names.full_key(override.key)]
    names_a_place = "." in override.key and keys[0] in names.keys
    if keys[0].count(".") >= 2 and keys[0].startswith("train.") and not names_a_place:
        keys = _keys_of_argument(keys[0], override.value or "null", names)
    if keys == [override.key]:
        return [text]
    return [str(Override(override.mark, key, override.value)) for key in keys]


def _keys_of_argument(key: str, value: str, names: _KeyNames) -> list[str]:
    """Return the keys of a YAML that set the same argument as ``key``; if there are none, a key
    that replaces no section.
    """
    if _is_backend_option(key.removeprefix("train.")):
        return [key]
    name = key.rpartition(".")[2]
    if yaml_keys := names.keys_by_argument.get(argument_of(key)):
        return yaml_keys
    # `optimizer` is an argument, and the usual name of a section.
    is_section = key in names.sections and not value.startswith(("{", "null"))
    return [f"{key}.{name}"] if is_section and usual_key(name) else [key]


def find_experiment_key(key: str) -> str | None:
    """Return the dotted key of ``experiment`` that a key without its first sections stands for,
    such as ``runner.nnodes`` or ``envs.NCCL_DEBUG``; None if there is none, or more than one.
    """
    full_key = f"experiment.{key}"
    return full_key if "." in key and is_known_key(full_key) else complete_key(key)


def argument_of(key: str) -> str:
    """Return the name of the argument that a dotted key sets: the canonical name, if an alias takes
    the same value.
    """
    name = key.rpartition(".")[2].replace("-", "_")
    return canonical_name(name) or name


def assigned_keys(overrides: Sequence[str]) -> dict[str, str]:
    """Return the dotted keys that overrides set, each with the text of its value."""
    parsed = [override for text in overrides if (override := parse_override(text)) is not None]
    return {o.key: o.value for o in parsed if o.mark != "~" and o.value is not None}


def _normalize(text: str) -> str:
    override = parse_override(text)
    if override is None or override.value is None or override.mark == "~":
        return text
    mark = override.mark or ("++" if is_known_key(override.key) else "")
    value = _quote_for_hydra(override.value) if is_text_key(override.key) else override.value
    return str(Override(mark, override.key, value))


def is_known_key(key: str) -> bool:
    """Return True if a dotted key is in the schema or the argument registry."""
    head, _, tail = key.partition(".")
    if not tail:
        return key in schema.documented_fields(schema.Options)
    leaf = key.rpartition(".")[2]
    if head in schema.SPECIFIC_SECTIONS:
        return tail.count(".") >= 1
    if head == "train":
        return _is_backend_option(tail) or (
            tail.count(".") >= 1 and lookup(leaf.replace("-", "_")) is not None
        )
    return head == "experiment" and _is_known_experiment_key(tail)


def _is_backend_option(key: str) -> bool:
    """Return True if a key is ``system.comm.NAME``. The backend's adapter checks the name."""
    section, _, name = key.partition(".")
    return section in schema.SECTIONS and name.startswith(f"{BACKEND_OPTIONS}.")


_FREE_FORM_SECTIONS = (
    "envs.",
    "runner.slurm.extra.",
    "runner.slurm.device_type_specific.",
    "auto_tuner.space.",
)
"""Sections of ``experiment`` in which a user chooses names, or that have names of arguments."""


def _is_known_experiment_key(key: str) -> bool:
    section, _, name = key.rpartition(".")
    if f"{key}.".startswith(_FREE_FORM_SECTIONS) or key in SUBSECTIONS:
        return True
    if not section:
        return name in schema.documented_fields(schema.Experiment)
    fields = SUBSECTIONS.get(section)
    if fields is None:
        return False
    return name in schema.documented_fields(fields) or (
        section == "runner" and name in TORCHRUN_OPTIONS
    )


def replacement_of_key(key: str, value: Any, *, is_override: bool) -> str:
    """Return the answer to a key of another trainer in a section that is not for arguments; empty
    if the name is not listed or no key replaces it, because users may have such keys of their own.
    """
    from flagscale.config.arguments.compat.trainer_names import TRAINER_NAMES, replacement_of

    entry = TRAINER_NAMES.get(key.rpartition(".")[2].replace("-", "_"))
    if entry is None or not entry.keys:
        return ""
    return replacement_of(entry.name, value, SettingContext(is_override=is_override))


def usual_key(name: str) -> str | None:
    """Return the dotted key of an argument, or of its alias, in its usual section; None for other
    names."""
    match = lookup(name.replace("-", "_"))
    return f"train.{match[0].section}.{name.replace('-', '_')}" if match else None


def complete_key(key: str) -> str | None:
    """Return the dotted key of ``experiment`` that ends in ``key``, such as ``runner.nnodes``; None
    if there is none, or more than one.
    """
    names = experiment_keys_ending_in(key)
    return names[0] if len(names) == 1 else None


def experiment_keys_ending_in(key: str) -> list[str]:
    """Return the dotted keys of ``experiment`` whose last parts are ``key``."""
    return [name for name in _experiment_keys() if f".{name}".endswith(f".{key}")]


_WITHOUT_SHORT_NAMES = "auto_tuner."
"""Sections whose keys have names of arguments: a short name is the argument."""


def _experiment_keys() -> Iterator[str]:
    yield from (f"experiment.{name}" for name in schema.documented_fields(schema.Experiment))
    for section, fields in SUBSECTIONS.items():
        if section.startswith(_WITHOUT_SHORT_NAMES):
            continue
        yield f"experiment.{section}"
        yield from (f"experiment.{section}.{name}" for name in schema.documented_fields(fields))


def did_you_mean_key(key: str) -> str:
    """Return a suggestion to append to a message about an unknown dotted key; empty if no name is
    close.
    """
    path = key.split(".")
    if path[0] == "train" and len(path) > 2:
        return did_you_mean(path[-1], registry())
    return did_you_mean(path[-1], _sibling_names(path))


def did_you_mean_short_name(name: str) -> str:
    """Return a suggestion for an unknown override without sections: the keys that end in it, or the
    nearest name; empty if no name is close.
    """
    from flagscale.config.key_search import keys_meant_by

    if keys := experiment_keys_ending_in(name):
        return f"; did you mean {' or '.join(map(repr, keys))}?"
    names = (key.rpartition(".")[2] for key in _experiment_keys())
    candidates = dict.fromkeys([*_sibling_names([name]), *registry(), *names])
    meant_names = [key.rpartition(".")[2] for key in keys_meant_by(name)]
    suggestion = did_you_mean(name, candidates)
    if suggestion or not meant_names:
        return suggestion
    return f"; did you mean {' or '.join(map(repr, meant_names[:2]))}?"


def _sibling_names(path: list[str]) -> Iterable[str]:
    """Return the names that are valid as the last part of a dotted key."""
    if len(path) == 1:
        return [*TOP_LEVEL, *schema.SPECIFIC_SECTIONS, *schema.documented_fields(schema.Options)]
    if path[0] == "train":
        return schema.SECTIONS
    if len(path) == 2:
        return [*schema.documented_fields(schema.Experiment), *subsections_of("")]
    section = ".".join(path[1:-1])
    fields = SUBSECTIONS.get(section)
    passed_on = TORCHRUN_OPTIONS if section == "runner" else ()
    return (
        [*schema.documented_fields(fields), *subsections_of(section), *passed_on] if fields else []
    )


def subsections_of(section: str) -> list[str]:
    """Return the names of the sections in a section of ``experiment``; an empty ``section`` is
    ``experiment`` itself.
    """
    section_paths = (section_name.rpartition(".") for section_name in (*SUBSECTIONS, "envs"))
    return [name for parent, _, name in section_paths if parent == section]


_COMMAND = "experiment.task.command"
"""A list, or a text that is split into one."""


def is_text_key(key: str) -> bool:
    """Return True if the value of a dotted key is always text."""
    if (
        key == _COMMAND
        or key.startswith("experiment.envs.")
        or _is_backend_option(key.removeprefix("train."))
    ):
        return True
    if key.startswith("experiment."):
        section, _, name = key.removeprefix("experiment.").rpartition(".")
        kind = SUBSECTIONS.get(section) if section else schema.Experiment
        item = key_types(kind).get(name) if kind is not None else None
        return item is not None and item.base in (str, Path) and not item.is_list
    if "." not in key and (option := key_types(schema.Options).get(key)):
        return option.base is str
    argument = lookup(key.rpartition(".")[2]) if key.startswith("train.") else None
    return argument is not None and argument[0].kind == "str" and not argument[0].many


def _quote_for_hydra(value: str) -> str:
    """Quote a value for Hydra, unless it is null, empty, quoted or a container already."""
    if value in ("", "null") or value[0] in "[{" or _QUOTED.fullmatch(value):
        return value
    return _quote(value)


def option_override(name: str, value: Any) -> str:
    """Return the override of an option's value, whose text is never Hydra's syntax."""
    word = to_word(value)
    return f"{name}={_quote(word) if isinstance(value, str) and is_text_key(name) else word}"


def _quote(value: str) -> str:
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}" + "\\" * trailing + "'"
