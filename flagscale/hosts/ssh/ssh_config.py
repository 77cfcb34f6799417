"""The user's SSH configuration, turned into targets: where and how to log in.

paramiko parses and matches; this module adds ``Include``, file and line in errors, and the
meaning of the options, and puts two conditions of ``Match`` right. Read once for all hosts of an
action.
"""

from __future__ import annotations

import functools
import getpass
import glob
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paramiko

from flagscale.errors import ConfigError, Problem

SSH_PORT = 22
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
USUAL_IDENTITIES = ("id_ed25519", "id_ecdsa", "id_rsa")

DEEPEST_INCLUDE = 16
MOST_JUMPS = 8
#: Seconds a ``Match exec`` command may take.
_PATIENCE = 30

_SETTING = re.compile(r"(\w+)(?:\s*=\s*|\s+)(.+)")


@dataclass(frozen=True)
class SshTarget:
    """One host as SSH reaches it. Made by :meth:`.ssh_config.SshConfig.target`.

    ``name`` is what the user calls the host and what messages say. ``via`` is the last jump host
    on the way, itself a target with a ``via`` of its own. ``identity_files`` are tried in order;
    ``default_identities`` says that the user named none and these are the usual ones.
    """

    name: str
    address: str
    user: str
    port: int = SSH_PORT
    identity_files: tuple[Path, ...] = ()
    default_identities: bool = False
    identities_only: bool = False
    agent_socket: str | None = None
    known_hosts: tuple[Path, ...] = ()
    host_key_alias: str | None = None
    remember_new_keys: bool = False
    revoked_keys: Path | None = None
    connect_timeout: float | None = None
    via: SshTarget | None = None
    proxy_command: str | None = None

    @property
    def endpoint(self) -> str:
        """The address, and the port where it is not the usual one, for messages."""
        port = "" if self.port == SSH_PORT else f" port {self.port}"
        return f"{self.address}{port}"

    @property
    def route(self) -> str:
        """``endpoint``, and the jump hosts on the way to it."""
        return self.endpoint if self.via is None else f"{self.endpoint} through {self.via.name}"

    @property
    def known_as(self) -> str:
        """The host's name in known_hosts files."""
        name = (self.host_key_alias or self.address).lower()
        if self.host_key_alias or self.port == SSH_PORT:
            return name
        return f"[{name}]:{self.port}"


@dataclass(frozen=True)
class SshConfig:
    """A parsed configuration. :meth:`target` looks a host up in it."""

    _parsed: Parsed
    source: str

    @classmethod
    def load(cls, path: Path | None = None) -> SshConfig:
        """Read ``path`` alone, as ``ssh -F`` does, or the user's file and the system's.

        Raises :class:`ConfigError` for a named file that is not there and for lines that cannot
        be understood.
        """
        if path is not None:
            if not path.is_file():
                raise ConfigError(f"SSH configuration {path} does not exist")
            return cls.from_lines(list(_lines(path, path.parent, 0)), str(path))
        user = Path.home() / ".ssh" / "config"
        lines = list(_lines(user, user.parent, 0)) if user.is_file() else []
        if SYSTEM_CONFIG.is_file():
            lines += ["Host *", *_lines(SYSTEM_CONFIG, SYSTEM_CONFIG.parent, 0)]
        return cls.from_lines(lines, str(user))

    @classmethod
    def from_lines(cls, lines: list[str], source: str) -> SshConfig:
        try:
            return cls(Parsed.from_text("\n".join(lines)), source)
        except paramiko.ConfigParseError as error:
            raise ConfigError(f"SSH configuration {source}: {error}") from error

    def target(
        self,
        name: str,
        *,
        user: str | None = None,
        port: int | None = None,
        proxy: str | None = None,
        seen: tuple[str, ...] = (),
    ) -> SshTarget:
        """How to reach ``name``, a host or an alias. What is given here wins over the files.

        ``proxy`` is written as for ``ssh -J``: ``[user@]host[:port]``, several with commas in the
        order they are passed through; ``none`` for a direct connection. ``seen``: the hosts that
        are reached through this one.
        """
        if name in seen or len(seen) > MOST_JUMPS:
            raise self._wrong("ProxyJump", f"goes in a circle: {' -> '.join((*seen, name))}")
        options = self._lookup(name)
        identities = options.get("identityfile")
        direct = SshTarget(
            name=name,
            address=options["hostname"],
            user=user or options.get("user") or getpass.getuser(),
            port=port or self._number(options, "port", SSH_PORT),
            host_key_alias=options.get("hostkeyalias"),
            known_hosts=_known_hosts(options),
            remember_new_keys=options.get("stricthostkeychecking", "ask").lower()
            in ("no", "off", "accept-new"),
            revoked_keys=_revoked_keys(options.get("revokedhostkeys")),
            connect_timeout=self._number(options, "connecttimeout", 0) or None,
            agent_socket=_agent_socket(options.get("identityagent")),
            identities_only=options.get("identitiesonly", "no").lower() == "yes",
            identity_files=_identity_files(identities),
            default_identities=identities is None,
        )
        jumps = proxy if proxy is not None else options.get("proxyjump")
        if jumps and jumps.lower() != "none":
            return replace(direct, via=self._chain(jumps, direct, (*seen, name)))
        command = None if proxy is not None else options.get("proxycommand")
        return replace(direct, proxy_command=command or None)

    def _chain(self, jumps: str, last: SshTarget, seen: tuple[str, ...]) -> SshTarget | None:
        via: SshTarget | None = None
        for index, jump in enumerate(jumps.split(",")):
            user, host, port = self._jump(jump.strip())
            # Only the first hop is reached by its own ProxyJump; the others through the chain.
            hop = None
            if host != last.name:
                proxy = None if index == 0 else "none"
                hop = self.target(host, user=user, port=port, proxy=proxy, seen=seen)
            if hop is None or (hop.address, hop.port) == (last.address, last.port):
                # `Host *` with a ProxyJump covers the jump host too: it is reached directly.
                return via
            via = hop if index == 0 else replace(hop, via=via)
        return via

    def _jump(self, jump: str) -> tuple[str | None, str, int | None]:
        user, _, endpoint = jump.removeprefix("ssh://").rpartition("@")
        bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?", endpoint)
        found = bracketed or re.fullmatch(r"([^:\s]+)(?::(\d+))?", endpoint)
        if found is None:
            raise self._wrong("ProxyJump", f"{jump!r} is not [user@]host[:port]")
        return user or None, found[1], int(found[2]) if found[2] else None

    def _lookup(self, name: str) -> Mapping[str, str]:
        try:
            return self._parsed.lookup(name)
        except paramiko.SSHException as error:
            raise ConfigError(f"SSH configuration {self.source}: {error}") from error

    def _number(self, options: Mapping[str, str], key: str, default: int) -> int:
        text = options.get(key)
        if text is None or text.lower() == "none":
            return default
        if not text.isdigit():
            raise self._wrong(key, f"expected a number, found {text!r}")
        return int(text)

    def _wrong(self, key: str, message: str) -> ConfigError:
        return ConfigError(Problem(key=key, message=message, where=self.source))


