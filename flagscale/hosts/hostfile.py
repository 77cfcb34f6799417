"""Hosts of a run: the hostfile, and the number of hosts and ranks.

A hostfile has one line per host, ``host slots=N [type=T] [port=] [user=] [addr=] [proxy=]``. A
name may be a range such as ``node[01-16]``. Blank lines and ``#`` comments are skipped. Every
invalid line is reported with its number.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from flagscale.errors import ConfigError, Problem
from flagscale.hosts.connection import CONNECTION_FACTORIES
from flagscale.hosts.names import compress_names, expand_pattern

_HOST_PATTERN = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._\-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*"
)
_NUMBER_PATTERN = re.compile(r"[1-9][0-9]*")
_USER_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*[$]?")
_LARGEST_PORT = 65535
_HOSTFILE_KEY = "experiment.runner.hostfile"
_HOSTS_KEY = "experiment.runner.hosts"
_OPTIONS: dict[str, tuple[Callable[[str], object], str]] = {
    "slots": (_NUMBER_PATTERN.fullmatch, "a whole number of at least 1"),
    "type": (re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]*").fullmatch, "a word such as A800"),
    "port": (
        lambda text: _NUMBER_PATTERN.fullmatch(text) and int(text) <= _LARGEST_PORT,
        f"a number from 1 to {_LARGEST_PORT}",
    ),
    "user": (_USER_PATTERN.fullmatch, "the name of an account"),
    "proxy": (
        re.compile(r"[A-Za-z0-9_.\-@:\[\],]+").fullmatch,
        "[user@]host[:port], as for ssh -J",
    ),
}
"""Options of a line: a function that returns a true value for valid text, and a description of
valid text for messages."""
_OPTION_NAMES = (*_OPTIONS, "addr", "via")
_SYNTAX_HINT = "expected `host slots=N [type=T] [port=P] [user=U] [addr=A] [proxy=J] [via=V]`"


@dataclass(frozen=True)
class Host:
    """One host of a run. ``slots`` is the number of ranks, None where it is not specified.

    ``port``, ``user`` and ``proxy`` (in the syntax of ``ssh -J``) override the user's SSH
    configuration. ``addr`` is the host's address in the network between ranks, where it differs
    from the name that SSH uses. ``via`` selects another kind of connection than SSH, see
    :data:`.connection.CONNECTION_FACTORIES`.
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
    """Parse a hostfile and return its hosts in order.

    Raises :class:`ConfigError` with all problems: lines that cannot be parsed, slots that are
    not positive, hosts or addresses that appear twice, hosts with and without a type, no host at
    all.
    """
    # Some editors begin a file with a byte-order mark.
    lines = enumerate(text.removeprefix("\ufeff").splitlines(), start=1)
    hosts, problems = _parse_lines(((f"{path}:{number}", line) for number, line in lines), "")
    if not problems and not hosts:
        problems.append(Problem("", f"no host in it; {_SYNTAX_HINT}", str(path)))
    problems.extend(_find_mixed_types(hosts, "", str(path)))
    if problems:
        raise ConfigError(problems)
    return hosts


def parse_host_list(lines: Sequence[str], location: str | None = None) -> tuple[Host, ...]:
    """Parse the hosts of ``experiment.runner.hosts``: lines of a hostfile, whose ``slots`` may be
    missing.

    Raises :class:`ConfigError` with all problems. ``location`` is the key's source location.
    """
    hosts, problems = _parse_lines(
        ((location, line) for line in lines), _HOSTS_KEY, requires_slots=False
    )
    problems.extend(_find_mixed_types(hosts, _HOSTS_KEY, location))
    if problems:
        raise ConfigError(problems)
    return hosts


