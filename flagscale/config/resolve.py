"""The values that interpolations stand for, or every one that stands for nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flagscale.config.interpolation import interpolation_hint
from flagscale.config.overrides import TOP_LEVEL, did_you_mean_key
from flagscale.config.sources import Sources
from flagscale.errors import ConfigError, Problem

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import OmegaConfBaseException

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)(:?)")
_NO_VARIABLE = r"KeyError raised .*Environment variable '(.+)' not found"
_NOT_FOUND = r"Interpolation key '(.+)' not found|Unsupported interpolation type (\w+)"


def resolve(config: DictConfig, sources: Sources) -> dict[Any, Any]:
    """A composed configuration as plain data. Raises ConfigError with every interpolation that
    leads nowhere and every value that is still to be given (``???``)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        # It is the first of maybe many.
        problems = list(_unresolved(config, sources)) or [_problem(error, "", sources)]
        raise ConfigError(problems) from error
    return data if isinstance(data, dict) else {}


def _unresolved(
    node: DictConfig | ListConfig, sources: Sources, prefix: str = ""
) -> Iterator[Problem]:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    keys: Any = node.keys() if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        path = f"{prefix}{key}"
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            yield _problem(error, path, sources)
            continue
        if OmegaConf.is_config(value) and not OmegaConf.is_interpolation(node, key):
            yield from _unresolved(value, sources, f"{path}.")


def _problem(error: OmegaConfBaseException, key: str, sources: Sources) -> Problem:
    return _told(error, key or str(error.full_key or ""), sources)


def _told(error: OmegaConfBaseException, key: str, sources: Sources) -> Problem:
    message = (error.msg or str(error)).splitlines()[0]
    if "Missing mandatory value" in message:
        message = "is required: replace ??? by a value"
    elif found := re.match(_NO_VARIABLE, message):
        message = (
            f"this machine has no variable {found[1]}: set it, or say what holds without it, "
            f"${{oc.env:{found[1]},…}}"
        )
    elif found := re.fullmatch(_NOT_FOUND, message):
        message += _hint(found[1] or found[2], key, sources.texts.get(key, ""))
    else:
        message += interpolation_hint(message)
    return Problem(key, message, sources.place(key))


def unreadable(sources: Sources) -> list[Problem]:
    """Every interpolation in the files that cannot be read, and those beside them that lead
    nowhere, without a composed configuration, which the former prevent."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    found = []
    for key, text in sources.texts.items():
        if "${" not in text:
            continue
        try:
            OmegaConf.create({key: text})
        except OmegaConfBaseException as error:
            found.append(_told(error, key, sources))
        else:
            found += _dead(key, text, sources)
    return found


def _dead(key: str, text: str, sources: Sources) -> Iterator[Problem]:
    """What leads nowhere, in a text whose interpolations can be read."""
    from omegaconf import OmegaConf

    for name, colon in _REFERENCE.findall(text):
        if colon and not OmegaConf.has_resolver(name):
            message = f"Unsupported interpolation type {name}"
        elif not colon and name not in sources.places:
            message = f"Interpolation key '{name}' not found"
        else:
            continue
        yield Problem(key, message + _hint(name, key, text), sources.place(key))


def _hint(name: str, key: str, text: str) -> str:
    """What was meant by an interpolation that leads nowhere."""
    if older := _older(name, key, text):
        return older
    if name.partition(".")[0] in TOP_LEVEL:
        return did_you_mean_key(name)
    if ".cmds." in f".{key}":
        whole = next(
            (one for one in re.findall(r"\$\{[^{}]*\}", text) if name in one), f"${{{name}}}"
        )
        plain = f"${name} or " if whole == f"${{{name}}}" and name.isidentifier() else ""
        return f"; for the shell's variable write {plain}\\{whole}"
    if not name.isidentifier():
        return ""
    here = f"${{oc.env:{name}}} for this machine's variable"
    if ".envs." in f".{key}":
        return f"; write ${{host:{name}}} for the host's own variable, {here}"
    return f"; write {here}"


def _older(name: str, key: str, text: str) -> str:
    """What to write for a form that YAMLs of FlagScale have: ``${path:??}`` for a value to come,
    and ``${env:NAME}``, which Hydra once knew."""
    if f"${{{name.removesuffix('??')}??}}" in text or f"${{{name}:??}}" in text:
        return "; it is a placeholder: replace it by a value"
    named = re.search(r"\$\{env:([^{}]*)\}", text)
    if name == "env" and named and ".cmds." not in f".{key}":
        return f"; write ${{oc.env:{named[1]}}} for this machine's variable"
    return ""
