"""Version of the code that a run is started with: Git commits and uncommitted changes.

Nothing here takes longer than a few seconds, whatever the size of a checkout: Git runs with a
timeout, and recorded changes are bounded.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from flagscale.config.schema import PROJECT, Experiment, Task
from flagscale.config.secret_lines import hide_secrets_of_diff, is_secret_file
from flagscale.config.yaml_file import short_path
from flagscale.errors import ConfigError, Problem
from flagscale.launcher.layout import Layout
from flagscale.launcher.sweep_runs import SWEEP_FILE

_GIT_TIMEOUT_SECONDS = 3.0
_DIGEST_CHARACTERS = 12
_MAX_DIFF_BYTES = 256 << 10
"""Recorded part of the changes of one checkout."""
_MAX_FILES = 200
_MAX_NEW_FILES = 100
_MAX_NEW_FILE_BYTES = 64 << 10
_NEW_FILE_SUFFIXES = frozenset(
    {
        *(".py", ".pyi", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".jinja"),
        *(".yaml", ".yml", ".json", ".toml", ".cfg", ".ini"),
    }
)
"""Untracked files with these suffixes count as code: their content is recorded."""
_SCRIPT_SUFFIXES = (".py", ".sh")
_INTERPRETERS = ("python", "bash", "sh", "env", "torchrun")
_MAX_NAMED_FILES = 20
_READ_BYTES = 64 << 10
_STATE_PARTS = Layout(Path("exp")).state.parts[-2:]
_STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--ignore-submodules=none")
_FIELDS_BEFORE_PATH = {"1": 7, "2": 8, "u": 9}
"""Number of fields between the kind of an entry of ``git status`` and its path."""
_DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short"),
    *("--src-prefix=a/", "--dst-prefix=b/", "HEAD"),
)


@dataclass(frozen=True)
class CodeVersion:
    """Version of the code in a Git checkout.

    ``changes`` is a digest of the uncommitted changes to tracked files and of new code files; empty
    without any. ``files`` are the changed and the untracked files, at most the first of many, and
    ``file_count`` is their number.
    """

    checkout: str
    commit: str
    changes: str
    files: tuple[str, ...] = field(default=(), compare=False)
    file_count: int = field(default=0, compare=False)

    def __str__(self) -> str:
        suffix = " with uncommitted changes" if self.changes else ""
        return f"{self.commit[:_DIGEST_CHARACTERS]}{suffix}"


@dataclass(frozen=True)
class CheckoutState:
    """State of a Git checkout: its version, and its uncommitted changes as a bounded diff without
    secrets.
    """

    version: CodeVersion
    diff: str = ""

    def format_diff(self) -> str:
        """Return the diff below lines that name the checkout; empty without changes."""
        if not self.diff:
            return ""
        version = self.version
        return f"# {version.checkout}, relative to commit {version.commit}\n{self.diff}"


def read_checkouts(task: Task, exp_dir: Path | None = None) -> tuple[CheckoutState, ...]:
    """Return the state of the checkouts that hold this project and the task's program.

    A directory that is not part of a Git checkout is left out. Untracked files in ``exp_dir`` and
    in the directories of other experiments are no changes, because runs write them.
    """
    states = (_read_checkout(checkout, exp_dir) for checkout in find_checkouts(task))
    return tuple(state for state in states if state is not None)


def read_code_versions(task: Task, exp_dir: Path | None = None) -> tuple[CodeVersion, ...]:
    """Return the versions of the checkouts of :func:`read_checkouts`."""
    return tuple(state.version for state in read_checkouts(task, exp_dir))


def find_checkouts(task: Task) -> list[Path]:
    """Return the Git checkouts that hold this project and the task's program."""
    return list(dict.fromkeys(filter(None, map(find_checkout, _code_directories(task)))))


def require_clean(experiment: Experiment) -> None:
    """Check that the commits alone identify the code of a run.

    Raises:
        ConfigError: A checkout has uncommitted changes or untracked files, or the code of the
            program is in no checkout.
    """
    task, problems = experiment.task, []
    for directory in _code_directories(task):
        checkout = find_checkout(directory)
        if checkout is None:
            problems.append(Problem(short_path(directory), "is not part of a Git checkout"))
    for checkout in find_checkouts(task):
        state = _read_checkout(checkout, experiment.exp_dir)
        place = short_path(checkout)
        if state is None:
            text = f"Git does not report its state within {_GIT_TIMEOUT_SECONDS:g} s"
            problems.append(Problem(place, text))
        elif state.version.file_count:
            version = state.version
            names = "".join(f"\n    {name}" for name in version.files[:_MAX_NAMED_FILES])
            omitted = version.file_count - min(len(version.files), _MAX_NAMED_FILES)
            names += f"\n    and {omitted} more" if omitted else ""
            count = f"{version.file_count} file{'s' if version.file_count != 1 else ''}"
            problems.append(Problem(place, f"{count} changed or untracked:{names}"))
        elif state.version.changes:
            problems.append(Problem(place, "its untracked files could not be listed in time"))
    if problems:
        hint = "commit the files, or add outputs to .gitignore"
        raise ConfigError(problems, hint=hint)


