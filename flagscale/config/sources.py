"""Files that a configuration is composed of, and the file and line of each key.

Follows defaults lists as Hydra does, as far as needed to check every file before Hydra reads it and
to name file and line afterwards. Everything else is left to Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config.arguments.spec.registry import lookup
from flagscale.config.overrides import (
    argument_of,
    assigned_keys,
    parse_override,
    relocate_overrides,
)
from flagscale.config.yaml_file import YamlFile, parse_item_texts, read_yaml, short_path
from flagscale.errors import ConfigError, Problem

OVERRIDE = "override"
_GROUP = re.compile(r"(?:(?:optional|override)\s+)*(?P<group>[^@\s]+)(?:@(?P<package>\S+))?")


def find_place(places: Mapping[str, str], key: str) -> str | None:
    """Return the place of a key or of its contents, because an override of a section has no
    place."""
    within = (place for placed_key, place in places.items() if placed_key.startswith(f"{key}."))
    return places.get(key) or next(within, None)


@dataclass
class Sources:
    """Places and texts by dotted key of the composed configuration, from files read once."""

    file: Path
    """The YAML that the user named."""
    overrides: tuple[str, ...] = ()
    """Overrides, as the user typed them."""
    relocated: tuple[str, ...] = ()
    """Overrides with the keys that the files have for the same arguments."""
    places: dict[str, str] = field(default_factory=dict)
    """``file:line``, or ``override`` for a key set on the command line."""
    texts: dict[str, str] = field(default_factory=dict)
    """A scalar as it is written, quotes apart."""
    items: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The items of a list of scalars, likewise."""

    def place(self, key: str) -> str | None:
        """Return the place of a key, of its contents, or of the nearest section above it."""
        place = find_place(self.places, key) if key else None
        while place is None and key:
            key = key.rpartition(".")[0]
            place = self.places.get(key)
        return short_path(self.file) if place is None else place


def key_of_argument(sources: Sources, name: str) -> str | None:
    """Return the dotted key that gives an argument: the one of the files, else its usual one; None
    if there is no argument of this name."""
    argument = lookup(name)
    if argument is None:
        return None
    keys = (key for key in _argument_keys(sources) if argument_of(key) == argument_of(name))
    return next(keys, f"train.{argument[0].section}.{name}")


def trace_sources(config_file: Path, overrides: Sequence[str]) -> Sources:
    """Return the sources of a configuration.

    Overrides of arguments are relocated: one that names an argument by a short key, such as
    ``train.model.lr``, replaces the key that the files have for it.

    Raises:
        ConfigError: with the problems of all files.
    """
    walk = _DefaultsWalker(Sources(config_file, tuple(overrides)), _group_choices(overrides))
    walk.visit(config_file, "")
    if walk.problems:
        raise ConfigError(walk.problems)
    relocated = relocate_overrides(overrides, _argument_keys(walk.sources))
    walk.sources.relocated = tuple(relocated)
    for key, text in assigned_keys(relocated).items():
        if key not in walk.choices or not (config_file.parent / key.partition("@")[0]).is_dir():
            _forget_texts(walk.sources, key)
            walk.sources.places[key] = OVERRIDE
            walk.sources.texts[key] = text
            walk.sources.items[key] = parse_item_texts(text)
    return walk.sources


def _argument_keys(sources: Sources) -> list[str]:
    """Return the dotted keys of ``train`` that are no sections."""
    sections = {key.rpartition(".")[0] for key in sources.places}
    return [key for key in sources.places if key.startswith("train.") and key not in sections]


def _group_choices(overrides: Sequence[str]) -> dict[str, str]:
    """Return the possible choices of config groups in overrides, by group."""
    parsed = [override for text in overrides if (override := parse_override(text)) is not None]
    return {o.key.partition("@")[0]: o.value or "" for o in parsed if "." not in o.key}


def _forget_texts(sources: Sources, key: str) -> None:
    """An override of a section replaces or merges it: its places are no longer certain."""
    for place_key in [k for k in sources.places if k == key or k.startswith(f"{key}.")]:
        sources.texts.pop(place_key, None)
        sources.items.pop(place_key, None)


class _DefaultsWalker:
    """Visits files in the order in which they are composed, so that the last place wins."""

    def __init__(self, sources: Sources, choices: Mapping[str, str]) -> None:
        self.root = sources.file.parent
        self.choices = choices
        self.sources = sources
        self.problems: list[Problem] = []
        self._visited: set[Path] = set()

    def visit(self, path: Path, group: str, package: str | None = None) -> None:
        """Reads a file of a group and those its defaults list names."""
        if path in self._visited or not path.is_file():
            return
        self._visited.add(path)
        try:
            file = read_yaml(path)
        except ConfigError as error:
            self.problems += error.problems
            return
        prefix = self._prefix(file, group, package)
        entries = file.defaults
        if "_self_" not in entries:
            self._record(file, prefix)
        for entry in entries:
            if entry == "_self_":
                self._record(file, prefix)
            else:
                self._follow(entry, group)

    def _prefix(self, file: YamlFile, group: str, package: str | None) -> str:
        named = package or file.package
        if named is None or named == "_group_":
            named = group.replace("/", ".")
        named = "" if named == "_global_" else named
        return f"{named}." if named else ""

    def _record(self, file: YamlFile, prefix: str) -> None:
        name = short_path(file.path)
        for key, leaf in file.leaves.items():
            full = f"{prefix}{key}"
            self.sources.places[full] = f"{name}:{leaf.line}"
            self.sources.items[full] = leaf.items
            if leaf.text is None:
                self.sources.texts.pop(full, None)
            else:
                self.sources.texts[full] = leaf.text

    def _follow(self, entry: Any, group: str) -> None:
        if isinstance(entry, str):
            folder = entry.partition("@")[0].rpartition("/")[0]
            inner = folder if folder.startswith("/") else f"{group}/{folder}"
            self._visit_option(inner.strip("/"), entry.removeprefix(f"{folder}/"))
            return
        for name, option in entry.items() if isinstance(entry, dict) else ():
            match = _GROUP.fullmatch(name)
            if match is None or match["group"].startswith(("hydra/", "/hydra/")):
                continue
            inner = match["group"]
            absolute = inner.startswith("/") or not group
            inner = inner.lstrip("/") if absolute else f"{group}/{inner}"
            chosen = _chosen(self.choices.get(inner), option)
            for choice in chosen if isinstance(chosen, list) else [chosen]:
                if isinstance(choice, str):
                    self._visit_option(inner, choice, match["package"])

    def _visit_option(self, group: str, option: str, package: str | None = None) -> None:
        name, _, own_package = option.partition("@")
        path = self.root / group / f"{name.lstrip('/').removesuffix('.yaml')}.yaml"
        self.visit(path, group, package or own_package or None)


def _chosen(choice: str | None, option: Any) -> Any:
    if choice is None:
        return option
    return re.split(r"\s*,\s*", choice[1:-1]) if choice.startswith("[") else choice
