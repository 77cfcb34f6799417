"""An ordinary user of a bed, because root is special to schedulers and can read everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bed.namespaces import fresh_network

PROJECT = Path(__file__).resolve().parents[2]
PYTHONS = (sys.prefix, sys.base_prefix)


@dataclass(frozen=True)
class User:
    """A user of the hub and all hosts; ``command_prefix`` runs a command as this user."""

    name: str = "learner"
    uid: int = 2000
    gid: int = 100

    @property
    def command_prefix(self) -> list[str]:
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]

    def call(self, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a function that is called as this user in its own process."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setresgid(self.gid, self.gid, self.gid)
                os.setresuid(self.uid, self.uid, self.uid)
                text = json.dumps(function())
            except BaseException as error:  # noqa: BLE001 - sent to the parent, and raised there
                text = json.dumps(
                    {"error": f"{traceback.format_exc()}{_explain_permission_error(error)}"}
                )
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        reply = dict(json.loads(text))
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply


def _explain_permission_error(error: BaseException) -> str:
    """Return the user, and the owner of each directory of a path that is not readable."""
    if not isinstance(error, PermissionError) or error.filename is None:
        return ""
    lines = [f"asked by {os.getresuid()}, {os.getresgid()}, {os.getgroups()}"]
    path = Path(error.filename)
    for part in (path, *path.parents):
        try:
            status = part.stat()
            lines.append(f"{part}: {status.st_mode:o}, {status.st_uid}:{status.st_gid}")
        except OSError as stat_error:
            lines.append(str(stat_error))
    return "\n".join(lines)


@contextmanager
def known_user(directory: Path, user: User) -> Iterator[User]:
    """Create the user on this machine and on the hosts that are started within the block.

    The user may run this project and its Python, even if they are in a home that only root can
    read.
    """
    with fresh_network():
        passwd = directory / "passwd"
        entry = f"{user.name}:x:{user.uid}:{user.gid}::/nonexistent:/bin/sh\n"
        passwd.write_text(Path("/etc/passwd").read_text(encoding="utf-8") + entry, encoding="utf-8")
        _mount("--bind", passwd, "/etc/passwd")
        closed: dict[Path, list[Path]] = {}
        for path in _outermost({PROJECT, *(Path(p).resolve() for p in PYTHONS)}):
            if (closed_directory := _closed_above(path)) is not None:
                closed.setdefault(closed_directory, []).append(path)
        for closed_directory, paths in closed.items():
            _show_only(closed_directory, paths, directory)
        yield user


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that are not below another path of the list."""
    ordered = sorted(paths)
    return [path for path in ordered if not any(parent in ordered for parent in path.parents)]


def _closed_above(path: Path) -> Path | None:
    """Return the first directory of a path that other users may not enter."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 0o001:
            return parent
    return None


def _show_only(closed_directory: Path, paths: list[Path], directory: Path) -> None:
    """Make these paths accessible for all users, and nothing else below a closed directory."""
    mount_points = [
        directory / f"held-{closed_directory.name}-{number}" for number in range(len(paths))
    ]
    for path, mount_point in zip(paths, mount_points, strict=True):
        mount_point.mkdir()
        _mount("--bind", path, mount_point)
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", closed_directory)
    for path, mount_point in zip(paths, mount_points, strict=True):
        path.mkdir(parents=True)
        _mount("--bind", mount_point, path)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)