def list_code_files(checkout: Path, exp_dir: Path) -> list[str] | None:
    """Return the tracked files of a Git checkout and of its submodules, and the untracked ones that
    are not ignored, without outputs of runs; None for a directory that is no checkout.
    """
    if not (checkout / ".git").exists():
        return None
    tracked = _run_git(checkout, "ls-files", "-z", "--cached", "--recurse-submodules")
    untracked = _run_git(checkout, "ls-files", "-z", "--others", "--exclude-standard")
    if tracked is None or untracked is None:
        return None
    names = [name for name in os.fsdecode(untracked).split("\0") if name]
    return [
        *filter(None, dict.fromkeys(os.fsdecode(tracked).split("\0"))),
        *_without_outputs(names, checkout, exp_dir),
    ]


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
        program = find_program_file(task)
        yield Path.cwd() if program is None else program.parent
    elif task.external:
        yield task.entrypoint.absolute().parent


def find_program_file(task: Task) -> Path | None:
    """Return the absolute path of the script of a command, or else of its first file other than an
    interpreter; None without any.
    """
    files = [Path(word).absolute() for word in task.command if _is_file(word)]
    scripts = (file for file in files if file.suffix in _SCRIPT_SUFFIXES)
    others = (file for file in files if not file.name.startswith(_INTERPRETERS))
    return next(scripts, next(others, None))


def _is_file(word: str) -> bool:
    return ("/" in word or word.endswith(_SCRIPT_SUFFIXES)) and Path(word).is_file()


def find_checkout(directory: Path) -> Path | None:
    """Return the Git checkout that a directory is in, or None."""
    candidates = (directory, *directory.parents)
    return next((path for path in candidates if (path / ".git").exists()), None)


class Digest(Protocol):
    """A digest of :mod:`hashlib`."""

    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True)
class _Status:
    """Output of ``git status``. ``is_complete`` is False if untracked files are not included."""

    commit: str
    changed: tuple[str, ...]
    untracked: tuple[str, ...]
    is_complete: bool = True


def _read_checkout(checkout: Path, exp_dir: Path | None) -> CheckoutState | None:
    """Return the state of a checkout; None if Git does not report its commit."""
    status = _read_status(checkout)
    if status is None:
        return None
    untracked = _without_outputs(status.untracked, checkout, exp_dir)
    names = [*status.changed, *untracked]
    digest, diff = hashlib.sha256(), bytearray()
    is_readable = not status.changed or _read_diff(checkout, digest, diff)
    new_files = [name for name in untracked if PurePosixPath(name).suffix in _NEW_FILE_SUFFIXES]
    for name in new_files[:_MAX_NEW_FILES]:
        content = _read_new_file(checkout / name)
        if content is not None:
            digest.update(os.fsencode(name) + b"\0" + content)
            if len(diff) < _MAX_DIFF_BYTES and not is_secret_file(name):
                diff += _format_new_file(name, content)
    changes = ""
    if not is_readable or not status.is_complete:
        changes = "unknown"
    elif status.changed or new_files:
        changes = digest.hexdigest()[:_DIGEST_CHARACTERS]
    files = tuple(os.fsencode(name).decode(errors="backslashreplace") for name in names)
    version = CodeVersion(str(checkout), status.commit, changes, files[:_MAX_FILES], len(files))
    return CheckoutState(version, _finish_diff(bytes(diff)))


def _without_outputs(untracked: Sequence[str], checkout: Path, exp_dir: Path | None) -> list[str]:
    """Return the untracked files that runs have not written."""
    outputs = _output_directories(untracked)
    if exp_dir is not None:
        outputs.add(PurePosixPath(os.path.relpath(exp_dir, checkout)))
    # A run in the checkout itself is no reason to ignore all of it.
    outputs.discard(PurePosixPath())
    return [name for name in untracked if outputs.isdisjoint(PurePosixPath(name).parents)]


