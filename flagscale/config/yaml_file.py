"""Reading a YAML file for the information that composing loses: lines, texts and syntax errors.

Hydra and OmegaConf read the values. This module parses the same file first, as nodes, so that a
tab, a duplicate key or an anchor that contains itself gives one clear message, and later messages
can name file and line. Used by ``config.sources``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from flagscale.config.arguments.spec.values import format_value
from flagscale.errors import ConfigError, Problem

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)\s*$")
_NULL = "tag:yaml.org,2002:null"
_MAX_NODES = 200_000
_MAX_DEPTH = 32
"""Maximum nesting depth: more than an experiment has, and less than exceeds Hydra's recursion limit
and the parser's stack.
"""


@dataclass(frozen=True)
class YamlLeaf:
    """Line and text of a value. ``text`` is None for a list or mapping; ``items`` has the texts of
    a list of scalars.
    """

    line: int
    text: str | None
    items: tuple[str, ...] = ()


def short_path(path: Path) -> str:
    """Return a path for messages: relative if it is below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


@dataclass(frozen=True)
class YamlFile:
    """A parsed file: the lines and texts of its keys, and its defaults list."""

    path: Path
    root: yaml.Node | None = field(repr=False)
    package: str | None
    """Value of a ``# @package`` line; None without one."""

    @cached_property
    def leaves(self) -> dict[str, YamlLeaf]:
        """Return every key, including sections, by its dotted path inside the file."""
        return dict(_iter_leaves(self.root, ""))

    @cached_property
    def anchored_keys(self) -> frozenset[str]:
        """Dotted paths of the keys that hold an anchor which an alias uses, and of the sections
        that contain them.
        """
        paths: dict[int, str] = {}
        aliased = {paths[identity] for identity, _ in _iter_nodes(self.root, paths)}
        parts = (path.split(".") for path in aliased)
        return frozenset(
            ".".join(names[:end]) for names in parts for end in range(1, len(names) + 1)
        )

    @cached_property
    def defaults(self) -> list[Any]:
        """Return the defaults list; empty if there is none."""
        if not isinstance(self.root, yaml.MappingNode):
            return []
        for key, value in self.root.value:
            if key.value == "defaults" and isinstance(value, yaml.SequenceNode):
                return [_to_plain(item) for item in value.value]
        return []


def read_yaml(path: Path) -> YamlFile:
    """Read and check a file.

    Raises:
        ConfigError: with file and line of every problem.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{short_path(path)}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ConfigError(f"{short_path(path)}:{line}: not UTF-8 text") from error
    try:
        _check_depth(path, text)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_problem(path, text, error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{short_path(path)}: {error}") from error
    problems = list(_node_problems(path, root))
    if problems:
        raise ConfigError(problems)
    return YamlFile(path, root, _find_package(text))


def _check_depth(path: Path, text: str) -> None:
    """Raise ConfigError if a text nests too deep, before any recursive code reads it."""
    if (line := _find_deep_line(text)) is not None:
        raise ConfigError(_depth_problem(path, "", line))


def _find_deep_line(text: str) -> int | None:
    """Return the first line in which a text nests too deep, or None."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                return event.start_mark.line + 1 if event.start_mark else 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return None


def _depth_problem(path: Path, key: str, line: int) -> Problem:
    message = f"nests deeper than {_MAX_DEPTH} levels"
    return Problem(key, message, f"{short_path(path)}:{line}")


def _find_package(text: str) -> str | None:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            return None
        match = _PACKAGE.match(line)
        if match:
            return match.group(1)
    return None


