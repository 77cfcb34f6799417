"""Record of a start: when, from where and with which code a run was started.

It is ``launch.json`` in the run's own directory (:class:`flagscale.launcher.layout.RunFiles`).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale import __version__
from flagscale.config.schema import PROJECT, Experiment, Task
from flagscale.files import format_json, read_json, to_plain
from flagscale.launcher.layout import Layout
from flagscale.records import from_record

_GIT_TIMEOUT_SECONDS = 3.0
_DIGEST_CHARACTERS = 12


@dataclass(frozen=True)
class CodeVersion:
    """Version of the code in a Git checkout.

    ``changes`` is a digest of the uncommitted changes to tracked files; empty without any.
    """

    checkout: str
    commit: str
    changes: str

    def __str__(self) -> str:
        suffix = " with uncommitted changes" if self.changes else ""
        return f"{self.commit[:_DIGEST_CHARACTERS]}{suffix}"


@dataclass(frozen=True)
class LaunchRecord:
    """Record of a start.

    ``directory`` is the launcher's working directory, to which relative paths refer.
    ``config_file`` is the YAML that was named. ``rerun_of`` is the id of the run whose recorded
    configuration was started again, or empty.
    """

    launched: float
    version: str
    directory: str
    config_file: str
    code: tuple[CodeVersion, ...]
    rerun_of: str

    def format(self) -> str:
        """Return the record as the text of its file."""
        return format_json(to_plain(self))


def make_launch_record(experiment: Experiment, rerun_of: str = "") -> LaunchRecord:
    """Return the record of a start of an experiment at this moment."""
    return LaunchRecord(
        launched=round(time.time(), 3),
        version=__version__,
        directory=os.getcwd(),  # noqa: PTH109 - the text is recorded
        config_file=str(experiment.config_file),
        code=read_code_versions(experiment.task),
        rerun_of=rerun_of,
    )


def read_launch_record(layout: Layout, run_id: str) -> LaunchRecord | None:
    """Return the record of a run; None if there is none, as for runs of older versions."""
    return from_record(LaunchRecord, read_json(layout.run_files(run_id).launch))


def read_code_versions(task: Task) -> tuple[CodeVersion, ...]:
    """Return the versions of the checkouts that hold this project and the task's program.

    A directory that is not part of a Git checkout is left out.
    """
    checkouts = dict.fromkeys(filter(None, map(_find_checkout, _code_directories(task))))
    versions = (_read_code_version(checkout) for checkout in checkouts)
    return tuple(version for version in versions if version is not None)


def describe_code_changes(
    recorded: Sequence[CodeVersion], current: Sequence[CodeVersion]
) -> Iterator[str]:
    """Yield a sentence for each checkout whose code is no longer the recorded one."""
    current_by_checkout = {version.checkout: version for version in current}
    for version in recorded:
        now = current_by_checkout.get(version.checkout)
        if now is None:
            yield f"{version.checkout} was at commit {version}, and is no Git checkout any more"
        elif now.commit != version.commit:
            yield f"{version.checkout} was at commit {version}, and is at {now}"
        elif now.changes != version.changes:
            yield f"{version.checkout}: its uncommitted changes differ from those of then"


def _code_directories(task: Task) -> Iterator[Path]:
    if (PROJECT / ".git").exists():
        yield PROJECT  # An installed package may lie below a checkout of something else.
    if task.is_command:
        files = (Path(word) for word in task.command if "/" in word or word.endswith(".py"))
        yield next((file.absolute().parent for file in files if file.is_file()), Path.cwd())
    elif task.external:
        yield task.entrypoint.absolute().parent


def _find_checkout(directory: Path) -> Path | None:
    candidates = (directory, *directory.parents)
    return next((path for path in candidates if (path / ".git").exists()), None)


def _read_code_version(checkout: Path) -> CodeVersion | None:
    commit = _run_git(checkout, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _run_git(checkout, "diff", "--no-ext-diff", "--no-textconv", "HEAD")
    if changes is None:
        digest = "unknown"
    else:
        digest = hashlib.sha256(changes).hexdigest()[:_DIGEST_CHARACTERS] if changes else ""
    return CodeVersion(str(checkout), commit.decode(errors="replace").strip(), digest)


def _run_git(checkout: Path, *arguments: str) -> bytes | None:
    """Return the output of a Git command; None if it fails, takes too long, or Git is missing."""
    try:
        return subprocess.run(
            ["git", "-C", str(checkout), *arguments],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_GIT_TIMEOUT_SECONDS,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
