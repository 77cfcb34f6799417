"""Synchronization of this project's code and the patched backend with a host.

Content hashes decide, not modification times. Changed files are sent as one archive, which the
host's Python unpacks in place. Code that this machine does not have is removed, so that a stale
module is never imported. Other files (environments, data, outputs) are not touched.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from flagscale.errors import FlagscaleError
from flagscale.hosts.connection import HostConnection
from flagscale.hosts.program import build_program, run_program
from flagscale.hosts.python_environment import python_function

_TIMEOUT_SECONDS = 300.0
_MANIFEST = Path(__file__).with_name("manifest.sh")
_UNPACK = Path(__file__).with_name("unpack.py")


class CodeError(FlagscaleError):
    """Failure to make a host's code identical to this machine's."""

    exit_code = 2

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: the code could not be copied: {reason}")


def sync_code(
    connection: HostConnection,
    source: Path,
    files: Mapping[str, str],
    *,
    project: Path,
    python: str,
    setup: str,
) -> int:
    """Make the code in ``project`` on a host identical to ``files`` of ``source`` on this machine.

    Args:
        files: SHA-256 digests by relative path.

    Returns:
        Number of files that were copied or removed.

    Raises:
        CodeError: If the host's code still differs afterwards.
    """
    values = {"project": str(project), "python": python, "setup": setup}
    manifest = build_program(_MANIFEST, values, python_function())
    host_files = _read_manifest(connection, manifest)
    changed = [path for path, digest in files.items() if host_files.get(path) != digest]
    removed = [path for path in host_files if path not in files]
    if not changed and not removed:
        return 0
    run = 'eval "$1"; cd / && exec "$2" -c "$3" "$4"'
    unpack = _UNPACK.read_text(encoding="utf-8")
    argv = ["bash", "-c", run, "flagscale", setup, python, unpack, str(project)]
    result = connection.run(
        argv, stdin=pack_archive(source, changed, removed), timeout=_TIMEOUT_SECONDS
    )
    if not result.ok:
        lines = result.error_text.strip().splitlines() or [f"exit code {result.exit_status}"]
        raise CodeError(connection.name, lines[-1])
    host_files = _read_manifest(connection, manifest)
    if host_files != dict(files):
        differing = sorted(
            path for path in {*host_files, *files} if host_files.get(path) != files.get(path)
        )
        reason = f"{len(differing)} files still differ, such as {differing[0]}"
        raise CodeError(connection.name, reason)
    return len(changed) + len(removed)


def _read_manifest(connection: HostConnection, program: str) -> dict[str, str]:
    try:
        return dict(json.loads(run_program(connection, program, _TIMEOUT_SECONDS).get("manifest")))
    except ValueError:
        reason = "its Python cannot list the code of the project's directory"
        raise CodeError(connection.name, reason) from None


def pack_archive(source: Path, paths: Iterable[str], removed: Iterable[str] = ()) -> bytes:
    """Return a gzipped tar archive of files below ``source``, without owners and modification
    times.

    Its first member, which has an empty name, is a JSON list of the files to remove.
    """
    buffer = io.BytesIO()
    contents = {str(PurePosixPath(path)): source / path for path in sorted(paths)}
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3) as archive:
        for path in ("", *contents):
            data = contents[path].read_bytes() if path else json.dumps(sorted(removed)).encode()
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
