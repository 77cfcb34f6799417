"""The hosts of a run: the hostfile, and how many hosts and ranks it comes to.

A hostfile has a line a host, ``host slots=N [type=T] [port=] [user=] [addr=] [proxy=]``; a name
may be a range such as ``node[01-16]``; blank lines and ``#`` comments are skipped. Every line is
checked as a whole and every bad one is reported, with its number.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from flagscale.errors import ConfigError, Problem
from flagscale.hosts.executor import EXECUTORS
from flagscale.hosts.names import compress, expand

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._\-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
_NUMBER = re.compile(r"[1-9][0-9]*")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*[$]?")
_LARGEST_PORT = 65535
_HOSTFILE = "experiment.runner.hostfile"
_OPTIONS: dict[str, tuple[Callable[[str], object], str]] = {
    "slots": (_NUMBER.fullmatch, "a whole number of at least 1"),
    "type": (re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]*").fullmatch, "a word such as A800"),
    "port": (
        lambda text: _NUMBER.fullmatch(text) and int(text) <= _LARGEST_PORT,
        f"a number from 1 to {_LARGEST_PORT}",
    ),
    "user": (_USER.fullmatch, "the name of an account"),
    "proxy": (
        re.compile(r"[A-Za-z0-9_.\-@:\[\],]+").fullmatch,
        "[user@]host[:port], as for ssh -J",
    ),
}
"""Of each option of a line, what fits, and what that is called."""
_KEYS = (*_OPTIONS, "addr", "via")
_EXPECTED = "expected `host slots=N [type=T] [port=P] [user=U] [addr=A] [proxy=J] [via=V]`"


@dataclass(frozen=True)
class Host:
    """One host of a run. ``slots`` is None where nobody said how many ranks it takes.

    ``port``, ``user`` and ``proxy`` (as ``ssh -J`` takes it) are how SSH reaches it, where they
    differ from the user's SSH configuration; ``addr`` is its address in the network over which
    ranks talk, where that is not the name SSH uses. ``via`` is another way to reach it than SSH,
    see :data:`.executor.EXECUTORS`.
    """

    name: str
    slots: int | None = None
    device_type: str | None = None
    port: int | None = None
    user: str | None = None
    addr: str | None = None
    proxy: str | None = None
    via: str | None = None


def parse_hostfile(text: str, path: Path | str = "hostfile") -> tuple[Host, ...]:
    """The hosts of a hostfile's text, in order.

    Raises :class:`ConfigError` with every bad line: what isn't understood, slots that are no
    positive number, a host or an address named twice, hosts with and without a type, no host at
    all.
    """
    hosts: dict[str, Host] = {}
    addresses: dict[str, str] = {}
    problems: list[Problem] = []
    # Editors of other systems put a byte-order mark in front.
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            for host in _parse_line(words):
                _add(host, hosts, addresses)
        except ValueError as error:
            problems.append(Problem("", str(error), f"{path}:{number}"))
    if not problems and not hosts:
        problems.append(Problem("", f"no host in it; {_EXPECTED}", str(path)))
    problems.extend(_mixed_types(tuple(hosts.values()), path))
    if problems:
        raise ConfigError(problems)
    return tuple(hosts.values())


def _add(host: Host, hosts: dict[str, Host], addresses: dict[str, str]) -> None:
    """Keep a host under its name as DNS knows it, which has no case, and in ``addresses`` its name
    by its address."""
    same = hosts.get(host.name.lower())
    if same is not None:
        beside = "" if same.name == host.name else f": {same.name!r} is the same name"
        raise ValueError(f"host {host.name!r} is named twice{beside}")
    if host.addr is not None:
        taken = addresses.setdefault(host.addr.lower(), host.name)
        if taken != host.name:
            raise ValueError(f"addr={host.addr} is {taken}'s already")
    hosts[host.name.lower()] = host


def _parse_line(words: list[str]) -> list[Host]:
    """The hosts of a line's words. Raises :class:`ValueError` with what is wrong with them."""
    pattern, *options = words
    try:
        names = expand(pattern)
    except ValueError as error:
        raise ValueError(f"{error}; {_EXPECTED}") from None
    bad = next((name for name in names if not _HOST.fullmatch(name)), None)
    if bad is not None:
        user, at, host = pattern.partition("@")
        meant = f"write {host} user={user}" if at and _USER.fullmatch(user) else _EXPECTED
        raise ValueError(f"{bad!r} is no host name; {meant}")
    values: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in _KEYS:
            raise ValueError(f"{option!r} is not understood; {_EXPECTED}")
        if key in values:
            raise ValueError(f"{key} is given twice")
        values[key] = value
    addresses = _addresses(values.get("addr"), len(names))
    _check(values)
    common = Host(
        name="",
        slots=int(values["slots"]),
        device_type=values.get("type"),
        port=int(values["port"]) if "port" in values else None,
        user=values.get("user"),
        proxy=values.get("proxy"),
        via=values.get("via"),
    )
    return [
        replace(common, name=name, addr=address)
        for name, address in zip(names, addresses, strict=True)
    ]


