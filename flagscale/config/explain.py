"""Documentation of keys: the list of all keys of a YAML, and the text about one of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flagscale.config import schema
from flagscale.config.arguments.compat.flagscale_runner import UNUSED_RUNNER_KEYS
from flagscale.config.arguments.compat.names import (
    UNUSED_EXPERIMENT_KEYS,
    why_unsupported,
    why_unused,
)
from flagscale.config.arguments.compat.trainer_names import TRAINER_NAMES, replacement_of
from flagscale.config.arguments.compat.unused import describe_support
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.registry import (
    aliases,
    arguments,
    closest_names,
    lookup,
)
from flagscale.config.arguments.spec.values import (
    describe_expected,
    did_you_mean,
    to_word,
)
from flagscale.config.documented import key_types
from flagscale.config.key_search import SYNONYMS, SearchEntry, match_lines, search_keys
from flagscale.config.overrides import SUBSECTIONS
from flagscale.config.secrets import is_secret
from flagscale.config.sources import Sources, keys_in_files
from flagscale.config.torchrun import REFUSED_TORCHRUN_OPTIONS, TORCHRUN_OPTIONS
from flagscale.config.tuner_reader import SPACE_KEYS
from flagscale.config.yaml_file import short_path
from flagscale.errors import ConfigError, Problem

_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Path: "a path",
}
REQUIRED = "required"


@dataclass(frozen=True)
class KeyDocumentation:
    """Documentation of one key. ``default`` is empty if there is none; arguments have ``flag``."""

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
    """Return a default as a YAML would write it; empty for None."""
    if value is None or value == "":
        return ""
    if isinstance(value, Path):
        return value.relative_to(schema.PROJECT).as_posix()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(to_word(item) for item in value) + "]"
    return to_word(value)


def _schema_entries(kind: type, prefix: str) -> Iterator[KeyDocumentation]:
    for key, item in schema.documented_fields(kind).items():
        annotation, choices = key_types(kind)[key], item.metadata["choices"]
        expects = " or ".join([_TYPE_NAMES[annotation.base], *annotation.literals])
        if choices:
            expects = "one of " + ", ".join(choices)
        if annotation.is_list:
            expects = f"a list, each item {expects}"
        default = REQUIRED if item.default is MISSING else default_text(item.default)
        yield KeyDocumentation(
            f"{prefix}{key}", expects=expects, default=default, doc=item.metadata["doc"]
        )


def argument_entry(argument: Argument) -> KeyDocumentation:
    """Return the entry of an argument of the training program."""
    return KeyDocumentation(
        key=f"train.{argument.section}.{argument.name}",
        expects=describe_expected(argument),
        default=default_text(argument.default),
        doc=_append_sentence(argument.doc, describe_support(argument.name)),
        flag=argument.flag,
        origin=f"from {argument.origin}",
    )


def _append_sentence(doc: str, sentence: str) -> str:
    """Append a sentence, which may be empty, to a text."""
    if not sentence:
        return doc
    return f"{doc}{'' if doc.endswith(('.', '!', '?')) else '.'} {sentence}".lstrip(". ")


@lru_cache(maxsize=1)
def experiment_entries() -> tuple[KeyDocumentation, ...]:
    """Return every key that is not an argument, in the order of the documentation."""
    entries = [*_schema_entries(schema.Experiment, "experiment.")]
    for name, kind in SUBSECTIONS.items():
        entries += _schema_entries(kind, f"experiment.{name}.")
    entries += [
        KeyDocumentation(
            "experiment.runner.slurm.device_type_specific",
            expects="a section for each device type",
            default="",
            doc="Requests per device type, for one heterogeneous job with a component for each "
            "type: `nodes` (without a hostfile), `partition`, `gpus_per_node`, `mem`, "
            "`constraint`, `reservation`. Missing keys have the common value.",
        ),
        KeyDocumentation(
            "experiment.runner.slurm.extra",
            expects="a section of options",
            default="",
            doc="Other options of sbatch by their long names: `{licenses: matlab, hold: true}`. "
            "`true` is an option without a value. Options that the launcher sets itself are "
            "refused.",
        ),
        KeyDocumentation(
            "experiment.auto_tuner.space",
            expects="a section of lists",
            default="",
            doc="Values to which `action=auto_tune` restricts arguments: a list, or `auto` for all "
            "that the rules allow, which is the default. Keys: "
            f"{', '.join(f'`{name}`' for name in SPACE_KEYS)}.",
        ),
        KeyDocumentation(
            "experiment.envs",
            expects="variables and their values",
            default="",
            doc="Environment variables of every rank. Values are passed exactly as the YAML writes "
            "them: no shell expands `$NAME`. `${host:NAME}` stands for the host's own variable, "
            "regardless of this section: `PATH: /opt/x/bin:${host:PATH}`. An unset variable is "
            "empty; in a variable whose name ends in PATH, the adjacent `:` is removed as well. "
            "Write `\\${host:NAME}` for the literal text.",
        ),
        KeyDocumentation(
            "experiment.envs.device_type_specific",
            expects="a section of variables for each device type",
            default="",
            doc="Overrides `envs` on hosts with this `type=` in the hostfile. A type that the "
            "hostfile does not have is refused.",
        ),
        KeyDocumentation(
            "experiment.envs.node_specific",
            expects="a section of variables for each host",
            default="",
            doc="Overrides `envs` and `device_type_specific` on the host of this name. A name that "
            "the hostfile does not have is refused.",
        ),
    ]
    entries += [
        KeyDocumentation(
            "device_type_specific",
            expects="a section for each device type",
            default="",
            doc="Settings of the hosts with this `type=` in the hostfile: `build_dir`, `python`, "
            "`conda`, `cmds`, and arguments that may differ between hosts (listed in "
            "docs/reference/configuration/hosts.md; null removes one). Overrides `train`, "
            "`experiment.runner` and `experiment.cmds`. A type that the hostfile does not have is "
            "refused.",
        ),
        KeyDocumentation(
            "node_specific",
            expects="a section for each host",
            default="",
            doc="Settings of the host of this name, with the same keys. Overrides "
            "`device_type_specific`. A name that the hostfile does not have is refused; without a "
            "hostfile the only name is `localhost`.",
        ),
    ]
    return (*entries, *_schema_entries(schema.Options, ""))


def _find_entries(key: str) -> list[KeyDocumentation]:
    exact = [e for e in experiment_entries() if f".{e.key}".endswith(f".{key}")]
    if exact:
        return exact
    name = key.strip("-").rpartition(".")[2].replace("-", "_")
    match = lookup(name)
    if match is None:
        return []
    argument, alias = match
    if alias is None:
        return [argument_entry(argument)]
    entry = KeyDocumentation(
        key=f"train.{argument.section}.{name}",
        expects=describe_expected(argument),
        default="",
        doc=argument.doc,
        flag="--" + name.replace("_", "-"),
        origin=argument.origin.strip() if alias.target else "accepted, without effect",
    )
    return [entry] + ([argument_entry(arguments()[alias.target])] if alias.target else [])


def explain(key: str, sources: Sources | None = None) -> str:
    """Return the documentation of a key: dotted (``train.model.num_layers``), bare
    (``num_layers``), a flag, or a section. Other words are searched in names and descriptions.

    Args:
        key: The key, or words.
        sources: Sources of a YAML, whose places of the key are added.

    Raises:
        ConfigError: if nothing matches, with the names of which it may be a misspelling.
    """
    name = key.strip("-").rpartition(".")[2].replace("-", "_")
    if entries := _find_entries(key):
        return "\n\n".join(
            "\n".join([_entry_text(entry), *_place_lines(entry, sources)]) for entry in entries
        )
    section, other_name = _describe_section(key), _describe_other_name(name)
    if section and key in SYNONYMS:
        # Of a section such as `data` a person means some keys.
        section = f"{_describe_matches(key)}\n\n{section}"
    if text := section or other_name or _describe_matches(key):
        return text
    names = [e.name for e in experiment_entries()]
    hint = did_you_mean(name, [*closest_names(name), *names, *TORCHRUN_OPTIONS])
    raise ConfigError(
        Problem(
            key,
            f"unknown key{hint or ', and neither names nor descriptions of keys have these words'}",
        )
    )


def _place_lines(entry: KeyDocumentation, sources: Sources | None) -> Iterator[str]:
    """Yield a line for each place at which a YAML has a key, or one that says that it has none."""
    if sources is None:
        return
    keys = keys_in_files(sources, entry.key)
    for key in keys:
        text = sources.texts.get(key)
        value = f": {text}" if text is not None and not is_secret(entry.name, text) else ""
        yield f"  {sources.location(key)}: {key}{value}"
    if not keys:
        yield f"  {short_path(sources.file)} does not have it"


def _describe_other_name(name: str) -> str:
    """Return the text about a name that is not a key of this project; empty for unknown names."""
    if name in TORCHRUN_OPTIONS:
        return f"experiment.runner.{name}\n  An option of torchrun, passed to it unchanged."
    text = "" if name in REFUSED_TORCHRUN_OPTIONS else _describe_trainer_name(name)
    if text:
        return text
    reason = why_unsupported(name) or REFUSED_TORCHRUN_OPTIONS.get(name)
    if reason:
        return f"{name}\n  Cannot be given: {reason}."
    unused_keys = {**UNUSED_EXPERIMENT_KEYS, **UNUSED_RUNNER_KEYS}
    if reason := why_unused(name) or unused_keys.get(name):
        return f"{name}\n  Accepted, without effect: {reason}."
    return ""


def _describe_trainer_name(name: str) -> str:
    """Return the answer to a name of another trainer, and the entries of the keys that replace it;
    empty for other names.
    """
    trainer_name = TRAINER_NAMES.get(name)
    if trainer_name is None:
        return ""
    keys = (key for key in trainer_name.keys if not key.endswith(f".{name}"))
    entries = [entry for key in keys for entry in _find_entries(key)]
    texts = [f"{name}\n  {replacement_of(name)}", *map(_entry_text, entries)]
    return "\n\n".join(texts)


def _describe_matches(query: str) -> str:
    """Return the keys that match the words of a query, a line each; empty if there are none."""
    matches = search_keys(query, _search_entries())
    if not matches:
        return ""
    return "\n".join([f"no key is called {query!r}; keys that match:", *match_lines(matches)])


@lru_cache(maxsize=1)
def _search_entries() -> tuple[SearchEntry, ...]:
    entries = [SearchEntry(entry.key, entry.doc) for entry in experiment_entries()]
    for argument in arguments().values():
        support = describe_support(argument.name)
        entry = argument_entry(argument)
        is_supported = not support.startswith(("Not supported", "Accepted without effect"))
        entries.append(SearchEntry(entry.key, entry.doc, is_supported))
    return tuple(entries)


def _describe_section(key: str) -> str:
    """Return the names of a section's keys, for a dotted section or its last name; empty if there
    is no such section.
    """
    all_keys = [entry.key for entry in experiment_entries()]
    all_keys += [f"train.{argument.section}.{argument.name}" for argument in arguments().values()]
    for section in (key, f"experiment.{key}", f"train.{key}"):
        prefix = f"{section}."
        remainders = [name.removeprefix(prefix) for name in all_keys if name.startswith(prefix)]
        names = [name.partition(".")[0] for name in remainders]
        if names:
            name_lines = textwrap.wrap(
                ", ".join(dict.fromkeys(names)),
                92,
                initial_indent="  ",
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
            return "\n".join(
                [section, f"  a section; `explain {prefix}KEY` describes one key:", *name_lines]
            )
    return ""


def _entry_text(entry: KeyDocumentation) -> str:
    lines = [f"{entry.key}" + (f"  ({entry.flag})" if entry.flag else "")]
    lines += textwrap.wrap(entry.doc, 92, initial_indent="  ", subsequent_indent="  ")
    default = entry.default or "none"
    lines.append(f"  takes {entry.expects}; default: {default}")
    if entry.origin:
        lines.append(f"  {entry.origin}")
    return "\n".join(lines)


def alias_rows() -> Iterator[tuple[str, str]]:
    """Yield each alias with its meaning."""
    for alias in sorted(aliases().values(), key=lambda a: a.name):
        if alias.rule == "same":
            yield alias.name, f"`{alias.target}`"
        elif alias.rule == "opposite":
            yield alias.name, f"the opposite of `{alias.target}`"
        elif alias.rule == "value":
            yield alias.name, f"`{alias.target}: {alias.value}`"
        else:
            yield alias.name, f"no effect: {alias.doc}"
