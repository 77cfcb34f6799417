"""Which files a configuration is composed of, and where in them each key stands.

Follows defaults lists as Hydra does, as far as needed to check every file before Hydra reads it
and to name file and line afterwards. What it does not understand it leaves to Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config.overrides import parse, set_keys
from flagscale.config.yaml_file import YamlFile, items_of, read, short
from flagscale.errors import ConfigError, Problem

OVERRIDE = "override"

_GROUP = re.compile(r"(?:(?:optional|override)\s+)*(?P<group>[^@\s]+)(?:@(?P<package>\S+))?")


def place_of(places: Mapping[str, str], key: str) -> str | None:
    """Where a key stands, or else what is in it: an override names no section."""
    within = (place for known, place in places.items() if known.startswith(f"{key}."))
    return places.get(key) or next(within, None)


@dataclass
class Sources:
    """Places and texts by dotted key of the composed configuration, from files read once."""

    file: Path
    """The YAML that the user named."""
    overrides: tuple[str, ...] = ()
    """As the user typed them."""
    places: dict[str, str] = field(default_factory=dict)
    """``file:line``, or ``override`` for a key set on the command line."""
    texts: dict[str, str] = field(default_factory=dict)
    """A scalar as it is written, quotes apart."""
    items: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The items of a list of scalars, likewise."""

    def place(self, key: str) -> str | None:
        """Where a key stands, or what is in it, or else the nearest section above it."""
        place = place_of(self.places, key) if key else None
        while place is None and key:
            key = key.rpartition(".")[0]
            place = self.places.get(key)
        return short(self.file) if place is None else place


def trace(config_file: Path, overrides: Sequence[str]) -> Sources:
    """The sources of a configuration. Raises ConfigError with the problems of all files."""
    walk = _Walk(Sources(config_file, tuple(overrides)), _choices(overrides))
    walk.visit(config_file, "")
    if walk.problems:
        raise ConfigError(walk.problems)
    for key, text in set_keys(overrides).items():
        if key not in walk.choices or not (config_file.parent / key.partition("@")[0]).is_dir():
            _forget(walk.sources, key)
            walk.sources.places[key] = OVERRIDE
            walk.sources.texts[key] = text
            walk.sources.items[key] = items_of(text)
    return walk.sources


def _choices(overrides: Sequence[str]) -> dict[str, str]:
    """What overrides choose or might choose for config groups, by group."""
    parsed = [found for text in overrides if (found := parse(text)) is not None]
    return {o.key.partition("@")[0]: o.value or "" for o in parsed if "." not in o.key}


def _forget(sources: Sources, key: str) -> None:
    """An override of a section replaces or merges it: its places are no longer certain."""
    for known in [k for k in sources.places if k == key or k.startswith(f"{key}.")]:
        sources.texts.pop(known, None)
        sources.items.pop(known, None)


class _Walk:
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
            file = read(path)
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
        name = short(file.path)
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
            found = _GROUP.fullmatch(name)
            if found is None or found["group"].startswith(("hydra/", "/hydra/")):
                continue
            inner = found["group"]
            absolute = inner.startswith("/") or not group
            inner = inner.lstrip("/") if absolute else f"{group}/{inner}"
            chosen = _chosen(self.choices.get(inner), option)
            for one in chosen if isinstance(chosen, list) else [chosen]:
                if isinstance(one, str):
                    self._visit_option(inner, one, found["package"])

    def _visit_option(self, group: str, option: str, package: str | None = None) -> None:
        name, _, own_package = option.partition("@")
        path = self.root / group / f"{name.lstrip('/').removesuffix('.yaml')}.yaml"
        self.visit(path, group, package or own_package or None)


def _chosen(choice: str | None, option: Any) -> Any:
    if choice is None:
        return option
    return re.split(r"\s*,\s*", choice[1:-1]) if choice.startswith("[") else choice
