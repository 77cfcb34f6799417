"""Files that a configuration is composed of, and the file and line of each key.

Follows defaults lists as Hydra does, as far as needed to check every file before Hydra reads it and
to name file and line afterwards. Everything else is left to Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config.overrides import (
    argument_of,
    assigned_keys,
    parse_override,
    relocate_overrides,
    usual_key,
)
from flagscale.config.yaml_file import YamlFile, parse_item_texts, read_yaml, short_path
from flagscale.errors import ConfigError, Problem

OVERRIDE = "override"
_GROUP = re.compile(r"(?:(?:optional|override)\s+)*(?P<group>[^@\s]+)(?:@(?P<package>\S+))?")


def find_location(locations: Mapping[str, str], key: str) -> str | None:
    """Return the source location of a key or of the first key below it, because an override of a
    whole section has none itself.
    """
    inner_locations = (
        location for located_key, location in locations.items() if located_key.startswith(f"{key}.")
    )
    return locations.get(key) or next(inner_locations, None)


@dataclass
class Sources:
    """Origin of a composed configuration: the YAML, the overrides, and, by dotted key, the source
    location (``file:line``) and text of each value."""

    file: Path
    """The YAML that the user named."""
    overrides: tuple[str, ...] = ()
    """Overrides, as the user typed them."""
    relocated: tuple[str, ...] = ()
    """Overrides with the keys that the files have for the same arguments."""
    locations: dict[str, str] = field(default_factory=dict)
    """Source location of each key: ``file:line``, or ``override`` for a key set on the command
    line.
    """
    texts: dict[str, str] = field(default_factory=dict)
    """Text of each scalar as the file has it, without quotes."""
    items: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Texts of the items of each list of scalars, likewise."""
    anchored: set[str] = field(default_factory=set)
    """Keys that hold an anchor which an alias uses, and the sections that contain them."""

    def without(self, sections: Collection[str]) -> Sources:
        """Return the sources of all keys outside these top-level sections."""

        def is_outside(key: str) -> bool:
            return key.partition(".")[0] not in sections

        return Sources(
            self.file,
            locations={k: location for k, location in self.locations.items() if is_outside(k)},
            texts={key: text for key, text in self.texts.items() if is_outside(key)},
            items={key: items for key, items in self.items.items() if is_outside(key)},
            anchored={key for key in self.anchored if is_outside(key)},
        )

    def location(self, key: str) -> str | None:
        """Return the source location of a key, of a key below it, or of the nearest section above
        it.
        """
        location = find_location(self.locations, key) if key else None
        while location is None and key:
            key = key.rpartition(".")[0]
            location = self.locations.get(key)
        return short_path(self.file) if location is None else location


def keys_in_files(sources: Sources, key: str) -> list[str]:
    """Return the dotted keys by which the files give a key: an argument in any section and by any
    of its names, any other key as it is.
    """
    if not key.startswith("train."):
        return [key] if find_location(sources.locations, key) else []
    return [
        leaf
        for leaf in _leaf_keys(sources)
        if leaf.startswith("train.") and argument_of(leaf) == argument_of(key)
    ]


def key_of_argument(sources: Sources, name: str) -> str | None:
    """Return the dotted key that gives an argument: the one of the files, else its usual one; None
    if there is no argument of this name."""
    key = usual_key(name)
    return None if key is None else next(iter(keys_in_files(sources, key)), key)


def trace_sources(config_file: Path, overrides: Sequence[str]) -> Sources:
    """Return the sources of a configuration.

    Overrides are relocated: one with a short key, such as ``lr`` or ``train.model.lr``, replaces
    the key that the files have for it.

    Raises:
        ConfigError: with the problems of all files.
    """
    walker = _DefaultsWalker(Sources(config_file, tuple(overrides)), _group_choices(overrides))
    walker.visit(config_file, "")
    if walker.problems:
        raise ConfigError(walker.problems)
    groups = {name for name in walker.choices if (config_file.parent / name).is_dir()}
    typed_values = assigned_keys(relocate_overrides(overrides, (), with_arguments=False))
    settings = {**walker.sources.texts, **typed_values}
    relocated = relocate_overrides(
        overrides,
        _leaf_keys(walker.sources),
        groups | walker.groups,
        with_arguments=settings.get("experiment.task.type") != "command",
        with_slurm=settings.get("experiment.runner.type") == "slurm",
    )
    walker.sources.relocated = tuple(relocated)
    for key, text in assigned_keys(relocated).items():
        if key.partition("@")[0] not in groups:
            _forget_texts(walker.sources, key)
            walker.sources.locations[key] = OVERRIDE
            walker.sources.texts[key] = text
            walker.sources.items[key] = parse_item_texts(text)
    return walker.sources


