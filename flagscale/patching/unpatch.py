"""Build an adapted tree: fetch, verify, rewrite, patch, check, and put it in place atomically.

The tree is built next to its final location and renamed, so that either the old or the new tree is
there at any time. A tree with uncollected edits is replaced only with ``force``, and then kept as a
backup.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from flagscale.errors import BackendSourceError
from flagscale.patching import adapt, native
from flagscale.patching.archive import pack
from flagscale.patching.manifest import Edits, Manifest, file_digest, read_manifest, scan_tree
from flagscale.patching.sources import Source, SourceOptions, choose_source
from flagscale.patching.spec import BackendLayout, BackendSpec, cache_directory, load_spec

LOCK_TIMEOUT = 120.0
"""Time to wait for another command on the same tree, in seconds."""

ReportStep = Callable[[str], None]


@dataclass(frozen=True)
class UnpatchResult:
    """Result of an unpatch: the tree's record, whether it was built, edits and backup."""

    manifest: Manifest
    built: bool
    edits: Edits
    backup: Path | None = None


def unpatch(
    layout: BackendLayout,
    choice: SourceOptions,
    *,
    force: bool = False,
    report_step: ReportStep = print,
) -> UnpatchResult:
    """Bring ``layout.tree`` to the state that the backend's definition and ``choice`` describe.

    Does nothing if the tree is current. An empty ``choice`` selects the source of the existing
    tree, otherwise the definition's default. ``say`` is called with a line per step.

    Raises:
        BackendSourceError: the source is unavailable or not as pinned, a codemod or patch fails,
        the
            tree has local edits (unless ``force``), or the disk is full. The existing tree is
            unchanged then.
    """
    spec = load_spec(layout)
    with lock_tree(layout):
        recover_tree(layout)
        current = _read_current(layout, force=force)
        if current and choice == SourceOptions():
            choice = SourceOptions.from_record(current.choice)
        source = choose_source(spec, layout, choice)
        expected_fingerprint = compute_fingerprint(layout, source.identity)
        edits = current.edits(layout.tree) if current else Edits()
        if current and current.fingerprint == expected_fingerprint and not (force and edits):
            return UnpatchResult(_retry_native_module(layout, spec, current), False, edits)
        if current and edits and not force:
            raise _lost_edits_error(layout, edits)
        replaced = layout.tree.exists() and (current is None or bool(edits))
        with _build_directory(layout) as building:
            job = _BuildJob(layout, spec, choice, source, expected_fingerprint, report_step)
            manifest = _build_tree(job, building)
            backup = _put_in_place(layout, building, keep=replaced)
        return UnpatchResult(manifest, True, edits, backup)


@contextmanager
def lock_tree(layout: BackendLayout) -> Iterator[None]:
    """Hold the tree's lock, so that only one command works on it."""
    with disk_errors(layout):
        layout.tree.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(layout.sibling("lock"), timeout=LOCK_TIMEOUT)
        try:
            lock.acquire()
        except Timeout as error:
            raise BackendSourceError(
                f"another command has held {layout.sibling('lock')} for {LOCK_TIMEOUT:.0f} s",
                hint="wait for the other patch or unpatch to end",
            ) from error
        try:
            yield
        finally:
            lock.release()


@contextmanager
def disk_errors(layout: BackendLayout) -> Iterator[None]:
    """Turn file system errors into one message."""
    try:
        yield
    except OSError as error:
        where = error.filename or layout.tree.parent
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space left on the disk" if full else (error.strerror or str(error))
        raise BackendSourceError(
            f"{where}: {what}; {layout.tree} is unchanged",
            hint="about 30 MB are needed beside the tree" if full else None,
        ) from error


def compute_fingerprint(layout: BackendLayout, source_identity: str) -> str:
    """Return the digest of all inputs of a tree: source, definition, codemods, interpreter."""
    parts: dict[str, object] = {"source": source_identity, "python": sys.implementation.cache_tag}
    parts["native"] = native.extension_suffix()
    parts["definition"] = {
        path: digest
        for path, digest in scan_tree(layout.definition).items()
        if path.startswith(("files/", "patches/")) or path == "codemods.yaml"
    }
    parts["codemods"] = scan_tree(Path(__file__).parent / "codemods")
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read_current(layout: BackendLayout, *, force: bool) -> Manifest | None:
    """Return the record of the existing tree, or None if there is no tree of ours."""
    try:
        manifest = read_manifest(layout.manifest)
    except BackendSourceError:
        if not force:
            raise
        return None
    if manifest is None and layout.tree.exists() and not force:
        raise BackendSourceError(
            f"{layout.tree} exists, but not by this tool: it may hold work of yours",
            hint="move it aside, adapt it with --path, or use --force, which keeps a backup",
        )
    return manifest


def _lost_edits_error(layout: BackendLayout, edits: Edits) -> BackendSourceError:
    listed = "\n".join(f"  {line}" for line in edits.format_lines()[:20])
    more = len(edits.format_lines()) - 20
    return BackendSourceError(
        f"{layout.tree} must be made anew, and local edits in it would be lost:\n{listed}"
        + (f"\n  … and {more} more" if more > 0 else ""),
        hint=f"collect them with tools/patch/patch.py --backend {layout.backend}, "
        f"or use --force, which keeps a backup",
    )