def _output_directories(untracked: Sequence[str]) -> set[PurePosixPath]:
    """Return the directories of experiments and sweeps among untracked files."""
    directories = set()
    for name in untracked:
        path = PurePosixPath(name)
        if path.name == SWEEP_FILE:
            directories.add(path.parent)
        elif path.parts[-2:] == _STATE_PARTS:
            directories.add(path.parents[1])
    return directories


def _read_status(checkout: Path) -> _Status | None:
    output = _run_git(checkout, *_STATUS, "--untracked-files=all")
    is_complete = output is not None
    if output is None:
        # Git searches directories with very many files, such as data that is not ignored.
        output = _run_git(checkout, *_STATUS, "--untracked-files=no")
    if output is None:
        return None
    commit, changed, untracked = "", [], []
    entries = iter(os.fsdecode(output).split("\0"))
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if entry.startswith("# branch.oid "):
            commit = entry.removeprefix("# branch.oid ")
        elif kind == "?":
            untracked.append(rest)
        elif kind in _FIELDS_BEFORE_PATH:
            changed.append(rest.split(" ", _FIELDS_BEFORE_PATH[kind])[-1])
            if kind == "2":
                next(entries)  # the path that it was renamed from
    if not commit.isalnum():
        return None  # "(initial)": there is no commit yet
    return _Status(commit, tuple(changed), tuple(untracked), is_complete)


def _read_diff(checkout: Path, digest: Digest, diff: bytearray) -> bool:
    """Add the diff of tracked files to ``digest``, and its beginning to ``diff``.

    Return False if Git fails or does not finish in time.
    """

    def consume(chunk: bytes) -> None:
        digest.update(chunk)
        diff.extend(chunk[: max(0, _MAX_DIFF_BYTES + 1 - len(diff))])

    return _stream_git(consume, checkout, *_DIFF)


def _run_git(checkout: Path, *arguments: str) -> bytes | None:
    """Return the output of a Git command; None if it fails, takes too long, or Git is missing."""
    output = bytearray()
    return bytes(output) if _stream_git(output.extend, checkout, *arguments) else None


def _stream_git(consume: Callable[[bytes], object], checkout: Path, *arguments: str) -> bool:
    """Pass the output of a Git command to ``consume``, and return True if it succeeds in time."""
    deadline = time.monotonic() + _GIT_TIMEOUT_SECONDS
    try:
        process = subprocess.Popen(
            ["git", "-C", str(checkout), *arguments],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return False
    with process:
        try:
            output = process.stdout.fileno() if process.stdout is not None else -1
            while chunk := _read_until(output, deadline):
                consume(chunk)
            return process.wait(max(0.0, deadline - time.monotonic())) == 0
        except (OSError, subprocess.TimeoutExpired):
            # Git may have started filters, which would hold the pipe open.
            os.killpg(process.pid, signal.SIGKILL)
            return False


def _read_until(descriptor: int, deadline: float) -> bytes:
    """Read from a pipe; empty at its end.

    Raises:
        TimeoutError: Nothing came until ``deadline``.
    """
    if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise TimeoutError
    return os.read(descriptor, _READ_BYTES)


def _read_new_file(path: Path) -> bytes | None:
    """Return the content of an untracked file; None if it is large, or no regular file."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_NEW_FILE_BYTES:
            return path.read_bytes()
    return None


def _format_new_file(name: str, content: bytes) -> bytes:
    """Return the diff that adds a file, as Git writes it."""
    path = os.fsencode(name)
    lines = content.split(b"\n")
    last_line = lines.pop()
    header = b"diff --git a/%b b/%b\nnew file mode 100644\n" % (path, path)
    if not content:
        return header
    count = len(lines) + bool(last_line)
    header += b"--- /dev/null\n+++ b/%b\n@@ -0,0 +1,%d @@\n" % (path, count)
    text = b"".join(b"+%b\n" % line for line in lines)
    return header + text + (b"+%b\n\\ No newline at end of file\n" % last_line) * bool(last_line)


def _finish_diff(diff: bytes) -> str:
    """Return a diff as text, without secrets and bounded at a whole line."""
    is_cut = len(diff) > _MAX_DIFF_BYTES
    if is_cut:
        diff = diff[: diff.rfind(b"\n", 0, _MAX_DIFF_BYTES) + 1]
    text = hide_secrets_of_diff(diff.decode(errors="backslashreplace"))
    limit = f"{_MAX_DIFF_BYTES >> 10} KiB"
    return text + (f"# the rest is left out: more than {limit}\n" if is_cut else "")
