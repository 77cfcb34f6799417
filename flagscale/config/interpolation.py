"""``${host:NAME}`` under ``experiment.envs``: a variable of the host itself; which keys
interpolations refer to; and what to say of one that cannot be resolved.

A YAML is resolved on the launcher's machine, where a host's own variables are not known. So the
resolver leaves a mark in the value, which no text can hold otherwise: a NUL stands at both its
ends, and no environment can carry one. Planning and scripts take values apart at these marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

ENVS = "experiment.envs"
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_REFERENCE = re.compile(rf"()\0host:({_NAME})\0()")
_IN_A_PATH = re.compile(rf"\A()\0host:({_NAME})\0(:)|(:?)\0host:({_NAME})\0()")

_KEY = re.compile(r"\$\{(\.*)([^\s${}:,]+)\}")
_UNREADABLE = re.compile(r"no viable alternative at|mismatched input|token recognition error")


def register() -> None:
    """Make ``${host:NAME}`` known to OmegaConf. May be called again."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("host", _resolve, replace=True)


def _resolve(*words: Any, _node_: Any) -> str:
    from omegaconf.errors import InterpolationResolutionError

    key = str(_node_._get_full_key(None))
    if not key.startswith(f"{ENVS}."):
        raise InterpolationResolutionError(
            f"${{host:…}}, a host's own variable, has a meaning under {ENVS} alone; "
            "${oc.env:NAME} is this machine's"
        )
    if len(words) != 1 or not re.fullmatch(_NAME, str(words[0])):
        given = ",".join(map(str, words))
        raise InterpolationResolutionError(
            f"${{host:{given}}} names no variable: expected letters, digits and _ after the colon"
        )
    return reference(str(words[0]))


def reference(name: str) -> str:
    """What ``${host:NAME}`` leaves in a value."""
    return f"\0host:{name}\0"


def references(text: str) -> list[str]:
    """The names of the host's variables that a value refers to, each once."""
    return list(dict.fromkeys(found[2] for found in _REFERENCE.finditer(text)))


def literal(text: str) -> str:
    """A value without its references."""
    return _REFERENCE.sub("", text)


def readable(value: Any) -> Any:
    """Plain data, at any depth, in which references stand as a YAML writes them, and what only
    looks like one has the backslash that keeps it from being one."""
    if isinstance(value, Mapping):
        return {key: readable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [readable(item) for item in value]
    if not isinstance(value, str):
        return value
    return _REFERENCE.sub(r"${host:\2}", value.replace("${host:", r"\${host:"))


def parts(name: str, text: str) -> list[str | tuple[str, str, str]]:
    """The value of the variable ``name``, taken apart: literal texts, and for each reference what
    stands before it, the variable referred to, and what stands after it.

    These two are empty but in a variable whose name ends in PATH, where the colon beside a
    reference is one of them. A variable that is unset or empty takes them along: an empty entry of
    such a list means the working directory.
    """
    pattern = _IN_A_PATH if name.endswith("PATH") else _REFERENCE
    found: list[str | tuple[str, str, str]] = []
    end = 0
    for match in pattern.finditer(text):
        before, referred, after = (group for group in match.groups() if group is not None)
        found += [text[end : match.start()], (before, referred, after)]
        end = match.end()
    return [part for part in (*found, text[end:]) if part]


def referred(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted keys that plain, unresolved data refers to by ``${KEY}``; one that is relative
    (``${..KEY}``) is made whole."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from referred(inner, (*path, str(key)))
    elif isinstance(value, list):
        for item in value:
            yield from referred(item, (*path, ""))
    elif isinstance(value, str) and "${" in value:
        for dots, key in _KEY.findall(value):
            yield ".".join((*path[: len(path) - len(dots)], key)) if dots else key


def interpolation_hint(message: str) -> str:
    """What to say behind OmegaConf's ``message`` where it cannot read an interpolation; empty where
    the message is about something else."""
    if _UNREADABLE.search(message):
        return r"; ${ begins an interpolation: what is not meant as one is written \${"
    return ""
