"""git: one commit as an archive, unified diffs, and applying them.

Every command runs with the user's configuration out of the way (external diff tools, prefixes,
colours, line-ending rules) and finds no repository above the directory it works in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flagscale.errors import BackendSourceError

_SETTINGS = ("-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "core.quotepath=true")


def _run(
    arguments: Sequence[str], *, cwd: Path, stdin: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    if shutil.which("git") is None:
        raise BackendSourceError(
            "git is not installed, and patches are made and applied with it",
            hint="install git with the system's package manager",
        )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(cwd.resolve().parent),
        "LC_ALL": "C",
    }
    return subprocess.run(
        ["git", *_SETTINGS, *arguments],
        cwd=cwd,
        env=environment,
        input=stdin,
        capture_output=True,
        check=False,
    )


def diff(before: Path | None, after: Path | None, path: str, scratch: Path) -> bytes:
    """The unified diff that turns ``before`` into ``after``, both at the relative ``path``.

    ``None`` says that the file is not there. Works for binary files, links and modes too.
    ``scratch`` is an empty directory to work in.

    Raises:
        BackendSourceError: git is missing or fails.
    """
    for side, original in (("a", before), ("b", after)):
        target = scratch / side / path
        (scratch / side).mkdir()
        if original is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(original, target, follow_symlinks=False)
    flags = ("--no-index", "--no-prefix", "--no-color", "--no-ext-diff", "--no-renames", "--binary")
    done = _run(["diff", *flags, "a", "b"], cwd=scratch)
    if done.returncode not in (0, 1):
        raise BackendSourceError(f"git diff failed for {path}: {_said(done)}")
    return done.stdout


def apply(patch: bytes, tree: Path) -> str | None:
    """Apply ``patch`` to ``tree``: all of it or nothing. Returns git's words when it cannot."""
    done = _run(["apply", "--whitespace=nowarn", "-p1", "-"], cwd=tree, stdin=patch)
    return _said(done) if done.returncode else None


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode(errors="replace").strip()


def archive_commit(url: str, commit: str, target: Path) -> None:
    """Fetch one commit of ``url`` and put its files into the tar archive ``target``, atomically.

    Raises:
        BackendSourceError: the repository cannot be reached or does not have the commit.
    """
    try:
        from git import GitCommandError, Repo  # loaded late: only this source needs it
    except ImportError as error:  # GitPython refuses to load without a git program
        raise BackendSourceError(
            f"--source git needs the git program and GitPython: {error}",
            hint="install git, or use --source registry",
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".clone-") as scratch:
        repository = Repo.init(Path(scratch) / "repository.git", bare=True)
        quiet = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        try:
            repository.git.fetch("--depth=1", "--no-tags", "--", url, commit, env=quiet)
        except GitCommandError as error:
            raise _fetch_failed(url, commit, str(error.stderr)) from error
        kept = Path(scratch) / target.name
        with kept.open("wb") as out:
            repository.archive(out, treeish=commit, prefix="source/", format="tar")
        repository.close()
        kept.replace(target)


def _fetch_failed(url: str, commit: str, said: str) -> BackendSourceError:
    lines = [line.strip() for line in said.replace("stderr:", "").strip(" '\n").splitlines()]
    words = "\n".join(f"  {line}" for line in lines[-4:])
    if any(sign in said for sign in ("not our ref", "no such remote ref", "couldn't find remote")):
        return BackendSourceError(
            f"{url} does not have commit {commit}:\n{words}",
            hint="check the commit id and the URL; a fork may lack what upstream has",
        )
    return BackendSourceError(
        f"{url} could not be fetched:\n{words}",
        hint="check the network, the URL and your access; or --path a checkout you have",
    )
