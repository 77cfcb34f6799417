"""Copying this project's code and the adapted backend to a host: what differs, and only that.

Hashes decide, not times. Changed files travel as one archive over SFTP, which the host's own
Python unpacks beside what is there; code that this machine does not have is removed, so that a
stale module is never imported. What is no code (environments, data, outputs) is left alone.
"""

from __future__ import annotations

import io
import json
import secrets
import shlex
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from flagscale.errors import FlagscaleError
from flagscale.hosts.answer import END, SAY, ask
from flagscale.hosts.python_world import python_function
from flagscale.hosts.ssh import Connection
from flagscale.hosts.ssh.files import RemoteFiles

_SECONDS = 300.0

_MANIFEST = r"""
say manifest "$(python_program manifest "$project")"
"""

_UNPACK = r"""
umask 077
unpack() { (eval "$setup"; cd /; exec "$python" - "$project" "$archive" "${gone[@]}"); }
unpack <<'END_OF_UNPACK' || exit 1
import os, sys, tarfile
project, archive, gone = sys.argv[1], sys.argv[2], sys.argv[3:]
with tarfile.open(archive) as packed:
    packed.extractall(project)
for path in gone:
    os.remove(os.path.join(project, path))
os.remove(archive)
END_OF_UNPACK
say manifest "$(python_program manifest "$project")"
"""


class CodeError(FlagscaleError):
    """The code of a host could not be made the same as this machine's."""

    exit_code = 2

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: the code could not be copied: {reason}")
        self.host = host


def sync(
    connection: Connection,
    source: Path,
    files: Mapping[str, str],
    *,
    project: Path,
    python: str,
    setup: str,
) -> int:
    """Make the code in ``project`` of a host the same as ``files`` of ``source`` here, given as
    relative paths and SHA-256s. Returns how many files were copied or removed.

    Raises :class:`CodeError` when the host's code still differs afterwards.
    """
    name = connection.target.name
    given = {"project": str(project), "python": python, "setup": setup}
    head = [SAY, *(f"{key}={shlex.quote(value)}" for key, value in given.items())]
    head.append(python_function())
    theirs = _manifest(connection, "\n".join([*head, _MANIFEST, END]), name)
    changed = [path for path, digest in files.items() if theirs.get(path) != digest]
    gone = [path for path in theirs if path not in files]
    if not changed and not gone:
        return 0
    archive = str(project / f".flagscale-{secrets.token_hex(6)}.tar.gz")
    with RemoteFiles(connection) as remote:
        remote.write(archive, pack(source, changed), mode=0o600)
    head += [f"archive={shlex.quote(archive)}", f"gone=({' '.join(map(shlex.quote, gone))})"]
    after = _manifest(connection, "\n".join([*head, _UNPACK, END]), name)
    if after != dict(files):
        differing = sorted(p for p in {*after, *files} if after.get(p) != files.get(p))
        raise CodeError(name, f"{len(differing)} files still differ, such as {differing[0]}")
    return len(changed) + len(gone)


def _manifest(connection: Connection, program: str, name: str) -> dict[str, str]:
    answer = ask(connection, program, _SECONDS)
    try:
        return dict(json.loads(answer.get("manifest")))
    except ValueError:
        raise CodeError(name, "its Python does not list the code that is there") from None


def pack(source: Path, paths: Iterable[str]) -> bytes:
    """An archive of files below ``source``, without owners and times: it is the content that
    counts."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3) as archive:
        for path in sorted(paths):
            data = (source / path).read_bytes()
            entry = tarfile.TarInfo(str(PurePosixPath(path)))
            entry.size = len(data)
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