def _leaf_keys(sources: Sources) -> list[str]:
    """Return the dotted keys of all files that are no sections."""
    sections = {key.rpartition(".")[0] for key in sources.locations}
    return [key for key in sources.locations if key not in sections]


def _group_choices(overrides: Sequence[str]) -> dict[str, str]:
    """Return the possible choices of config groups in overrides, by group."""
    parsed = [override for text in overrides if (override := parse_override(text)) is not None]
    return {o.key.partition("@")[0]: o.value or "" for o in parsed if "." not in o.key}


def _forget_texts(sources: Sources, key: str) -> None:
    """Remove the texts of a key and of everything below it: an override of a section replaces or
    merges them.
    """
    for inner_key in [k for k in sources.locations if k == key or k.startswith(f"{key}.")]:
        sources.texts.pop(inner_key, None)
        sources.items.pop(inner_key, None)


class _DefaultsWalker:
    """Visits files in the order in which Hydra composes them, so that later values replace earlier
    ones.
    """

    def __init__(self, sources: Sources, choices: Mapping[str, str]) -> None:
        self.root = sources.file.parent
        self.choices = choices
        self.sources = sources
        self.problems: list[Problem] = []
        self.groups: set[str] = set()
        """Config groups of all defaults lists; their files may be on Hydra's search path."""
        self._visited: set[Path] = set()

    def visit(self, path: Path, group: str, package: str | None = None) -> None:
        """Read a file of a config group, and the files that its defaults list names."""
        if path in self._visited or not path.is_file():
            return
        self._visited.add(path)
        try:
            file = read_yaml(path)
        except ConfigError as error:
            self.problems += error.problems
            return
        prefix = self._key_prefix(file, group, package)
        entries = file.defaults
        if "_self_" not in entries:
            self._record_locations(file, prefix)
        for entry in entries:
            if entry == "_self_":
                self._record_locations(file, prefix)
            else:
                self._follow(entry, group)

    def _key_prefix(self, file: YamlFile, group: str, package: str | None) -> str:
        key_package = package or file.package
        if key_package is None or key_package == "_group_":
            key_package = group.replace("/", ".")
        key_package = "" if key_package == "_global_" else key_package
        return f"{key_package}." if key_package else ""

    def _record_locations(self, file: YamlFile, prefix: str) -> None:
        name = short_path(file.path)
        self.sources.anchored.update(f"{prefix}{key}" for key in file.anchored_keys)
        for key, leaf in file.leaves.items():
            full_key = f"{prefix}{key}"
            self.sources.locations[full_key] = f"{name}:{leaf.line}"
            self.sources.items[full_key] = leaf.items
            if leaf.text is None:
                self.sources.texts.pop(full_key, None)
            else:
                self.sources.texts[full_key] = leaf.text

    def _follow(self, entry: Any, group: str) -> None:
        if isinstance(entry, str):
            folder = entry.partition("@")[0].rpartition("/")[0]
            entry_group = folder if folder.startswith("/") else f"{group}/{folder}"
            self._visit_option(entry_group.strip("/"), entry.removeprefix(f"{folder}/"))
            return
        for name, option in entry.items() if isinstance(entry, dict) else ():
            match = _GROUP.fullmatch(name)
            if match is None or match["group"].startswith(("hydra/", "/hydra/")):
                continue
            entry_group = match["group"]
            absolute = entry_group.startswith("/") or not group
            entry_group = entry_group.lstrip("/") if absolute else f"{group}/{entry_group}"
            self.groups.add(entry_group)
            selected = _selected_options(self.choices.get(entry_group), option)
            for choice in selected if isinstance(selected, list) else [selected]:
                if isinstance(choice, str):
                    self._visit_option(entry_group, choice, match["package"])

    def _visit_option(self, group: str, option: str, package: str | None = None) -> None:
        name, _, own_package = option.partition("@")
        path = self.root / group / f"{name.lstrip('/').removesuffix('.yaml')}.yaml"
        self.visit(path, group, package or own_package or None)


def _selected_options(choice: str | None, option: Any) -> Any:
    if choice is None:
        return option
    return re.split(r"\s*,\s*", choice[1:-1]) if choice.startswith("[") else choice