def _syntax_problem(path: Path, text: str, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    number = mark.line if mark else 0
    lines = text.splitlines()
    for candidate in (number, number - 1):
        line = lines[candidate] if 0 <= candidate < len(lines) else ""
        if "\t" in line[: len(line) - len(line.lstrip())]:
            message = "a tab indents this line; YAML allows spaces only"
            return Problem("", message, f"{short_path(path)}:{candidate + 1}")
    reason = ": ".join(part for part in (error.context, error.problem) if part)
    return Problem("", f"not valid YAML: {reason}", f"{short_path(path)}:{number + 1}")


def _node_problems(path: Path, root: yaml.Node | None) -> Iterator[Problem]:
    """Yield problems of the nodes: duplicate keys, anchors that contain themselves, aliases that
    nest too deep, and a top level that is no mapping. An aliased node is visited once per use.
    """
    if root is not None and not isinstance(root, yaml.MappingNode):
        content = (
            "a list" if isinstance(root, yaml.SequenceNode) else f"only {format_value(root.value)}"
        )
        line = root.start_mark.line + 1
        yield Problem(
            "", f"expected keys with values, found {content}", f"{short_path(path)}:{line}"
        )
        return
    stack: list[tuple[yaml.Node, str, frozenset[int]]] = [(root, "", frozenset())] if root else []
    for _ in range(_MAX_NODES):
        if not stack:
            return
        node, key, ancestors = stack.pop()
        if id(node) in ancestors:
            message = "an anchor contains an alias of itself"
            yield Problem(
                key.rstrip("."), message, f"{short_path(path)}:{node.start_mark.line + 1}"
            )
            continue
        if len(ancestors) > _MAX_DEPTH:
            yield _depth_problem(path, key.split(".")[0], node.start_mark.line + 1)
            return
        path_ids = ancestors | {id(node)}
        if isinstance(node, yaml.MappingNode):
            yield from _duplicate_keys(path, node, key)
            stack += [(value, f"{key}{name.value}.", path_ids) for name, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            stack += [(value, key, path_ids) for value in node.value]
    if stack:
        message = f"more than {_MAX_NODES} values, counting the values of an alias once per use"
        yield Problem("", message, short_path(path))


def _duplicate_keys(path: Path, node: yaml.MappingNode, key: str) -> Iterator[Problem]:
    first_lines: dict[str, int] = {}
    for name, _ in node.value:
        if not isinstance(name, yaml.ScalarNode) or name.value == "<<":
            continue
        line = name.start_mark.line + 1
        if name.value in first_lines:
            message = f"duplicate key, first given in line {first_lines[name.value]}"
            yield Problem(f"{key}{name.value}", message, f"{short_path(path)}:{line}")
        first_lines.setdefault(name.value, line)


def _iter_leaves(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, YamlLeaf]]:
    if not isinstance(node, yaml.MappingNode):
        return
    # A merged mapping comes first, because the keys next to it override its keys.
    for name, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
        line = name.start_mark.line + 1
        if name.value == "<<":
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _iter_leaves(merged, prefix)
            continue
        text = value.value if isinstance(value, yaml.ScalarNode) else None
        yield f"{prefix}{name.value}", YamlLeaf(line, text, _item_texts(value))
        yield from _iter_leaves(value, f"{prefix}{name.value}.")


def _iter_nodes(root: yaml.Node | None, paths: dict[int, str]) -> Iterator[tuple[int, str]]:
    """Yield each repeated use of a node, which an alias makes, as identity and dotted path.

    ``paths`` gets the path of the first use of every node, in the order of the file.
    """
    stack: list[tuple[yaml.Node, str]] = [(root, "")] if root is not None else []
    while stack:
        node, path = stack.pop()
        if id(node) in paths:
            yield id(node), path
            continue
        paths[id(node)] = path
        if isinstance(node, yaml.MappingNode):
            children = [(value, f"{path}.{name.value}".lstrip(".")) for name, value in node.value]
        else:
            items = node.value if isinstance(node, yaml.SequenceNode) else []
            children = [(item, path) for item in items]
        stack += reversed(children)


def _item_texts(node: yaml.Node | None) -> tuple[str, ...]:
    """Return the texts of a list's items; empty if an item is null or not a scalar."""
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    scalars = all(isinstance(item, yaml.ScalarNode) and item.tag != _NULL for item in items)
    return tuple(item.value for item in items) if scalars else ()


def parse_item_texts(text: str) -> tuple[str, ...]:
    """Return the item texts of a list that is written in one text, such as ``[a, 1e-4]``; empty for
    anything else.
    """
    try:
        return () if _find_deep_line(text) else _item_texts(yaml.compose(text, Loader=_LOADER))
    except yaml.YAMLError:
        return ()


def _to_plain(node: yaml.Node) -> Any:
    """Convert an entry of a defaults list to plain data. Scalars stay text; null becomes None."""
    if isinstance(node, yaml.MappingNode):
        return {_to_plain(key): _to_plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_to_plain(item) for item in node.value]
    return None if node.tag == _NULL else node.value
