"""known_hosts files: which host keys we trust.

Read by this module rather than by paramiko, whose reader knows neither patterns nor markers,
drops lines it cannot parse in silence and builds a key object for every line: ten thousand lines
are normal on a cluster's login node, and a launch needs a few of them.

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

HASHED = "|1|"
REVOKED = "@revoked"
AUTHORITY = "@cert-authority"
_KRL_MAGIC = b"SSHKRL\n\0"


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file. ``kind`` is the key's type, such as ``ssh-ed25519``."""

    kind: str
    blob: str
    marker: str | None
    where: str

    def matches(self, blob: bytes) -> bool:
        try:
            return base64.b64decode(self.blob) == blob
        except binascii.Error:
            return False


class UnreadableError(Exception):
    """A list of revoked keys that cannot be read: nobody can be trusted then."""


def revoked(path: Path, blob: bytes) -> str | None:
    """Where the user's ``RevokedHostKeys`` names a key, as ``file:line``; None where it does not.

    The file has a public key a line. Raises :class:`UnreadableError` for one that is not there or
    is a binary list (KRL), of which OpenSSH alone knows the format.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}") from error
    if text.startswith(_KRL_MAGIC):
        raise UnreadableError(f"{path}: a binary list (KRL); give a text file with a key a line")
    wanted = base64.b64encode(blob)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith(b"#") and wanted in line.split():
            return f"{path}:{number}"
    return None


@dataclass
class KnownHostsFile:
    """One file, indexed by how its lines name hosts."""

    plain: dict[str, list[KnownKey]] = field(default_factory=dict)
    hashed: list[tuple[bytes, bytes, KnownKey]] = field(default_factory=list)
    patterns: list[tuple[tuple[str, ...], KnownKey]] = field(default_factory=list)

    def add(self, names: str, key: KnownKey) -> None:
        if names.startswith(HASHED):
            salt, _, digest = names[len(HASHED) :].partition("|")
            try:
                self.hashed.append((base64.b64decode(salt), base64.b64decode(digest), key))
            except binascii.Error:
                return
        elif any(character in names for character in "*?!"):
            self.patterns.append((tuple(names.lower().split(",")), key))
        else:
            for name in names.lower().split(","):
                self.plain.setdefault(name, []).append(key)

    def keys_of(self, name: str) -> list[KnownKey]:
        found = list(self.plain.get(name, ()))
        encoded = name.encode()
        found += (
            key
            for salt, digest, key in self.hashed
            if hmac.compare_digest(hmac.digest(salt, encoded, "sha1"), digest)
        )
        found += (key for patterns, key in self.patterns if _matches(patterns, name))
        return found


def _matches(patterns: Sequence[str], name: str) -> bool:
    # Brackets are the port's, not a character class.
    def hits(pattern: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))

    if any(hits(pattern[1:]) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(hits(pattern) for pattern in patterns if not pattern.startswith("!"))


def parse(text: str, path: str) -> KnownHostsFile:
    """Read a known_hosts text. A line that is none is skipped, as OpenSSH does."""
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


def read(path: Path) -> KnownHostsFile:
    """The file at ``path``, read again only after it changed; a file that is not there is empty."""
    try:
        status = path.stat()
    except OSError:
        return KnownHostsFile()
    return _read(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=32)
def _read(path: Path, _modified: int, _size: int) -> KnownHostsFile:
    try:
        return parse(path.read_text(errors="replace"), str(path))
    except OSError:
        return KnownHostsFile()


def lookup(paths: Iterable[Path], name: str) -> list[KnownKey]:
    """All lines of these files about ``name`` (``host``, or ``[host]:port``)."""
    return [key for path in paths for key in read(path).keys_of(name)]


class Verdict(Enum):
    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


def judge(keys: Sequence[KnownKey], kind: str, blob: bytes) -> tuple[Verdict, KnownKey | None]:
    """Compare a host's key with the lines about it; say which line decided."""
    for key in keys:
        if key.marker == REVOKED and key.matches(blob):
            return Verdict.REVOKED, key
    trusted = [key for key in keys if key.marker is None]
    for key in trusted:
        if key.matches(blob):
            return Verdict.KNOWN, key
    for key in trusted:
        if key.kind == kind:
            return Verdict.CHANGED, key
    others = trusted or [key for key in keys if key.marker == AUTHORITY]
    return Verdict.UNKNOWN, others[0] if others else None


def known_kinds(keys: Sequence[KnownKey]) -> list[str]:
    """The key types by which a host is known, so that it can be asked for a key of that type."""
    return list(dict.fromkeys(key.kind for key in keys if key.marker is None))