def _lines(path: Path, base: Path, depth: int) -> Iterator[str]:
    """The file's lines with those of the files it includes in their place."""
    if depth > DEEPEST_INCLUDE:
        raise ConfigError(f"SSH configuration {path}: Include goes deeper than {DEEPEST_INCLUDE}")
    try:
        text = path.read_text(errors="surrogateescape")
    except OSError as error:
        raise ConfigError(f"SSH configuration {path} cannot be read: {error.strerror}") from error
    block = "Host *"
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        setting = _SETTING.match(stripped)
        if setting is None:
            where = f"{path}:{number}"
            raise ConfigError(Problem("", f"not an SSH setting: {stripped!r}", where))
        keyword = setting[1].lower()
        if keyword == "include":
            for pattern in setting[2].split():
                # Path.glob takes no absolute patterns.
                wanted = base / Path(pattern.strip('"')).expanduser()
                for found in sorted(glob.glob(str(wanted))):  # noqa: PTH207
                    yield from _lines(Path(found), base, depth + 1)
            # What follows belongs to this file's block again, not to the included file's last.
            yield block
            continue
        if keyword in ("host", "match"):
            block = stripped
        yield stripped


def _known_hosts(options: Mapping[str, str]) -> tuple[Path, ...]:
    names = (
        options.get("userknownhostsfile", USER_KNOWN_HOSTS),
        options.get("globalknownhostsfile", SYSTEM_KNOWN_HOSTS),
    )
    words = (word for name in names if name.lower() != "none" for word in name.split())
    return tuple(Path(word.replace("%d", str(Path.home()))).expanduser() for word in words)


def _revoked_keys(option: str | None) -> Path | None:
    return None if option is None or option.lower() == "none" else Path(option).expanduser()


def _agent_socket(option: str | None) -> str | None:
    if option is None or option == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if option.lower() == "none":
        return None
    if option.startswith("$"):
        return os.environ.get(option.strip("${}")) or None
    return str(Path(option).expanduser())


def _identity_files(named: object) -> tuple[Path, ...]:
    """Those that the user named, of which paramiko gives a list; else the usual ones."""
    if named is None:
        usual = (Path.home() / ".ssh" / name for name in USUAL_IDENTITIES)
        return tuple(path for path in usual if path.is_file())
    words = [str(name) for name in named] if isinstance(named, list) else []
    return tuple(Path(word).expanduser() for word in words if word.lower() != "none")


class Parsed(paramiko.SSHConfig):
    """``Match host`` sees a HostName with its ``%h`` replaced; ``Match exec`` leaves stdin alone.

    paramiko compares with the text of HostName, tokens and all, and runs commands through a
    package that copies this process's stdin to them.
    """

    def _does_match(
        self,
        match_list: list[dict[str, Any]],
        target_hostname: str,
        canonical: bool,
        final: bool,
        options: Mapping[str, Any],
    ) -> bool:
        seen = type(options)(options)  # type: ignore[call-arg]
        if "hostname" in seen:
            seen["hostname"] = seen["hostname"].replace("%h", target_hostname)  # type: ignore[index]
        commands = [condition for condition in match_list if condition["type"] == "exec"]
        others = [condition for condition in match_list if condition["type"] != "exec"]
        decide = super()._does_match  # type: ignore[misc]
        if others and not decide(others, target_hostname, canonical, final, seen):
            return False
        for condition in commands:
            command = self._tokenize(  # type: ignore[attr-defined]
                seen, target_hostname, "match-exec", condition["param"]
            )
            if _succeeds(command) == condition["negate"]:
                return False
        return bool(match_list)


@functools.cache
def _succeeds(command: str) -> bool:
    """Whether the user's command ends with 0. It is a shell's, as in ssh_config(5)."""
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