def _parse_lines(
    lines: Iterable[tuple[str | None, str]], key: str, *, requires_slots: bool = True
) -> tuple[tuple[Host, ...], list[Problem]]:
    """Parse lines, each with its source location, and return their hosts and problems."""
    hosts: dict[str, Host] = {}
    addresses: dict[str, str] = {}
    problems: list[Problem] = []
    for location, line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            for host in _parse_line(words, requires_slots=requires_slots):
                _add_host(host, hosts, addresses)
        except ValueError as error:
            problems.append(Problem(key, str(error), location))
    return tuple(hosts.values()), problems


def _add_host(host: Host, hosts: dict[str, Host], addresses: dict[str, str]) -> None:
    """Add a host to ``hosts`` by its lower-case name (DNS ignores case) and to ``addresses`` by its
    address. Raises :class:`ValueError` for duplicates.
    """
    duplicate = hosts.get(host.name.lower())
    if duplicate is not None:
        note = "" if duplicate.name == host.name else f": {duplicate.name!r} is the same name"
        raise ValueError(f"host {host.name!r} is named twice{note}")
    if host.addr is not None:
        owner = addresses.setdefault(host.addr.lower(), host.name)
        if owner != host.name:
            raise ValueError(f"addr={host.addr} is already the address of {owner}")
    hosts[host.name.lower()] = host


def _parse_line(words: list[str], *, requires_slots: bool) -> list[Host]:
    """Return the hosts of one line, split into words. Raises :class:`ValueError` with the
    problem."""
    pattern, *options = words
    try:
        names = expand_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"{error}; {_SYNTAX_HINT}") from None
    invalid_name = next((name for name in names if not _HOST_PATTERN.fullmatch(name)), None)
    if invalid_name is not None:
        user, separator, host = pattern.partition("@")
        suggestion = (
            f"write {host} user={user}"
            if separator and _USER_PATTERN.fullmatch(user)
            else _SYNTAX_HINT
        )
        raise ValueError(f"{invalid_name!r} is not a host name; {suggestion}")
    values: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in _OPTION_NAMES:
            raise ValueError(f"{option!r} is not an option; {_SYNTAX_HINT}")
        if key in values:
            raise ValueError(f"{key} is given twice")
        values[key] = value
    addresses = _expand_addresses(values.get("addr"), len(names))
    if requires_slots and "slots" not in values:
        raise ValueError(f"slots is missing; {_SYNTAX_HINT}")
    _check_options(values)
    template = Host(
        name="",
        slots=int(values["slots"]) if "slots" in values else None,
        device_type=values.get("type"),
        port=int(values["port"]) if "port" in values else None,
        user=values.get("user"),
        proxy=values.get("proxy"),
        via=values.get("via"),
    )
    return [
        replace(template, name=name, addr=address)
        for name, address in zip(names, addresses, strict=True)
    ]


def _check_options(values: Mapping[str, str]) -> None:
    """Raise :class:`ValueError` for an invalid option."""
    for key, (is_valid, expected) in _OPTIONS.items():
        if key in values and not is_valid(values[key]):
            raise ValueError(f"{key}={values[key]}: expected {expected}")
    if "via" in values and (reason := CONNECTION_FACTORIES.explain_missing(values["via"])):
        raise ValueError(f"via={values['via']}: {reason}")


def _expand_addresses(addr: str | None, count: int) -> list[str | None]:
    """Return an address for each of ``count`` hosts. A range of names requires an equally long
    range of addresses.
    """
    if addr is None:
        return [None] * count
    addresses = expand_pattern(addr)
    invalid_address = next((name for name in addresses if not _HOST_PATTERN.fullmatch(name)), None)
    if invalid_address is not None:
        raise ValueError(f"addr={invalid_address}: expected an address or a host name")
    if len(addresses) != count:
        raise ValueError(f"addr={addr} is {len(addresses)} address(es) for {count} host(s)")
    return list(addresses)


