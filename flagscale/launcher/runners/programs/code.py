"""Copying this project's code and the adapted backend to a host: what differs, and only that.

Hashes decide, not times. Changed files travel as one archive, which the host's own Python unpacks
beside what is there; code that this machine does not have is removed, so that a stale module is
never imported. What is no code (environments, data, outputs) is left alone.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from flagscale.errors import FlagscaleError
from flagscale.hosts.executor import Executor
from flagscale.hosts.program import ask, program
from flagscale.hosts.python_world import python_function

_SECONDS = 300.0
_MANIFEST = Path(__file__).with_name("manifest.sh")
_UNPACK = Path(__file__).with_name("unpack.py")


class CodeError(FlagscaleError):
    """The code of a host could not be made the same as this machine's."""

    exit_code = 2

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: the code could not be copied: {reason}")


def sync(
    executor: Executor,
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
    given = {"project": str(project), "python": python, "setup": setup}
    manifest = program(_MANIFEST, given, python_function())
    theirs = _manifest(executor, manifest)
    changed = [path for path, digest in files.items() if theirs.get(path) != digest]
    gone = [path for path in theirs if path not in files]
    if not changed and not gone:
        return 0
    run = 'eval "$1"; cd / && exec "$2" -c "$3" "$4"'
    unpack = _UNPACK.read_text(encoding="utf-8")
    argv = ["bash", "-c", run, "flagscale", setup, python, unpack, str(project)]
    done = executor.run(argv, stdin=pack(source, changed, gone), timeout=_SECONDS)
    if not done.ok:
        said = done.error_text.strip().splitlines()[-1:] or [f"exit code {done.exit_status}"]
        raise CodeError(executor.name, said[0])
    after = _manifest(executor, manifest)
    if after != dict(files):
        differing = sorted(p for p in {*after, *files} if after.get(p) != files.get(p))
        what = f"{len(differing)} files still differ, such as {differing[0]}"
        raise CodeError(executor.name, what)
    return len(changed) + len(gone)


def _manifest(executor: Executor, text: str) -> dict[str, str]:
    try:
        return dict(json.loads(ask(executor, text, _SECONDS).get("manifest")))
    except ValueError:
        what = "its Python does not list the code that is there"
        raise CodeError(executor.name, what) from None


def pack(source: Path, paths: Iterable[str], gone: Iterable[str] = ()) -> bytes:
    """An archive of files below ``source``, without owners and times: it is the content that
    counts. Of files that are ``gone`` it has the names, under no name of a file."""
    buffer = io.BytesIO()
    contents = {str(PurePosixPath(path)): source / path for path in sorted(paths)}
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3) as archive:
        for path in ("", *contents):
            data = contents[path].read_bytes() if path else json.dumps(sorted(gone)).encode()
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
