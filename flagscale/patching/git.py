"""git operations: archiving a commit, making unified diffs, applying them.

Commands that make and apply diffs ignore the user's configuration (external diff tools, prefixes,
colors, line endings) and any repository above the working directory. Fetching a commit uses the
configuration, which may contain proxies and credentials.
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


def _run_git(
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


def make_diff(before: Path | None, after: Path | None, path: str, scratch: Path) -> bytes:
    """Return the unified diff that turns ``before`` into ``after``, both at the relative ``path``.

    ``None`` stands for a missing file. Binary files, links and modes are supported. ``scratch`` is
    an empty working directory.

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
    result = _run_git(["diff", *flags, "a", "b"], cwd=scratch)
    if result.returncode not in (0, 1):
        raise BackendSourceError(f"git diff failed for {path}: {_error_text(result)}")
    return result.stdout


def apply_patch(patch: bytes, tree: Path) -> str | None:
    """Apply ``patch`` to ``tree``, completely or not at all. Return git's message if it fails."""
    result = _run_git(["apply", "--whitespace=nowarn", "-p1", "-"], cwd=tree, stdin=patch)
    return _error_text(result) if result.returncode else None


def _error_text(result: subprocess.CompletedProcess[bytes]) -> str:
    return result.stderr.decode(errors="replace").strip()


def has_whole_commit(repository: Path, commit: str) -> bool:
    """Return True if a bare repository contains the commit, and each object of it is what its id
    says.
    """
    if not repository.is_dir():
        return False
    # Without a name for the repository, git would look for one in the directories above.
    options = (f"--git-dir={repository}", "fsck", "--full", "--no-progress", "--no-dangling")
    return _run_git((*options, commit), cwd=repository).returncode == 0


def archive_commit(repository: Path, commit: str, target: Path) -> None:
    """Write the files of a commit to the tar archive ``target``.

    Raises:
        BackendSourceError: git fails.
    """
    options = ("archive", "--format=tar", "--prefix=source/", f"--output={target}")
    result = _run_git((f"--git-dir={repository}", *options, commit), cwd=repository)
    if result.returncode:
        raise BackendSourceError(f"git archive failed for {commit}: {_error_text(result)}")


def fetch_commit(url: str, commit: str, target: Path) -> None:
    """Fetch one commit of ``url`` into the bare repository ``target``, replacing it atomically.

    Raises:
        BackendSourceError: the repository is unreachable or does not have the commit.
    """
    try:
        # Imported here, because only `--source git` needs GitPython.
        from git import GitCommandError, Repo
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
            raise _fetch_error(url, commit, str(error.stderr)) from error
        repository.close()
        shutil.rmtree(target, ignore_errors=True)
        Path(repository.git_dir).rename(target)


def _fetch_error(url: str, commit: str, stderr: str) -> BackendSourceError:
    lines = [line.strip() for line in stderr.replace("stderr:", "").strip(" '\n").splitlines()]
    error_lines = "\n".join(f"  {line}" for line in lines[-4:])
    if any(
        sign in stderr for sign in ("not our ref", "no such remote ref", "couldn't find remote")
    ):
        return BackendSourceError(
            f"{url} does not have commit {commit}:\n{error_lines}",
            hint="check the commit id and the URL; a fork may lack what upstream has",
        )
    return BackendSourceError(
        f"{url} could not be fetched:\n{error_lines}",
        hint="check the network, the URL and your access; or use --path with a checkout that you "
        "have",
    )