def _retry_native_module(layout: BackendLayout, spec: BackendSpec, manifest: Manifest) -> Manifest:
    """Try again to provide the compiled module if it is missing."""
    if spec.native_module is None or manifest.generated:
        return manifest
    module = native.provide_module(spec, layout.tree, manifest.version)
    if module is None or module.path is None:
        return manifest
    updated = with_native_module(manifest, module)
    updated.write(layout.manifest)
    return updated


def with_native_module(manifest: Manifest, provided: native.NativeModule) -> Manifest:
    """Return the record with new information about the compiled module."""
    fields = {**vars(manifest), "native": provided.how}
    fields["generated"] = (provided.path,) if provided.path else ()
    fields["warnings"] = () if provided.path else (provided.how,)
    return Manifest(**fields)


@contextmanager
def _build_directory(layout: BackendLayout) -> Iterator[Path]:
    """Provide a build directory next to the tree, which is removed unless it was renamed."""
    building = layout.sibling("building")
    with disk_errors(layout):
        shutil.rmtree(building, ignore_errors=True)
        try:
            yield building
        finally:
            shutil.rmtree(building, ignore_errors=True)


@dataclass(frozen=True)
class _BuildJob:
    """Inputs of one build."""

    layout: BackendLayout
    spec: BackendSpec
    choice: SourceOptions
    source: Source
    fingerprint: str
    say: ReportStep


def _build_tree(job: _BuildJob, tree: Path) -> Manifest:
    layout, spec = job.layout, job.spec
    job.say(f"fetching {job.source.description}")
    job.source.fetch(cache_directory(), tree)
    version = read_version(spec, tree)
    job.say("writing our own files and running the codemods")
    own_files = adapt.write_own_files(layout.files, tree) if layout.files.is_dir() else []
    changes = adapt.run_codemods(spec, tree)
    base = scan_tree(tree)
    pack(tree, base, tree / layout.base.relative_to(layout.tree))
    patches = adapt.apply_patches(layout.patches, tree) if layout.patches.is_dir() else {}
    after = scan_tree(tree)
    patched = {path for path in after if after[path] != base.get(path)}
    job.say("compiling")
    adapt.check_python(tree, sorted({*own_files, *changes, *patched}))
    provided = native.provide_module(spec, tree, version)
    adapt.write_bytecode(tree, layout.tree, (spec.version_file.partition("/")[0],))
    manifest = Manifest(
        backend=layout.backend,
        version=version,
        source=job.source.description,
        identity=job.source.identity,
        choice=job.choice.to_record(),
        fingerprint=job.fingerprint,
        made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        codemods=adapt.sum_changes(changes),
        rewritten_files=len(changes),
        patches=patches,
        files=after,
    )
    manifest = with_native_module(manifest, provided) if provided else manifest
    manifest.write(tree / layout.manifest.relative_to(layout.tree))
    return manifest


def read_version(spec: BackendSpec, tree: Path) -> str:
    """Return a tree's version: ``__version__``, or MAJOR, MINOR, PATCH and PRE_RELEASE.

    Raises:
        BackendSourceError: the tree is not this backend's, or has no version.
    """
    path = tree / spec.version_file
    if not path.is_file():
        has = ", ".join(sorted(p.name for p in tree.iterdir())[:8]) if tree.is_dir() else "nothing"
        raise BackendSourceError(
            f"the source is not {spec.name}: it has no {spec.version_file} (it has {has})"
        )
    constants: dict[str, str] = {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    constants[target.id] = str(node.value.value)
    if "__version__" in constants:
        return constants["__version__"]
    if all(name in constants for name in ("MAJOR", "MINOR", "PATCH")):
        numbers = ".".join(constants[name] for name in ("MAJOR", "MINOR", "PATCH"))
        return numbers + constants.get("PRE_RELEASE", "")
    raise BackendSourceError(
        f"{spec.version_file} says neither __version__ nor MAJOR, MINOR, PATCH"
    )


def _put_in_place(layout: BackendLayout, building: Path, *, keep: bool) -> Path | None:
    """Rename the new tree into place; return the backup of the old one, if it was kept."""
    backup = _free_backup(layout) if keep else None
    retired = backup or layout.sibling("old")
    if layout.tree.exists():
        if backup is None:
            shutil.rmtree(retired, ignore_errors=True)
        layout.tree.rename(retired)
    try:
        building.rename(layout.tree)
    except OSError:
        if retired.exists():
            retired.rename(layout.tree)
        raise
    if backup is None:
        shutil.rmtree(retired, ignore_errors=True)
    return backup


def _free_backup(layout: BackendLayout) -> Path:
    number = 1
    while (path := layout.tree.with_name(f"{layout.tree.name}.backup-{number}")).exists():
        number += 1
    return path


def recover_tree(layout: BackendLayout) -> None:
    """Restore the old tree if a command was killed between its two renames."""
    old = layout.sibling("old")
    if old.exists() and not layout.tree.exists():
        old.rename(layout.tree)


def patch_digests(layout: BackendLayout) -> dict[str, str]:
    """Return the digest of every patch in the definition."""
    if not layout.patches.is_dir():
        return {}
    return {name: file_digest(layout.patches / name) for name in adapt.list_patches(layout.patches)}
