"""The user's SSH configuration, resolved to targets: address, user, keys and route of each host.

paramiko parses and matches. This module adds ``Include``, file and line in errors, and the
meaning of the options, and corrects two conditions of ``Match``. Files are read once for all
hosts of a command.
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
DEFAULT_IDENTITIES = ("id_ed25519", "id_ecdsa", "id_rsa")

MAX_INCLUDE_DEPTH = 16
MAX_JUMPS = 8
#: Timeout of a ``Match exec`` command in seconds.
_EXEC_TIMEOUT_SECONDS = 30

_SETTING = re.compile(r"(\w+)(?:\s*=\s*|\s+)(.+)")


@dataclass(frozen=True)
class SshTarget:
    """Resolved SSH options of one host, created by :meth:`.ssh_config.SshConfig.target`.

    ``name`` is the host's name in the hostfile and in messages. ``via`` is the last jump host on
    the route, itself a target with a ``via`` of its own. ``identity_files`` are tried in order.
    If ``default_identities`` is True, the user configured none and these are the default files.
    ``known_hosts`` are the files with trusted host keys. With ``accept_new_host_keys``
    (``StrictHostKeyChecking accept-new``, ``no`` or ``off``) the key of a host without any line is
    appended to the first of them.
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
    accept_new_host_keys: bool = False
    revoked_keys: Path | None = None
    connect_timeout: float | None = None
    via: SshTarget | None = None
    proxy_command: str | None = None

    @property
    def endpoint(self) -> str:
        """Address, followed by the port if it is not the default one, for messages."""
        port = "" if self.port == SSH_PORT else f" port {self.port}"
        return f"{self.address}{port}"

    @property
    def route(self) -> str:
        """``endpoint``, followed by the jump hosts on the way to it, for messages."""
        return self.endpoint if self.via is None else f"{self.endpoint} through {self.via.name}"

    @property
    def known_hosts_name(self) -> str:
        """Name of the host in known_hosts files: HostKeyAlias, or the address and the port."""
        name = (self.host_key_alias or self.address).lower()
        if self.host_key_alias or self.port == SSH_PORT:
            return name
        return f"[{name}]:{self.port}"


@dataclass(frozen=True)
class SshConfig:
    """A parsed configuration. :meth:`target` resolves a host."""

    _parsed: CorrectedSSHConfig
    source: str

    @classmethod
    def load(cls, path: Path | None = None) -> SshConfig:
        """Read ``path`` alone, as ``ssh -F`` does, or the user's and the system's file.

        Raises :class:`ConfigError` if ``path`` does not exist or a line cannot be parsed.
        """
        if path is not None:
            if not path.is_file():
                raise ConfigError(f"SSH configuration {path} does not exist")
            return cls.from_lines(list(_iter_lines(path, path.parent, 0)), str(path))
        user = Path.home() / ".ssh" / "config"
        lines = list(_iter_lines(user, user.parent, 0)) if user.is_file() else []
        if SYSTEM_CONFIG.is_file():
            lines += ["Host *", *_iter_lines(SYSTEM_CONFIG, SYSTEM_CONFIG.parent, 0)]
        return cls.from_lines(lines, str(user))

    @classmethod
    def from_lines(cls, lines: list[str], source: str) -> SshConfig:
        try:
            return cls(CorrectedSSHConfig.from_text("\n".join(lines)), source)
        except paramiko.ConfigParseError as error:
            raise ConfigError(f"SSH configuration {source}: {error}") from error

    def target(
        self,
        name: str,
        *,
        user: str | None = None,
        port: int | None = None,
        proxy: str | None = None,
        hosts_behind: tuple[str, ...] = (),
    ) -> SshTarget:
        """Resolve a host or an alias. Arguments take precedence over the files.

        ``proxy`` has the syntax of ``ssh -J``: ``[user@]host[:port]``, comma-separated in the order
        in which they are passed through; ``none`` is a direct connection. ``hosts_behind`` are the
        hosts that are reached through this one; the recursion sets it to detect loops. Raises
        :class:`ConfigError`.
        """
        route = " -> ".join((*hosts_behind, name))
        if name in hosts_behind:
            raise self._option_error("ProxyJump", f"forms a loop: {route}")
        if len(hosts_behind) > MAX_JUMPS:
            raise self._option_error("ProxyJump", f"takes more than {MAX_JUMPS} jumps: {route}")
        options = self._lookup(name)
        identities = options.get("identityfile")
        direct = SshTarget(
            name=name,
            address=options["hostname"],
            user=user or options.get("user") or getpass.getuser(),
            port=port or self._parse_number(options, "port", SSH_PORT),
            host_key_alias=options.get("hostkeyalias"),
            known_hosts=_known_hosts(options),
            accept_new_host_keys=options.get("stricthostkeychecking", "ask").lower()
            in ("no", "off", "accept-new"),
            revoked_keys=_revoked_keys(options.get("revokedhostkeys")),
            connect_timeout=self._parse_number(options, "connecttimeout", 0) or None,
            agent_socket=_agent_socket(options.get("identityagent")),
            identities_only=options.get("identitiesonly", "no").lower() == "yes",
            identity_files=_identity_files(identities),
            default_identities=identities is None,
        )
        jumps = proxy if proxy is not None else options.get("proxyjump")
        if jumps and jumps.lower() != "none":
            return replace(direct, via=self._resolve_chain(jumps, direct, (*hosts_behind, name)))
        command = None if proxy is not None else options.get("proxycommand")
        return replace(direct, proxy_command=command or None)

    def _resolve_chain(
        self, jumps: str, destination: SshTarget, hosts_behind: tuple[str, ...]
    ) -> SshTarget | None:
        last_hop: SshTarget | None = None
        for index, jump in enumerate(jumps.split(",")):
            user, host, port = self._parse_jump(jump.strip())
            # Only the first hop uses its own ProxyJump; the others are reached through the chain.
            hop = None
            if host != destination.name:
                proxy = None if index == 0 else "none"
                hop = self.target(
                    host, user=user, port=port, proxy=proxy, hosts_behind=hosts_behind
                )
            if hop is None or (hop.address, hop.port) == (destination.address, destination.port):
                # `Host *` with a ProxyJump also matches the jump host, which is reached directly.
                return last_hop
            last_hop = hop if index == 0 else replace(hop, via=last_hop)
        return last_hop

    def _parse_jump(self, jump: str) -> tuple[str | None, str, int | None]:
        user, _, endpoint = jump.removeprefix("ssh://").rpartition("@")
        bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?", endpoint)
        match = bracketed or re.fullmatch(r"([^:\s]+)(?::(\d+))?", endpoint)
        if match is None:
            raise self._option_error("ProxyJump", f"{jump!r} is not [user@]host[:port]")
        return user or None, match[1], int(match[2]) if match[2] else None

    def _lookup(self, name: str) -> Mapping[str, str]:
        try:
            return self._parsed.lookup(name)
        except paramiko.SSHException as error:
            raise ConfigError(f"SSH configuration {self.source}: {error}") from error

    def _parse_number(self, options: Mapping[str, str], key: str, default: int) -> int:
        text = options.get(key)
        if text is None or text.lower() == "none":
            return default
        if not text.isdigit():
            raise self._option_error(key, f"expected a number, found {text!r}")
        return int(text)

    def _option_error(self, key: str, message: str) -> ConfigError:
        return ConfigError(Problem(key=key, message=message, where=self.source))


