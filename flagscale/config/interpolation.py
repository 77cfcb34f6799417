"""Interpolations of a YAML: their values, the keys they refer to, and hints for those that fail.

``${host:NAME}`` under ``experiment.envs`` stands for a variable of the host itself. A YAML is
resolved on the launcher's machine, where the hosts' own variables are unknown. So the resolver
leaves a reference in the value that no text can contain otherwise: it starts and ends with a NUL
character, which no environment variable can hold. Planning and scripts split values at references.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from flagscale.config.arguments.spec.values import nearest_names
from flagscale.config.overrides import TOP_LEVEL, did_you_mean_key, is_known_key
from flagscale.config.sources import Sources
from flagscale.errors import ConfigError, Problem

ENVS = "experiment.envs"
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_REFERENCE = re.compile(rf"()\0host:({_NAME})\0()")
_PATH_REFERENCE = re.compile(rf"\A()\0host:({_NAME})\0(:)|(:?)\0host:({_NAME})\0()")
_REFERENCED_KEY = re.compile(r"\$\{(\.*)([^\s${}:,]+)\}")
_INTERPOLATION_START = re.compile(r"(\\*)\$\{")
_SYNTAX_ERROR = re.compile(r"no viable alternative at|mismatched input|token recognition error")


def register_resolvers() -> None:
    """Register the resolvers of ``${host:NAME}``, and of ``${env:NAME}``, which FlagScale's YAML
    files have for ``${oc.env:NAME}``, in OmegaConf. May be called again.
    """
    from omegaconf.resolvers import oc

    OmegaConf.register_new_resolver("host", _resolve_host_variable, replace=True)
    OmegaConf.register_new_resolver("env", oc.env, replace=True)


def _resolve_host_variable(*words: Any, _node_: Any) -> str:
    key = str(_node_._get_full_key(None))
    if not key.startswith(f"{ENVS}."):
        raise InterpolationResolutionError(
            f"${{host:…}}, a variable of the host, is supported only under {ENVS}; "
            "${oc.env:NAME} is a variable of this machine"
        )
    if len(words) != 1 or not re.fullmatch(_NAME, str(words[0])):
        text = ",".join(map(str, words))
        raise InterpolationResolutionError(
            f"${{host:{text}}} names no variable: expected letters, digits and _ after the colon"
        )
    return host_reference(str(words[0]))


def host_reference(name: str) -> str:
    """Return the text that ``${host:NAME}`` leaves in a value."""
    return f"\0host:{name}\0"


def host_references(text: str) -> list[str]:
    """Return the names of the host variables that a value refers to, each once."""
    return list(dict.fromkeys(match[2] for match in _REFERENCE.finditer(text)))


def remove_references(text: str) -> str:
    """Return a value without its references."""
    return _REFERENCE.sub("", text)


def restore_references(value: Any) -> Any:
    """Return plain data, at any depth, with references as a YAML writes them (``${host:NAME}``). A
    literal ``${host:`` gets the backslash that keeps it literal.
    """
    if isinstance(value, Mapping):
        return {key: restore_references(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [restore_references(item) for item in value]
    if not isinstance(value, str):
        return value
    return _REFERENCE.sub(r"${host:\2}", value.replace("${host:", r"\${host:"))


def escape_interpolations(text: str) -> str:
    """Return the text that a YAML has to contain for the value ``text``: each ``${`` is escaped."""
    return _INTERPOLATION_START.sub(lambda match: match[1] * 2 + r"\${", text)


def split_references(name: str, text: str) -> list[str | tuple[str, str, str]]:
    """Split the value of a variable into literal texts and references to host variables.

    In a variable whose name ends in PATH, the colon next to a reference belongs to the reference.
    If the host's variable is unset or empty, the colon is dropped as well, because an empty entry
    of such a list means the working directory.

    Args:
        name: Name of the variable.
        text: Its value.

    Returns:
        The parts in order. A reference is ``(before, variable, after)``: ``before`` and ``after``
        are an adjacent colon or empty.
    """
    pattern = _PATH_REFERENCE if name.endswith("PATH") else _REFERENCE
    parts: list[str | tuple[str, str, str]] = []
    end = 0
    for match in pattern.finditer(text):
        before, variable, after = (group for group in match.groups() if group is not None)
        parts += [text[end : match.start()], (before, variable, after)]
        end = match.end()
    return [part for part in (*parts, text[end:]) if part]


def referenced_keys(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys that plain, unresolved data refers to as ``${KEY}``. A relative
    reference (``${..KEY}``) is made absolute.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from referenced_keys(inner, (*path, str(key)))
    elif isinstance(value, list):
        for item in value:
            yield from referenced_keys(item, (*path, ""))
    elif isinstance(value, str) and "${" in value:
        for dots, key in _REFERENCED_KEY.findall(value):
            yield ".".join((*path[: len(path) - len(dots)], key)) if dots else key


def interpolation_hint(message: str) -> str:
    """Return a hint to append to OmegaConf's ``message`` about an unreadable interpolation; empty
    for other messages."""
    if _SYNTAX_ERROR.search(message):
        return r"; ${ begins an interpolation; for the literal text write \${"
    return ""


_INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.]*)(:?)")
_UNSET_VARIABLE_ERROR = r"KeyError raised .*Environment variable '(.+)' not found"
_NO_TARGET_ERROR = r"Interpolation key '(.+)' not found|Unsupported interpolation type (\w+)"


def resolve_interpolations(config: DictConfig, sources: Sources) -> dict[Any, Any]:
    """Return a composed configuration as plain data.

    Raises:
        ConfigError: with every interpolation that has no target and every mandatory value that is
            missing (``???``).
    """
    try:
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        # OmegaConf reports only the first of possibly many.
        problems = list(_find_unresolved(config, sources)) or [
            _resolution_problem(error, "", sources)
        ]
        raise ConfigError(problems) from error
    return data if isinstance(data, dict) else {}


def _find_unresolved(
    node: DictConfig | ListConfig, sources: Sources, prefix: str = ""
) -> Iterator[Problem]:
    keys: Any = node.keys() if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        path = f"{prefix}{key}"
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            yield _resolution_problem(error, path, sources)
            continue
        if OmegaConf.is_config(value) and not OmegaConf.is_interpolation(node, key):
            yield from _find_unresolved(value, sources, f"{path}.")


def _resolution_problem(error: OmegaConfBaseException, key: str, sources: Sources) -> Problem:
    return _describe_failure(error, key or str(error.full_key or ""), sources)


def _describe_failure(error: OmegaConfBaseException, key: str, sources: Sources) -> Problem:
    message = (error.msg or str(error)).splitlines()[0]
    if "Missing mandatory value" in message:
        message = "is required: replace ??? by a value"
    elif match := re.match(_UNSET_VARIABLE_ERROR, message):
        message = (
            f"this machine has no variable {match[1]}: set it, or write a default, "
            f"${{oc.env:{match[1]},…}}"
        )
    elif match := re.fullmatch(_NO_TARGET_ERROR, message):
        message += _hint_for_reference(match[1] or match[2], key, sources)
    else:
        message += interpolation_hint(message)
    return Problem(key, message, sources.location(key))


def find_unreadable_interpolations(sources: Sources) -> list[Problem]:
    """Return the problems of all interpolations in the files that cannot be parsed or have no
    target.

    Used when unparsable interpolations prevent composing the configuration.
    """
    problems = []
    for key, text in sources.texts.items():
        if "${" not in text:
            continue
        try:
            OmegaConf.create({key: text})
        except OmegaConfBaseException as error:
            problems.append(_describe_failure(error, key, sources))
        else:
            problems += _find_dead_references(key, text, sources)
    return problems


def _find_dead_references(key: str, text: str, sources: Sources) -> Iterator[Problem]:
    """Yield problems for references without a target, in a text with readable interpolations."""
    for name, colon in _INTERPOLATION.findall(text):
        if colon and not OmegaConf.has_resolver(name):
            message = f"Unsupported interpolation type {name}"
        elif not colon and name not in sources.locations:
            message = f"Interpolation key '{name}' not found"
        else:
            continue
        yield Problem(key, message + _hint_for_reference(name, key, sources), sources.location(key))


def _hint_for_reference(name: str, key: str, sources: Sources) -> str:
    """Return a hint for an interpolation without a target."""
    text = sources.texts.get(key, "")
    if old_form_hint := _hint_for_old_form(name, text):
        return old_form_hint
    if name.partition(".")[0] in TOP_LEVEL:
        return _hint_for_key(name, sources)
    if ".cmds." in f".{key}":
        interpolation = next(
            (reference for reference in re.findall(r"\$\{[^{}]*\}", text) if name in reference),
            f"${{{name}}}",
        )
        shell_form = (
            f"${name} or " if interpolation == f"${{{name}}}" and name.isidentifier() else ""
        )
        return f"; for the shell's variable write {shell_form}\\{interpolation}"
    if not name.isidentifier():
        return ""
    env_hint = f"${{oc.env:{name}}} for this machine's variable"
    if ".envs." in f".{key}":
        return f"; write ${{host:{name}}} for the host's own variable, {env_hint}"
    return f"; write {env_hint}"


def _hint_for_key(name: str, sources: Sources) -> str:
    """Return a hint for a dotted key that the files do not have: the key next to it that is
    misspelt, with its line, or the key that the reference misspells.
    """
    section, _, leaf = name.rpartition(".")
    prefix = f"{section}." if section else ""
    siblings = [key.removeprefix(prefix) for key in sources.locations if key.startswith(prefix)]
    for sibling in nearest_names(leaf, [key for key in siblings if "." not in key], count=1):
        key = f"{prefix}{sibling}"
        if is_known_key(name) and not is_known_key(key):
            location = sources.locations[key]
            return f"; {location} has {sibling!r}: write {leaf!r} there"
        return f"; did you mean ${{{key}}}?"
    return did_you_mean_key(name)


def _hint_for_old_form(name: str, text: str) -> str:
    """Return the hint for a form in FlagScale's YAML files: ``${path:??}`` for a missing value."""
    if f"${{{name.removesuffix('??')}??}}" in text or f"${{{name}:??}}" in text:
        return "; it is a placeholder: replace it by a value"
    return ""
