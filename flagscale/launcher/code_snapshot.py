"""Copy of the code of a run as it was at the start: ``runner.snapshot``.

A copy is named by its content, ``<exp_dir>/logs/code/<name>-<digest>``, so runs with the same code
share one. It becomes visible as a whole, and its files are read-only. This project's copy holds the
launcher, too: ``flagscale rerun`` continues in it, so that plan, scripts and agents are those of
then as well.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import cache_from_source
from pathlib import Path

from flagscale.config.schema import PROJECT, Experiment, Task
from flagscale.config.sources import find_location
from flagscale.config.yaml_file import short_path
from flagscale.errors import ConfigError, Problem
from flagscale.files import make_private_directory, require_private
from flagscale.hosts import probe
from flagscale.launcher.code_version import find_checkout, find_program_file, list_code_files
from flagscale.launcher.launch_record import LaunchRecord, RecordedSnapshot
from flagscale.launcher.layout import Layout
from flagscale.launcher.state import convert_disk_errors
from flagscale.module_command import python_arguments

KEY = "experiment.runner.snapshot"
_DIGEST_CHARACTERS = 12
_MAX_BYTES = 1 << 30
_MAX_FILES = 50_000
_CACHES = frozenset({"__pycache__"})
_SKIPPED_DIRECTORIES = _CACHES | {".git", ".venv", "node_modules"}
_PYTHON_PATH = "PYTHONPATH"
_PROJECT_NAME = "flagscale"
_CHANGED = "this copy of the code is incomplete or was changed"


@dataclass(frozen=True)
class CodeSnapshot:
    """Experiment whose code is that of copies, the copies, and notes for the user."""

    experiment: Experiment
    copies: RecordedSnapshot | None = None
    notes: list[str] = field(default_factory=list)


def use_snapshot(
    experiment: Experiment, *, create: bool, record: LaunchRecord | None = None
) -> CodeSnapshot:
    """Return the experiment with copies in place of its code, if ``runner.snapshot`` is set.

    Args:
        experiment: The experiment.
        create: Make missing copies; otherwise their paths are only planned.
        record: Record of the run whose copies are copied again, in place of the present code.

    Raises:
        ConfigError: The code cannot be copied.
    """
    if not experiment.runner.snapshot:
        return CodeSnapshot(experiment)
    _refuse_other_directories(experiment)
    _refuse_modules(experiment)
    earlier = record.snapshot if record is not None else None
    layout, task = Layout(experiment.exp_dir), experiment.task
    notes = list(_note_user_code(experiment))
    with convert_disk_errors(layout):
        files = list(_list_project_files())
        project = _copy_files(PROJECT, files, layout.code, _PROJECT_NAME, create=create)
        copies = RecordedSnapshot(str(project))
        program = _find_program(task)
        if program is not None:
            copied = _copy_program(experiment, program, earlier, notes, create=create)
            program = copied.original(program)
            copies = RecordedSnapshot(
                str(project), str(copied.origin), str(copied.copy), str(program)
            )
            task = _use_copy(experiment, copied, program, notes)
    if earlier is not None:
        _require_same(earlier, copies)
    runner = replace(experiment.runner, build_dir=project)
    if runner.no_shared_fs:
        runner = replace(runner, sync="code")
    return CodeSnapshot(replace(experiment, runner=runner, task=task), copies, notes)


def continue_in_snapshot(record: LaunchRecord | None, words: Sequence[str]) -> None:
    """Replace this process with the ``flagscale`` command of a run's copy, if the run has one that
    is not this one already, and no other user could have written it. ``words`` are the arguments.
    """
    if record is None or record.snapshot is None:
        return
    project = Path(record.snapshot.project)
    if project == PROJECT or not (project / "flagscale" / "cli.py").is_file():
        return
    try:
        for directory in (project, project.parent):
            require_private(directory)
    except OSError:
        return  # the caller reports that the copy is not used
    path = [str(project / probe.CODE_ROOTS[1]), str(project), os.environ.get(_PYTHON_PATH, "")]
    environment = {**os.environ, _PYTHON_PATH: os.pathsep.join(filter(None, path))}
    sys.stdout.flush()
    arguments = python_arguments("flagscale.cli", project)
    os.execve(sys.executable, [sys.executable, *arguments, *words], environment)


def _require_same(earlier: RecordedSnapshot, copies: RecordedSnapshot) -> None:
    """Check that copies of copies have their names, which follow from their content.

    Raises:
        ConfigError: An earlier copy was changed.
    """
    for old, new in ((earlier.project, copies.project), (earlier.copy, copies.copy)):
        if old and Path(old).name != Path(new).name:
            hint = "runner.snapshot=false runs the present code"
            raise ConfigError(f"{old}: {_CHANGED}", hint=hint)


def _problem(experiment: Experiment, text: str, hint: str) -> ConfigError:
    return ConfigError(Problem(KEY, text, find_location(experiment.sources, KEY)), hint=hint)


def _refuse_other_directories(experiment: Experiment) -> None:
    """Refuse directories of this project on hosts, which the copy would replace."""
    keys = ["experiment.runner.build_dir"] if experiment.runner.build_dir else []
    for section, overrides in (
        ("device_type_specific", experiment.by_type),
        ("node_specific", experiment.by_host),
    ):
        keys += [
            f"{section}.{n}.build_dir" for n, override in overrides.items() if override.build_dir
        ]
    if keys:
        text = f"hosts run the copy of this machine's code, and {keys[0]} names another directory"
        raise _problem(experiment, text, f"leave out {keys[0]}, or {KEY}")


def _refuse_modules(experiment: Experiment) -> None:
    """Refuse a command that runs a module, which Python looks up in the working directory."""
    if "-m" in experiment.task.command[:2]:
        text = "`-m MODULE` is imported from the working directory, which is not copied"
        raise _problem(experiment, text, "give the file of the program, or leave out the snapshot")


def _note_user_code(experiment: Experiment) -> Iterator[str]:
    """Yield notes about code of the user that is not copied."""
    from flagscale.launcher.preflight import user_code

    task = experiment.task
    names = (
        []
        if task.is_command
        else [
            f"{part.argument} {words[0]}"
            for part in user_code.USER_CODE
            if (words := part.query_arguments(experiment))
        ]
    )
    yield from (f"{KEY}: {name} is not part of the copy" for name in names)
    if task.is_command and find_program_file(task) is None:
        yield f"{KEY}: {task.program} is not part of the copy: it is no file of yours"


# -- programs of users -----------------------------------------------------------------------------


def _find_program(task: Task) -> Path | None:
    """Return the absolute path of a program that is not this project's."""
    if task.is_command:
        return find_program_file(task)
    return task.entrypoint.absolute() if task.external else None


