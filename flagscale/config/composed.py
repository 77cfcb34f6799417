"""Composed configuration of an experiment, in the form in which it can be composed again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flagscale.config.interpolation import (
    escape_interpolations,
    host_references,
    restore_references,
)

_RESOLVER = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
_RESOLVERS_OF_KEYS = ("host", "oc.select", "oc.dict.keys", "oc.dict.values", "oc.deprecated")
"""Resolvers whose values depend on other keys, or on the host."""


def fix_interpolations(config: DictConfig, resolved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a configuration as plain data that gives the same values when it is composed again.

    References to other keys stay, so that overrides have an effect on all that refers to them. All
    else, such as the time or variables of this machine, is fixed to its present value.

    Args:
        config: Configuration with interpolations.
        resolved: The same configuration, resolved, as plain data.
    """
    cache = OmegaConf.get_cache(config)

    def resolve(interpolation: str) -> Any:
        node = OmegaConf.create({"value": interpolation})
        OmegaConf.set_cache(node, cache)  # Some resolvers give the same value only once.
        return node.value

    fixed: dict[Any, Any] = _fix(OmegaConf.to_container(config), resolved, resolve)
    return fixed


def _fix(composed: Any, resolved: Any, resolve: Callable[[str], Any]) -> Any:
    if isinstance(composed, Mapping) and isinstance(resolved, Mapping):
        return {key: _fix(composed.get(key), resolved[key], resolve) for key in resolved}
    if isinstance(composed, list) and isinstance(resolved, list) and len(composed) == len(resolved):
        return [_fix(*pair, resolve) for pair in zip(composed, resolved, strict=True)]
    if not isinstance(composed, str) or "${" not in composed:
        return escape_plain_data(resolved)
    parts = list(_split(composed))
    if len(parts) == 1 and not _stays(parts[0]):
        return escape_plain_data(resolved)
    return "".join(
        part if _stays(part) else str(escape_plain_data(resolve(part))) for part in parts
    )


def _stays(part: str) -> bool:
    """Return whether a part of a text stays as it is: literal text, or a reference to keys."""
    match = _RESOLVER.match(part)
    return match is None or match[1] in _RESOLVERS_OF_KEYS or "${" in part[2:]


def _split(text: str) -> Iterator[str]:
    """Split a text into interpolations, from ``${`` to the closing brace, and literal texts."""
    start = literal_start = 0
    while (start := text.find("${", start)) >= 0:
        backslashes = len(text[:start]) - len(text[:start].rstrip("\\"))
        if backslashes % 2:  # a literal ${
            start += 2
            continue
        depth, end = 0, start
        while end < len(text):
            depth += text.startswith("${", end) - (text[end] == "}")
            end += 1
            if depth == 0:
                break
        if literal_start < start:
            yield text[literal_start:start]
        yield text[start:end]
        start = literal_start = end
    if literal_start < len(text):
        yield text[literal_start:]


def escape_plain_data(value: Any) -> Any:
    """Return resolved plain data, at any depth, as a YAML writes it.

    ``${`` gets a backslash, unless it is a reference to a variable of the host.
    """
    if isinstance(value, Mapping):
        return {key: escape_plain_data(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [escape_plain_data(item) for item in value]
    if not isinstance(value, str):
        return value
    if host_references(value):
        return restore_references(value)
    return escape_interpolations(value)
