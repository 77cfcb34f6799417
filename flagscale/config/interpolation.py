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

from flagscale.config.overrides import TOP_LEVEL, did_you_mean_key
from flagscale.config.sources import Sources
from flagscale.errors import ConfigError, Problem

ENVS = "experiment.envs"
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_REFERENCE = re.compile(rf"()\0host:({_NAME})\0()")
_PATH_REFERENCE = re.compile(rf"\A()\0host:({_NAME})\0(:)|(:?)\0host:({_NAME})\0()")
_REFERENCED_KEY = re.compile(r"\$\{(\.*)([^\s${}:,]+)\}")
_SYNTAX_ERROR = re.compile(r"no viable alternative at|mismatched input|token recognition error")


def register_host_resolver() -> None:
    """Make ``${host:NAME}`` known to OmegaConf. May be called again."""

    OmegaConf.register_new_resolver("host", _resolve_host_variable, replace=True)


def _resolve_host_variable(*words: Any, _node_: Any) -> str:

    key = str(_node_._get_full_key(None))
    if not key.startswith(f"{ENVS}."):
        raise InterpolationResolutionError(
            f"${{host:…}}, a host's own variable, has a meaning under {ENVS} alone; "
            "${oc.env:NAME} is this machine's"
        )
    if len(words) != 1 or not re.fullmatch(_NAME, str(words[0])):
        text = ",".join(map(str, words))
        raise InterpolationResolutionError(
            f"${{host:{text}}} names no variable: expected letters, digits and _ after the colon"
        )
    return reference(str(words[0]))


def reference(name: str) -> str:
    """Return the text that ``${host:NAME}`` leaves in a value."""
    return f"\0host:{name}\0"


def references(text: str) -> list[str]:
    """The names of the host's variables that a value refers to, each once."""
    return list(dict.fromkeys(match[2] for match in _REFERENCE.finditer(text)))


def without_references(text: str) -> str:
    """A value without its references."""
    return _REFERENCE.sub("", text)


def restore_references(value: Any) -> Any:
    """Plain data, at any depth, in which references stand as a YAML writes them, and what only
    looks like one has the backslash that keeps it from being one."""
    if isinstance(value, Mapping):
        return {key: restore_references(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [restore_references(item) for item in value]
    if not isinstance(value, str):
        return value
    return _REFERENCE.sub(r"${host:\2}", value.replace("${host:", r"\${host:"))


def split_references(name: str, text: str) -> list[str | tuple[str, str, str]]:
    """The value of the variable ``name``, taken apart: literal texts, and for each reference what
    stands before it, the variable referred to, and what stands after it.

    These two are empty but in a variable whose name ends in PATH, where the colon beside a
    reference is one of them. A variable that is unset or empty takes them along: an empty entry of
    such a list means the working directory.
    """
    pattern = _PATH_REFERENCE if name.endswith("PATH") else _REFERENCE
    pieces: list[str | tuple[str, str, str]] = []
    end = 0
    for match in pattern.finditer(text):
        before, referred, after = (group for group in match.groups() if group is not None)
        pieces += [text[end : match.start()], (before, referred, after)]
        end = match.end()
    return [part for part in (*pieces, text[end:]) if part]


def referenced_keys(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted keys that plain, unresolved data refers to by ``${KEY}``; one that is relative
    (``${..KEY}``) is made whole."""
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
        return r"; ${ begins an interpolation: what is not meant as one is written \${"
    return ""


_INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.]*)(:?)")
_NO_VARIABLE = r"KeyError raised .*Environment variable '(.+)' not found"
_NOT_FOUND = r"Interpolation key '(.+)' not found|Unsupported interpolation type (\w+)"


def resolve_interpolations(config: DictConfig, sources: Sources) -> dict[Any, Any]:
    """A composed configuration as plain data. Raises ConfigError with every interpolation that
    leads nowhere and every value that is still to be given (``???``)."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        # It is the first of maybe many.
        problems = list(_find_unresolved(config, sources)) or [
            _resolution_problem(error, "", sources)
        ]
        raise ConfigError(problems) from error
    return data if isinstance(data, dict) else {}


def _find_unresolved(
    node: DictConfig | ListConfig, sources: Sources, prefix: str = ""
) -> Iterator[Problem]:
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

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
    elif match := re.match(_NO_VARIABLE, message):
        message = (
            f"this machine has no variable {match[1]}: set it, or say what holds without it, "
            f"${{oc.env:{match[1]},…}}"
        )
    elif match := re.fullmatch(_NOT_FOUND, message):
        message += _hint_for_reference(match[1] or match[2], key, sources.texts.get(key, ""))
    else:
        message += interpolation_hint(message)
    return Problem(key, message, sources.place(key))


def unreadable_interpolations(sources: Sources) -> list[Problem]:
    """Every interpolation in the files that cannot be read, and those beside them that lead
    nowhere, without a composed configuration, which the former prevent."""
    from omegaconf.errors import OmegaConfBaseException

    problems = []
    for key, text in sources.texts.items():
        if "${" not in text:
            continue
        try:
            OmegaConf.create({key: text})
        except OmegaConfBaseException as error:
            problems.append(_describe_failure(error, key, sources))
        else:
            problems += _dead_references(key, text, sources)
    return problems


def _dead_references(key: str, text: str, sources: Sources) -> Iterator[Problem]:
    """Yield problems for references without a target, in a text with readable interpolations."""

    for name, colon in _INTERPOLATION.findall(text):
        if colon and not OmegaConf.has_resolver(name):
            message = f"Unsupported interpolation type {name}"
        elif not colon and name not in sources.places:
            message = f"Interpolation key '{name}' not found"
        else:
            continue
        yield Problem(key, message + _hint_for_reference(name, key, text), sources.place(key))


def _hint_for_reference(name: str, key: str, text: str) -> str:
    """Return a hint for an interpolation without a target."""
    if older := _hint_for_old_form(name, key, text):
        return older
    if name.partition(".")[0] in TOP_LEVEL:
        return did_you_mean_key(name)
    if ".cmds." in f".{key}":
        whole = next(
            (reference for reference in re.findall(r"\$\{[^{}]*\}", text) if name in reference),
            f"${{{name}}}",
        )
        plain = f"${name} or " if whole == f"${{{name}}}" and name.isidentifier() else ""
        return f"; for the shell's variable write {plain}\\{whole}"
    if not name.isidentifier():
        return ""
    here = f"${{oc.env:{name}}} for this machine's variable"
    if ".envs." in f".{key}":
        return f"; write ${{host:{name}}} for the host's own variable, {here}"
    return f"; write {here}"


def _hint_for_old_form(name: str, key: str, text: str) -> str:
    """Return the replacement of forms in FlagScale's YAML files: ``${path:??}`` for a missing
    value, and ``${env:NAME}``, an old resolver of Hydra."""
    if f"${{{name.removesuffix('??')}??}}" in text or f"${{{name}:??}}" in text:
        return "; it is a placeholder: replace it by a value"
    named = re.search(r"\$\{env:([^{}]*)\}", text)
    if name == "env" and named and ".cmds." not in f".{key}":
        return f"; write ${{oc.env:{named[1]}}} for this machine's variable"
    return ""
