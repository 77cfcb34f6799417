"""The hosts of a run: the hostfile, and how many hosts and ranks it comes to.

A hostfile has a line a host, ``host slots=N [type=T]``; blank lines and ``#`` comments are
skipped. Every line is checked as a whole and every bad one is reported, with its number.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flagscale.errors import ConfigError, Problem

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._\-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
_NUMBER = re.compile(r"[1-9][0-9]*")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]*")
_EXPECTED = "expected `host slots=N [type=T]`"


@dataclass(frozen=True)
class Host:
    """One host of a run. ``slots`` is None where nobody said how many ranks it takes."""

    name: str
    slots: int | None = None
    device_type: str | None = None


def parse_hostfile(text: str, path: Path | str = "hostfile") -> tuple[Host, ...]:
    """The hosts of a hostfile's text, in order.

    Raises :class:`ConfigError` with every bad line: what isn't understood, slots that are no
    positive number, a host named twice, hosts with and without a type, no host at all.
    """
    hosts: dict[str, Host] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, complaint = _parse_line(words)
        if host is not None and host.name in hosts:
            complaint = f"host {host.name!r} is named twice"
        if complaint or host is None:
            problems.append(Problem("", complaint, f"{path}:{number}"))
        else:
            hosts[host.name] = host
    if not problems and not hosts:
        problems.append(Problem("", f"no host in it; {_EXPECTED}", str(path)))
    problems.extend(_mixed_types(tuple(hosts.values()), path))
    if problems:
        raise ConfigError(problems)
    return tuple(hosts.values())


def _parse_line(words: list[str]) -> tuple[Host | None, str]:
    """The host of a line's words, or what is wrong with them."""
    name, *options = words
    if not _HOST.fullmatch(name):
        return None, f"{name!r} is no host name; {_EXPECTED}"
    values: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in ("slots", "type"):
            return None, f"{option!r} is not understood; {_EXPECTED}"
        if key in values:
            return None, f"{key} is given twice"
        values[key] = value
    return _checked(name, values)


def _checked(name: str, values: dict[str, str]) -> tuple[Host | None, str]:
    slots, device_type = values.get("slots"), values.get("type")
    if slots is None:
        return None, f"slots is missing; {_EXPECTED}"
    if not _NUMBER.fullmatch(slots):
        return None, f"slots={slots}: expected a whole number of at least 1"
    if device_type is not None and not _WORD.fullmatch(device_type):
        return None, f"type={device_type}: expected a word such as A800"
    return Host(name, int(slots), device_type), ""


def _mixed_types(hosts: tuple[Host, ...], path: Path | str) -> list[Problem]:
    untyped = [host.name for host in hosts if host.device_type is None]
    if not untyped or len(untyped) == len(hosts):
        return []
    message = f"either every host has a type or none; without one: {', '.join(untyped)}"
    return [Problem("", message, str(path))]


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a hostfile. A missing file is an error: training on this machine alone is
    never what its absence means."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            Problem("experiment.runner.hostfile", f"no such file: {path}"),
            hint="write it, or leave the key out to train on this machine",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(
            Problem("experiment.runner.hostfile", f"cannot read {path}: {reason}")
        ) from error
    return parse_hostfile(text, path)


def count_nodes(in_hostfile: int | None, in_yaml: int | str | None) -> int:
    """How many hosts take part: the smaller of the hostfile's number and the YAML's, where
    ``a:b`` means ``a``; 1 if neither is given."""
    wanted = int(str(in_yaml).partition(":")[0]) if in_yaml is not None else None
    given = [number for number in (in_hostfile, wanted) if number is not None]
    return min(given, default=1)


def count_ranks(slots: int | None, in_yaml: int | str | None, visible: int | None) -> int:
    """How many ranks a host takes: the smallest of its slots, the YAML's number and its visible
    devices, of those that are given; 1 if none is."""
    wanted = int(in_yaml) if in_yaml is not None else None
    return min((number for number in (slots, wanted, visible) if number is not None), default=1)


@lru_cache(maxsize=256)
def is_this_machine(name: str) -> bool:
    """Whether a host's name or address is this machine: a socket can be bound to it."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, *_, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def choose_hosts(hostfile: Path | None, nnodes: int | None) -> tuple[Host, ...]:
    """The hosts that take part in a run.

    Raises :class:`ConfigError` where that would be any machine but this one: this version starts
    processes here only.
    """
    key = "experiment.runner.nnodes"
    if hostfile is None:
        if count_nodes(None, nnodes) > 1:
            raise ConfigError(
                Problem(key, f"{nnodes} hosts, but there is no hostfile that names them"),
                hint="set experiment.runner.hostfile, or nnodes: 1 for this machine",
            )
        return (Host("localhost"),)
    listed = read_hostfile(hostfile)
    hosts = listed[: count_nodes(len(listed), nnodes)]
    others = [host.name for host in hosts if not is_this_machine(host.name)]
    if others:
        raise ConfigError(
            Problem("experiment.runner.hostfile", f"{hostfile}: other machines: {_some(others)}"),
            hint="this version launches on this machine only",
        )
    if len(hosts) > 1:
        names = _some([host.name for host in hosts])
        raise ConfigError(
            Problem("experiment.runner.hostfile", f"{hostfile}: all of {names} are this machine"),
            hint="name it once, with as many slots as it has devices",
        )
    return hosts


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")
