"""Parser of known_hosts files, and the decision whether a host key is trusted.

paramiko's parser is not used: it supports neither patterns nor markers, silently drops lines
that it cannot parse, and builds a key object for every line. Ten thousand lines are normal on a
cluster's login node, and a launch needs a few of them.

Format: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT".
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import functools
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

HASHED_PREFIX = "|1|"
REVOKED_MARKER = "@revoked"
AUTHORITY_MARKER = "@cert-authority"
_KRL_MAGIC = b"SSHKRL\n\0"


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file. ``kind`` is the key's type, such as ``ssh-ed25519``, ``blob``
    the key in base64, ``marker`` the line's ``@`` word if it has one, and ``location`` is
    ``file:line``.
    """

    kind: str
    blob: str
    marker: str | None
    location: str

    def matches(self, blob: bytes) -> bool:
        try:
            return base64.b64decode(self.blob) == blob
        except binascii.Error:
            return False


class UnreadableError(Exception):
    """A list of revoked keys cannot be read, so that no host can be trusted."""


def find_revoked(path: Path, blob: bytes) -> str | None:
    """Return the line of the user's ``RevokedHostKeys`` that names a key, as ``file:line``; None if
    no line does.

    The file has one public key per line. Raises :class:`UnreadableError` if it is missing or a
    binary list (KRL), whose format only OpenSSH reads.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}") from error
    if text.startswith(_KRL_MAGIC):
        raise UnreadableError(f"{path}: a binary list (KRL); give a text file with a key a line")
    encoded_key = base64.b64encode(blob)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith(b"#") and encoded_key in line.split():
            return f"{path}:{number}"
    return None


@dataclass
class KnownHostsFile:
    """Contents of one file, indexed by the form in which its lines name hosts."""

    keys_by_name: dict[str, list[KnownKey]] = field(default_factory=dict)
    hashed_keys: list[tuple[bytes, bytes, KnownKey]] = field(default_factory=list)
    pattern_keys: list[tuple[tuple[str, ...], KnownKey]] = field(default_factory=list)

    def add(self, names: str, key: KnownKey) -> None:
        if names.startswith(HASHED_PREFIX):
            salt, _, digest = names[len(HASHED_PREFIX) :].partition("|")
            try:
                self.hashed_keys.append((base64.b64decode(salt), base64.b64decode(digest), key))
            except binascii.Error:
                return
        elif any(character in names for character in "*?!"):
            self.pattern_keys.append((tuple(names.lower().split(",")), key))
        else:
            for name in names.lower().split(","):
                self.keys_by_name.setdefault(name, []).append(key)

    def find_keys(self, name: str) -> list[KnownKey]:
        keys = list(self.keys_by_name.get(name, ()))
        encoded = name.encode()
        keys += (
            key
            for salt, digest, key in self.hashed_keys
            if hmac.compare_digest(hmac.digest(salt, encoded, "sha1"), digest)
        )
        keys += (key for patterns, key in self.pattern_keys if _matches_any(patterns, name))
        return keys


def _matches_any(patterns: Sequence[str], name: str) -> bool:
    # Brackets enclose a host before its port; they are no character class.
    def matches_pattern(pattern: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))

    if any(matches_pattern(pattern[1:]) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(matches_pattern(pattern) for pattern in patterns if not pattern.startswith("!"))


def parse_known_hosts(text: str, path: str) -> KnownHostsFile:
    """Parse the text of a known_hosts file. Invalid lines are skipped, as OpenSSH does."""
    file = KnownHostsFile()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else None
        if len(words) >= 3:
            names, kind, blob = words[:3]
            file.add(names, KnownKey(kind, blob, marker, f"{path}:{number}"))
    return file


def read_known_hosts(path: Path) -> KnownHostsFile:
    """Return the contents of a file, which is read again only after it changed. A missing file is
    empty.
    """
    try:
        status = path.stat()
    except OSError:
        return KnownHostsFile()
    return _read_cached(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=32)
def _read_cached(path: Path, _modified: int, _size: int) -> KnownHostsFile:
    try:
        return parse_known_hosts(path.read_text(errors="replace"), str(path))
    except OSError:
        return KnownHostsFile()


def lookup_keys(paths: Iterable[Path], name: str) -> list[KnownKey]:
    """Return all lines of these files about ``name`` (``host``, or ``[host]:port``)."""
    return [key for path in paths for key in read_known_hosts(path).find_keys(name)]


class HostKeyStatus(Enum):
    """Result of comparing a host's key with the known keys."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


def check_host_key(
    keys: Sequence[KnownKey], kind: str, blob: bytes
) -> tuple[HostKeyStatus, KnownKey | None]:
    """Compare a host's key with the lines about the host.

    Returns:
        The status, and the line that decided it. For an unknown key that is a line about the host
        with another key type or a certificate authority, or None if no line is about the host.
    """
    for key in keys:
        if key.marker == REVOKED_MARKER and key.matches(blob):
            return HostKeyStatus.REVOKED, key
    trusted = [key for key in keys if key.marker is None]
    for key in trusted:
        if key.matches(blob):
            return HostKeyStatus.KNOWN, key
    for key in trusted:
        if key.kind == kind:
            return HostKeyStatus.CHANGED, key
    candidates = trusted or [key for key in keys if key.marker == AUTHORITY_MARKER]
    return HostKeyStatus.UNKNOWN, candidates[0] if candidates else None


def list_trusted_kinds(keys: Sequence[KnownKey]) -> list[str]:
    """Return the key types of trusted lines, to request a key of such a type from the host."""
    return list(dict.fromkeys(key.kind for key in keys if key.marker is None))
