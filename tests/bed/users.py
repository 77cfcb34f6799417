"""An ordinary user of a bed: root is special to schedulers, and sees what nobody else does."""

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
    """A user that the hub and all hosts know; ``under`` runs a command as this one."""

    name: str = "learner"
    uid: int = 2000
    gid: int = 100

    @property
    def under(self) -> list[str]:
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]

    def do(self, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a function returns, called as this user in a process of its own."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setresgid(self.gid, self.gid, self.gid)
                os.setresuid(self.uid, self.uid, self.uid)
                text = json.dumps(function())
            except BaseException as error:  # noqa: BLE001 - told, and raised there
                text = json.dumps({"error": f"{traceback.format_exc()}{_why_not(error)}"})
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        found = dict(json.loads(text))
        if "error" in found:
            raise RuntimeError(found["error"])
        return found


def _why_not(error: BaseException) -> str:
    """Of what may not be read: who asks, and whose each part of the way there is."""
    if not isinstance(error, PermissionError) or error.filename is None:
        return ""
    lines = [f"asked by {os.getresuid()}, {os.getresgid()}, {os.getgroups()}"]
    path = Path(error.filename)
    for part in (path, *path.parents):
        try:
            found = part.stat()
            lines.append(f"{part}: {found.st_mode:o}, {found.st_uid}:{found.st_gid}")
        except OSError as unseen:
            lines.append(str(unseen))
    return "\n".join(lines)


@contextmanager
def known_user(directory: Path, user: User) -> Iterator[User]:
    """Make the user known on this machine and on the hosts that are started in the block, and let
    it run this project and its Python, though they may lie in a home that is root's alone."""
    with fresh_network():
        passwd = directory / "passwd"
        entry = f"{user.name}:x:{user.uid}:{user.gid}::/nonexistent:/bin/sh\n"
        passwd.write_text(Path("/etc/passwd").read_text(encoding="utf-8") + entry, encoding="utf-8")
        _mount("--bind", passwd, "/etc/passwd")
        closed: dict[Path, list[Path]] = {}
        for path in _outermost({PROJECT, *(Path(p).resolve() for p in PYTHONS)}):
            if (above := _closed_above(path)) is not None:
                closed.setdefault(above, []).append(path)
        for above, paths in closed.items():
            _show_only(above, paths, directory)
        yield user


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Without those that lie in another one."""
    every = sorted(paths)
    return [path for path in every if not any(parent in every for parent in path.parents)]


def _closed_above(path: Path) -> Path | None:
    """The first directory on the way to a path that others may not enter."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 0o001:
            return parent
    return None


def _show_only(above: Path, paths: list[Path], directory: Path) -> None:
    """Have everybody find these paths, and nothing else that is below a closed directory."""
    held = [directory / f"held-{above.name}-{number}" for number in range(len(paths))]
    for path, place in zip(paths, held, strict=True):
        place.mkdir()
        _mount("--bind", path, place)
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", above)
    for path, place in zip(paths, held, strict=True):
        path.mkdir(parents=True)
        _mount("--bind", place, path)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)