def _check(values: Mapping[str, str]) -> None:
    """Raise :class:`ValueError` for an option of a line that is missing or not of its form."""
    if "slots" not in values:
        raise ValueError(f"slots is missing; {_EXPECTED}")
    for key, (fits, expected) in _OPTIONS.items():
        if key in values and not fits(values[key]):
            raise ValueError(f"{key}={values[key]}: expected {expected}")
    if "via" in values and (complaint := EXECUTORS.missing(values["via"])):
        raise ValueError(f"via={values['via']}: {complaint}")


def _addresses(addr: str | None, count: int) -> list[str | None]:
    """One fabric address a host; a range of names needs a range of as many addresses."""
    if addr is None:
        return [None] * count
    found = expand(addr)
    bad = next((one for one in found if not _HOST.fullmatch(one)), None)
    if bad is not None:
        raise ValueError(f"addr={bad}: expected an address or a host name")
    if len(found) != count:
        raise ValueError(f"addr={addr} is {len(found)} address(es) for {count} host(s)")
    return list(found)


def _mixed_types(hosts: tuple[Host, ...], path: Path | str) -> list[Problem]:
    untyped = [host.name for host in hosts if host.device_type is None]
    if not untyped or len(untyped) == len(hosts):
        return []
    message = f"either every host has a type or none; without one: {compress(untyped)}"
    return [Problem("", message, str(path))]


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a hostfile. A missing file is an error: training on this machine alone is
    never what its absence means."""
    try:
        return parse_hostfile(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        hint = "write it, or leave the key out to train on this machine"
        raise ConfigError(Problem(_HOSTFILE, f"no such file: {path}"), hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(Problem(_HOSTFILE, f"cannot read {path}: {reason}")) from error


def least(*numbers: int | None) -> int:
    """How many hosts take part, or ranks on one: the smallest of what hostfile, YAML and visible
    devices say, of those that are given; 1 if none is."""
    return min((number for number in numbers if number is not None), default=1)


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


def choose_hosts(
    listed: Sequence[Host] | None,
    hostfile: Path | None,
    nnodes: int | None,
    runner_type: str | None = None,
) -> tuple[Host, ...]:
    """The hosts of a run, of those that are ``listed`` in the ``hostfile``; None without one.

    Raises :class:`ConfigError` where nobody names them, where they are all this machine, and
    where the runner's type does not reach them.
    """
    if listed is None:
        if least(nnodes) > 1:
            text = f"{nnodes} hosts, but there is no hostfile that names them"
            hint = "set experiment.runner.hostfile, or nnodes: 1 for this machine"
            raise ConfigError(Problem("experiment.runner.nnodes", text), hint=hint)
        return (Host("localhost"),)
    hosts = tuple(listed)[: least(len(listed), nnodes)]
    # Asking the resolver for each of many names could take minutes; nobody needs the answer.
    ask = is_this_machine if len(hosts) == 1 or runner_type == "local" else is_loopback
    own = socket.gethostname()
    here = [h.name for h in hosts if h.via is None and (h.name == own or ask(h.name))]
    if len(here) > 1:
        problem = Problem(_HOSTFILE, f"{hostfile}: all of {compress(here)} are this machine")
        hint = "name it once, with as many slots as it has devices"
        raise ConfigError(problem, hint=hint)
    if runner_type == "local" and len(here) < len(hosts):
        others = [host.name for host in hosts if host.name not in here]
        problem = Problem(_HOSTFILE, f"{hostfile}: other machines: {compress(others)}")
        hint = "experiment.runner.type: ssh starts there; local is this machine only"
        raise ConfigError(problem, hint=hint)
    return hosts


def meeting_address(given: str | None, hosts: Sequence[Host]) -> str:
    """Where ranks on ``hosts`` meet, unless the user has ``given`` an address."""
    alone = "127.0.0.1" if len(hosts) == 1 else None
    return given or alone or hosts[0].addr or hosts[0].name


def is_loopback(name: str) -> bool:
    """Whether a name or address means each machine itself, whichever it is said to."""
    return name in ("localhost", "::1") or name.startswith("127.")


def is_local_only(hosts: Sequence[Host]) -> bool:
    """Whether a run's only host is this machine: then no SSH is involved."""
    return len(hosts) == 1 and hosts[0].via is None and is_this_machine(hosts[0].name)