def _find_root(program: Path, earlier: RecordedSnapshot | None) -> tuple[Path, Path]:
    """Return the directory of a program's code, and the directory to copy: the same, or the copy
    of an earlier run.
    """
    if earlier is not None and earlier.copy:
        origin, copy = Path(earlier.origin), Path(earlier.copy)
        if program.is_relative_to(origin) or program.is_relative_to(copy):
            return origin, copy
    root = find_checkout(program.parent) or program.parent
    return root, root


def _copy_program(
    experiment: Experiment,
    program: Path,
    earlier: RecordedSnapshot | None,
    notes: list[str],
    *,
    create: bool,
) -> _Copied:
    """Copy the code of a program. Repositories in it that are not copied are noted."""
    runner = experiment.runner
    if runner.no_shared_fs and runner.names_hosts:
        text = "the copy of the program is on this machine, and the hosts share no files"
        raise _problem(experiment, text, f"leave {KEY} out, or use a shared file system")
    origin, source = _find_root(program, earlier)
    files = _list_program_files(source, experiment, is_copy=source != origin)
    notes += [
        f"{KEY}: {name} is a Git repository of its own, which is not part of the copy"
        for name in files
        if name.endswith("/")
    ]
    directory = Layout(experiment.exp_dir).code
    return _Copied(
        origin, source, _copy_files(source, files, directory, origin.name, create=create)
    )


def _list_program_files(source: Path, experiment: Experiment, *, is_copy: bool) -> list[str]:
    """Return the files of a program's code, relative to its directory.

    Raises:
        ConfigError: They are too many or too large to be code.
    """
    names = None if is_copy else list_code_files(source, experiment.exp_dir)
    if names is None:
        skipped_names = _CACHES if is_copy else _SKIPPED_DIRECTORIES
        names = list(_walk_files(source, skipped_names, experiment.exp_dir))
    sizes = 0
    for name in names[:_MAX_FILES]:
        with suppress(OSError):
            sizes += (source / name).lstat().st_size
    if len(names) > _MAX_FILES or sizes > _MAX_BYTES:
        text = f"{short_path(source)} has too much to be code: "
        text += f"more than {_MAX_FILES:,} files" if len(names) > _MAX_FILES else f"{sizes:,} bytes"
        hint = "keep the program in a Git checkout whose .gitignore leaves out data"
        raise _problem(experiment, text, hint)
    return names


