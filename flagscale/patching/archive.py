"""Safe unpacking of archives from outside, and packing of our own.

Nothing is written outside the destination: absolute names, ``..``, links that lead outside, devices
and files behind links are refused before anything is written.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import tarfile
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from flagscale.errors import BackendSourceError
from flagscale.patching.manifest import IGNORED_DIRECTORIES

# No backend's source tree is nearly as large; a malicious archive may be.
MAX_MEMBERS = 100_000
MAX_BYTES = 4 << 30


def unpack(archive: Path, destination: Path) -> None:
    """Unpack a tar archive into ``destination``, without its single top directory.

    Regular files get mode 0644 or 0755. Links are kept if they stay inside. egg-info directories
    are left out, because they would make a second, empty distribution importable.

    Raises:
        BackendSourceError: not a tar archive, not exactly one top directory, or an unsafe member.
    """
    try:
        with tarfile.open(archive) as tar:
            members = _list_safe_members(archive, tar)
            for member, path in members:
                if member.isreg():
                    _write_member(tar, member, destination / path)
            for member, path in members:  # links last: no file is ever written through one
                if member.issym():
                    target = destination / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(member.linkname)
    except (tarfile.TarError, EOFError) as error:
        raise BackendSourceError(
            f"{archive}: not a readable tar archive: {error}",
            hint="the file may be damaged or cut off: get it again",
        ) from error


def _list_safe_members(archive: Path, tar: tarfile.TarFile) -> list[tuple[tarfile.TarInfo, str]]:
    """Return the members to write, with their paths below the single top directory."""
    members: list[tuple[tarfile.TarInfo, str]] = []
    top_directories: set[str] = set()
    members_by_path: dict[str, tarfile.TarInfo] = {}
    total_bytes = 0
    for count, member in enumerate(tar):
        total_bytes += member.size
        if count >= MAX_MEMBERS or total_bytes > MAX_BYTES:
            raise BackendSourceError(
                f"{archive}: more than {MAX_MEMBERS} members or {MAX_BYTES >> 30} GiB unpacked; "
                f"no source tree is that large"
            )
        _check_member(archive, member)
        top, _, path = posixpath.normpath(member.name).partition("/")
        top_directories.add(top)
        if member.isdir() or not path or path.partition("/")[0].endswith(".egg-info"):
            continue
        if path in members_by_path:
            raise BackendSourceError(f"{archive}: names {member.name!r} twice")
        members_by_path[path] = member
        members.append((member, path))
    if len(top_directories) != 1:
        listed_directories = ", ".join(sorted(top_directories)[:5]) or "nothing"
        raise BackendSourceError(
            f"{archive}: expected one top directory, found {listed_directories}"
        )
    for _, path in members:
        if blocking_path := next((p for p in _parents(path) if p in members_by_path), None):
            raise BackendSourceError(
                f"{archive}: {path!r} lies below {blocking_path!r}, which is not a directory"
            )
    return members


def _parents(path: str) -> Iterable[str]:
    while path := posixpath.dirname(path):
        yield path


def _check_member(archive: Path, member: tarfile.TarInfo) -> None:
    name = member.name
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise BackendSourceError(f"{archive}: refuses to unpack the path {name!r}")
    if member.issym():
        if not stays_inside(name, member.linkname, levels=1):
            raise BackendSourceError(
                f"{archive}: the link {name!r} leads outside, to {member.linkname!r}"
            )
    elif not (member.isreg() or member.isdir()):
        raise BackendSourceError(f"{archive}: {name!r} is neither a file, a directory nor a link")


def stays_inside(link: str, target: str, *, levels: int = 0) -> bool:
    """Return True if a link at the relative path ``link`` stays below the first ``levels``
    directories of that path.

    ``..`` is accepted only at the start of ``target``: after a name it would apply to the directory
    that the name leads to, and the name may be a link.
    """
    steps = [step for step in target.split("/") if step not in ("", ".")]
    parent_steps = len(list(takewhile(lambda step: step == "..", steps)))
    if target.startswith("/") or ".." in steps[parent_steps:]:
        return False
    depth = len(posixpath.normpath(link).split("/")) - 1
    return depth - parent_steps >= levels


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = tar.extractfile(member)
    if content is None:
        raise BackendSourceError(f"{member.name!r} has no content")
    target.parent.mkdir(parents=True, exist_ok=True)
    with content, target.open("xb") as out:
        shutil.copyfileobj(content, out, 1 << 20)
    target.chmod(0o755 if member.mode & 0o100 else 0o644)


def copy_tree(source: Path, destination: Path) -> None:
    """Copy a source tree without version control, caches and links that lead outside.

    Raises:
        BackendSourceError: a symbolic link leads outside ``source``.
    """
    for directory, subdirectories, files in os.walk(source):
        directory_path = Path(directory)
        links = [d for d in subdirectories if (directory_path / d).is_symlink()]
        subdirectories[:] = [
            d
            for d in subdirectories
            if d not in IGNORED_DIRECTORIES and d not in links and not d.endswith(".egg-info")
        ]
        for name in (*files, *links):
            _copy_file(
                directory_path / name,
                destination,
                (directory_path / name).relative_to(source).as_posix(),
            )


def _copy_file(original: Path, destination: Path, path: str) -> None:
    target = destination / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if original.is_symlink():
        link = str(original.readlink())
        if not stays_inside(path, link):
            raise BackendSourceError(f"{original}: the link leads outside the tree, to {link!r}")
        target.symlink_to(link)
    elif original.is_file():
        shutil.copyfile(original, target)
        target.chmod(0o755 if original.stat().st_mode & 0o100 else 0o644)
    else:
        raise BackendSourceError(f"{original} is neither a file, a directory nor a link")


def pack(tree: Path, paths: Iterable[str], archive: Path) -> None:
    """Pack the files ``paths`` of ``tree`` into ``archive``, below a directory ``base``."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for path in paths:
            tar.add(tree / path, arcname=f"base/{path}", recursive=False)
