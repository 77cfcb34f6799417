"""Steps that turn an unpacked source into an adapted tree; :mod:`.unpatch` calls them in order."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from flagscale.errors import BackendSourceError
from flagscale.patching import diffs, git
from flagscale.patching.manifest import file_digest
from flagscale.patching.spec import BackendSpec

_CODEMOD_CANDIDATE_PATTERN = re.compile(
    rb"\bcuda\b|\bis_cuda\b|nccl|_cuda_rng_state|except (Import|ModuleNot)"
)
"""Files without any of these need no codemod; parsing takes most of the time."""
_MIN_FILES_FOR_PROCESSES = 16
"""Number of files below which starting processes costs more than it saves."""


def copy_additional_files(additional_files: Path, tree: Path) -> list[str]:
    """Copy the definition's additional files into the tree and return their paths.

    Raises:
        BackendSourceError: the source already has a file of that name.
    """
    copied_paths = []
    for original in sorted(p for p in additional_files.rglob("*") if p.is_file()):
        if "__pycache__" in original.parts:
            continue
        path = original.relative_to(additional_files).as_posix()
        if (tree / path).exists():
            raise BackendSourceError(
                f"the source already has {path}, which the adaptation would write",
                hint=f"rename {original}, or remove it if upstream now does its work",
            )
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, tree / path)
        copied_paths.append(path)
    return copied_paths


def run_codemods(spec: BackendSpec, tree: Path) -> dict[str, dict[str, int]]:
    """Run the codemods; return the number of changes by file and codemod.

    Raises:
        BackendSourceError: a file cannot be parsed.
    """
    jobs: list[tuple[Path, str, tuple[str, ...]]] = []
    for file in sorted(tree.rglob("*.py")):
        path = file.relative_to(tree).as_posix()
        names = spec.codemods_for(path)
        if names and not file.is_symlink() and _CODEMOD_CANDIDATE_PATTERN.search(file.read_bytes()):
            jobs.append((tree, path, names))
    if len(jobs) < _MIN_FILES_FOR_PROCESSES:
        results: Iterable[tuple[str, dict[str, int]]] = map(_rewrite_file, jobs)
    else:
        workers = min(os.cpu_count() or 1, 8)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            results = list(pool.map(_rewrite_file, jobs, chunksize=4))
    return {path: changes for path, changes in results if changes}


def _rewrite_file(job: tuple[Path, str, tuple[str, ...]]) -> tuple[str, dict[str, int]]:
    from flagscale.patching.codemods.base import rewrite_source  # loads libcst
    from flagscale.patching.codemods.registry import CODEMODS

    tree, path, names = job
    file = tree / path
    try:
        source = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BackendSourceError(f"{path}: not UTF-8: {error}") from error
    rewritten = rewrite_source(source, [CODEMODS[name] for name in names], path=path)
    if rewritten.changes:
        file.write_bytes(rewritten.source.encode("utf-8"))
    return path, dict(rewritten.changes)


def sum_changes(changes: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the number of changes per codemod over all files."""
    total: Counter[str] = Counter()
    for file_changes in changes.values():
        total.update(file_changes)
    return dict(sorted(total.items()))


def list_patches(directory: Path) -> list[str]:
    """Return the patches of a directory, relative to it, in the order in which they are applied."""
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*.patch"))


def apply_patches(directory: Path, tree: Path) -> dict[str, str]:
    """Apply every patch of ``directory``, sorted by name; return their digests.

    Raises:
        BackendSourceError: a patch does not apply; names file, hunk, expected and found lines.
    """
    digests = {}
    for name in list_patches(directory):
        content = (directory / name).read_bytes()
        if message := git.apply_patch(content, tree):
            reasons = diffs.explain_failure(content.decode("utf-8", errors="replace"), tree) or [
                message
            ]
            reason_lines = "\n".join(f"  {reason}" for reason in reasons)
            raise BackendSourceError(
                f"{directory / name}: the patch no longer applies\n{reason_lines}",
                hint="mend or remove the patch; the tree in third_party is unchanged",
            )
        digests[name] = file_digest(directory / name)
    return digests


def check_python(tree: Path, paths: Iterable[str]) -> None:
    """Parse Python files.

    Raises:
        BackendSourceError: a file does not compile; names file and line.
    """
    for path in paths:
        if not path.endswith(".py") or not (tree / path).is_file():
            continue
        try:
            ast.parse((tree / path).read_bytes(), filename=path)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or "?"
            text = (getattr(error, "text", None) or "").strip()
            raise BackendSourceError(f"{path}:{line}: does not compile: {error}: {text}") from error


def write_bytecode(tree: Path, final_tree: Path, packages: Sequence[str]) -> None:
    """Compile the packages' files in advance, for the tree's final location ``final_tree``.

    Without bytecode, the first import of a large backend takes several times as long, on every
    rank. Files that this Python cannot compile are ignored until they are imported.
    """
    roots = [str(tree / package) for package in packages if (tree / package).is_dir()]
    if roots:
        has_many_files = sum(1 for _ in tree.rglob("*.py")) >= _MIN_FILES_FOR_PROCESSES
        compiler = (sys.executable, "-W", "ignore", "-m", "compileall", "-q", "-q")
        workers = "0" if has_many_files else "1"  # 0 is one a core
        command = [*compiler, "-j", workers, "-s", str(tree), "-p", str(final_tree), *roots]
        subprocess.run(command, capture_output=True, check=False)