def _iter_lines(path: Path, base: Path, depth: int) -> Iterator[str]:
    """Yield the lines of a file, with each Include replaced by the lines of its files."""
    if depth > MAX_INCLUDE_DEPTH:
        raise ConfigError(f"SSH configuration {path}: Include goes deeper than {MAX_INCLUDE_DEPTH}")
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
                # Path.glob does not support absolute patterns.
                full_pattern = base / Path(pattern.strip('"')).expanduser()
                for included in sorted(glob.glob(str(full_pattern))):  # noqa: PTH207
                    yield from _iter_lines(Path(included), base, depth + 1)
            # The following lines belong to this file's block again, not to the last block of an
            # included file.
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


def _identity_files(configured: object) -> tuple[Path, ...]:
    """Return the configured key files, which paramiko passes as a list, or else the default
    files."""
    if configured is None:
        defaults = (Path.home() / ".ssh" / name for name in DEFAULT_IDENTITIES)
        return tuple(path for path in defaults if path.is_file())
    words = [str(name) for name in configured] if isinstance(configured, list) else []
    return tuple(Path(word).expanduser() for word in words if word.lower() != "none")


class CorrectedSSHConfig(paramiko.SSHConfig):
    """paramiko's parser with two corrections of ``Match``.

    ``Match host`` is compared with HostName after its ``%h`` has been replaced; paramiko
    compares the text with its tokens. ``Match exec`` does not use this process's stdin; paramiko
    runs commands through a package that copies stdin to them.
    """

    def _does_match(
        self,
        match_list: list[dict[str, Any]],
        target_hostname: str,
        canonical: bool,
        final: bool,
        options: Mapping[str, Any],
    ) -> bool:
        resolved_options = type(options)(options)  # type: ignore[call-arg]
        if "hostname" in resolved_options:
            hostname = resolved_options["hostname"].replace("%h", target_hostname)
            resolved_options["hostname"] = hostname  # type: ignore[index]
        commands = [condition for condition in match_list if condition["type"] == "exec"]
        plain_conditions = [condition for condition in match_list if condition["type"] != "exec"]
        matches = super()._does_match  # type: ignore[misc]
        if plain_conditions and not matches(
            plain_conditions, target_hostname, canonical, final, resolved_options
        ):
            return False
        for condition in commands:
            command = self._tokenize(  # type: ignore[attr-defined]
                resolved_options, target_hostname, "match-exec", condition["param"]
            )
            if _command_succeeds(command) == condition["negate"]:
                return False
        return bool(match_list)


@functools.cache
def _command_succeeds(command: str) -> bool:
    """Return True if the user's command exits with 0. A shell runs it, as specified in
    ssh_config(5).
    """
    try:
        process = subprocess.run(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=_EXEC_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return process.returncode == 0