def _find_mixed_types(hosts: tuple[Host, ...], key: str, location: str | None) -> list[Problem]:
    untyped = [host.name for host in hosts if host.device_type is None]
    if not untyped or len(untyped) == len(hosts):
        return []
    message = f"either every host has a type or none; without one: {compress_names(untyped)}"
    return [Problem(key, message, location)]


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read and parse a hostfile.

    Raises :class:`ConfigError` for a missing file, too: its absence never means to train on this
    machine alone.
    """
    try:
        return parse_hostfile(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        hint = "write it, or omit the key to train on this machine"
        raise ConfigError(Problem(_HOSTFILE_KEY, f"no such file: {path}"), hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(Problem(_HOSTFILE_KEY, f"cannot read {path}: {reason}")) from error


def smallest_limit(*numbers: int | None) -> int:
    """Return the smallest of the given numbers, ignoring None; 1 if all are None.

    Used for the number of hosts, and of ranks per host, where hostfile, YAML and visible devices
    each set a limit.
    """
    return min((number for number in numbers if number is not None), default=1)


@lru_cache(maxsize=256)
def is_this_machine(name: str) -> bool:
    """Return True if a name or address belongs to this machine: a socket can be bound to it."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, *_, address in addresses)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def choose_hosts(
    listed_hosts: Sequence[Host] | None,
    hostfile: Path | None,
    nnodes: int | None,
    runner_type: str | None = None,
) -> tuple[Host, ...]:
    """Return the hosts of a run.

    Args:
        listed_hosts: hosts that the YAML names; None if it names none.
        hostfile: path of the hostfile, for messages; None for ``experiment.runner.hosts``.
        nnodes: number of hosts to use; None for all.
        runner_type: type of the runner, such as ``local`` or ``ssh``.

    Raises:
        ConfigError: several hosts but no hostfile, several names of this machine, or hosts that a
            runner of this type cannot reach.
    """
    if listed_hosts is None:
        if smallest_limit(nnodes) > 1:
            message = f"{nnodes} hosts, but no hostfile or `hosts` names them"
            hint = "set experiment.runner.hostfile, or nnodes: 1 for this machine"
            raise ConfigError(Problem("experiment.runner.nnodes", message), hint=hint)
        return (Host("localhost"),)
    hosts = tuple(listed_hosts)[: smallest_limit(len(listed_hosts), nnodes)]
    # With several hosts over SSH no name is resolved: this could take minutes, and only obvious
    # names of this machine matter.
    is_local = is_this_machine if len(hosts) == 1 or runner_type == "local" else is_loopback
    hostname = socket.gethostname()
    key = _HOSTS_KEY if hostfile is None else _HOSTFILE_KEY
    prefix = "" if hostfile is None else f"{hostfile}: "
    local_names = [
        h.name for h in hosts if h.via is None and (h.name == hostname or is_local(h.name))
    ]
    if len(local_names) > 1:
        problem = Problem(key, f"{prefix}all of {compress_names(local_names)} are this machine")
        hint = "list it once, with as many slots as it has devices"
        raise ConfigError(problem, hint=hint)
    if runner_type == "local" and len(local_names) < len(hosts):
        remote_names = [host.name for host in hosts if host.name not in local_names]
        problem = Problem(key, f"{prefix}other machines: {compress_names(remote_names)}")
        hint = "experiment.runner.type: ssh starts ranks on other machines, local on this one only"
        raise ConfigError(problem, hint=hint)
    return hosts


def rendezvous_address(configured: str | None, hosts: Sequence[Host]) -> str:
    """Return the rendezvous address of ranks on ``hosts``: the ``configured`` one, else the
    loopback address for a single host, else the first host's address.
    """
    loopback_address = "127.0.0.1" if len(hosts) == 1 else None
    return configured or loopback_address or hosts[0].addr or hosts[0].name


def is_loopback(name: str) -> bool:
    """Return True if a name or address refers to the local machine on every host."""
    return name in ("localhost", "::1") or name.startswith("127.")


def is_local_only(hosts: Sequence[Host]) -> bool:
    """Return True if a run's only host is this machine, so that no SSH is involved."""
    return len(hosts) == 1 and hosts[0].via is None and is_this_machine(hosts[0].name)