def _walk_files(
    source: Path, skipped_names: Collection[str], exp_dir: Path | None = None
) -> Iterator[str]:
    """Yield the files and symbolic links below a directory, and stop beyond the limit."""
    count = 0
    for directory, subdirectories, names in os.walk(source):
        subdirectories[:] = sorted(
            name
            for name in subdirectories
            if name not in skipped_names and Path(directory, name) != exp_dir
        )
        links = [name for name in subdirectories if Path(directory, name).is_symlink()]
        for name in sorted([*names, *links]):
            yield os.path.relpath(os.path.join(directory, name), source)  # noqa: PTH118 - fast
            count += 1
        if count > _MAX_FILES:
            return


@dataclass(frozen=True)
class _Copied:
    """Directory of a program's code, the directory that was copied in its place (the same, or an
    earlier copy), and the copy.
    """

    origin: Path
    source: Path
    copy: Path

    def original(self, path: Path) -> Path:
        """Return the path of the code itself that a path of an earlier copy stands for."""
        is_copied = path.is_relative_to(self.source)
        return self.origin / path.relative_to(self.source) if is_copied else path

    def find(self, path: Path) -> Path | None:
        """Return the path in the copy that stands for a path of the code; None if there is none."""
        for root in (self.source, self.origin):
            if path.is_relative_to(root) and (self.source / path.relative_to(root)).exists():
                return self.copy / path.relative_to(root)
        return None


def _use_copy(experiment: Experiment, copied: _Copied, program: Path, notes: list[str]) -> Task:
    """Return the task with a copied program and its packages. What is not part of the copy is
    noted.
    """
    task = experiment.task
    positions = [i for i, word in enumerate(task.command) if Path(word).absolute() == program]
    copied_program = copied.find(program) or program
    packages = []
    for package in (*task.packages, *_python_path(experiment)):
        copied_package = copied.find(package)
        if copied_package is not None:
            packages.append(copied_package)
        elif package in task.packages:
            packages.append(package)
            notes.append(f"{KEY}: {package} is not part of the copy")
    command = [
        str(copied_program) if i in positions[:1] else word for i, word in enumerate(task.command)
    ]
    is_entrypoint = task.entrypoint == program or not task.is_command
    return replace(
        task,
        entrypoint=copied_program if is_entrypoint else task.entrypoint,
        command=tuple(command),
        packages=tuple(dict.fromkeys(packages)),
        is_copied=True,
    )


def _python_path(experiment: Experiment) -> Iterator[Path]:
    for text in (os.environ.get(_PYTHON_PATH, ""), experiment.envs.common.get(_PYTHON_PATH, "")):
        yield from (Path(entry).absolute() for entry in text.split(os.pathsep) if entry)


# -- copies ----------------------------------------------------------------------------------------


def _list_project_files() -> Iterator[str]:
    """Yield the files of this project and of the adapted backend, relative to the project."""
    for root in probe.CODE_ROOTS:
        for name in _walk_files(PROJECT / root, _SKIPPED_DIRECTORIES):
            yield f"{root}/{name}"


def _copy_files(
    source: Path, names: Sequence[str], directory: Path, name: str, *, create: bool
) -> Path:
    """Copy files to a directory that is named by their content, and return it.

    Raises:
        ConfigError: It exists and was changed.
    """
    digest = _digest_files(source, names)
    target = directory / f"{name}-{digest}"
    if not create:
        return target
    if not target.exists():
        make_private_directory(directory)
        temporary = Path(tempfile.mkdtemp(prefix=".", dir=directory))
        try:
            for file_name in names:
                _copy_file(source / file_name, temporary / file_name)
            try:
                temporary.rename(target)
            except OSError:
                if not target.exists():  # made by another launch in the meantime
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    if _digest_files(target, names) != digest:
        raise ConfigError(f"{target}: {_CHANGED}", hint="remove the directory")
    return target


def _digest_files(source: Path, names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(names):
        path = source / name
        try:
            if path.is_symlink():
                content = b"link " + os.fsencode(path.readlink())
            else:
                content = b"x" * bool(path.stat().st_mode & 0o100) + b" " + path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            continue  # deleted, but still in Git's index
        digest.update(b"%b\0%d\0" % (os.fsencode(name), len(content)))
        digest.update(content)
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file with its time, and the bytecode that Python has cached for it, which stays
    valid.
    """
    if not source.is_symlink() and not source.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target, follow_symlinks=False)
    if source.is_symlink():
        return
    target.chmod(0o500 if source.stat().st_mode & 0o100 else 0o400)
    if source.suffix == ".py":
        cached = Path(cache_from_source(str(source)))
        if cached.is_file():
            copied_cache = Path(cache_from_source(str(target)))
            copied_cache.parent.mkdir(exist_ok=True)
            shutil.copy2(cached, copied_cache)
