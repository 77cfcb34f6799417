"""Build an adapted tree: fetch, verify, rewrite, patch, check, and put it in place atomically.

The definition of a backend (:mod:`.spec`) determines the tree. The tree is built next to its final
location and renamed, so that either the old or the new tree is there at any time. A tree with
uncollected edits is replaced only with ``force``, and then kept as a backup.
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

LOCK_TIMEOUT_SECONDS = 120.0
"""Time to wait for another command on the same tree."""

ReportStep = Callable[[str], None]


@dataclass(frozen=True)
class UnpatchResult:
    """Result of an unpatch: the tree's record, whether it was built anew, local edits, and the
    backup.
    """

    manifest: Manifest
    was_built: bool
    edits: Edits
    backup: Path | None = None


def unpatch(
    layout: BackendLayout,
    options: SourceOptions,
    *,
    force: bool = False,
    report_step: ReportStep = print,
) -> UnpatchResult:
    """Bring ``layout.tree`` to the state that the backend's definition and ``options`` describe.

    Does nothing if the tree is current. Without any option set, the source of the existing tree is
    used, otherwise the definition's default. ``report_step`` is called with a line per step.

    Raises:
        BackendSourceError: the source is unavailable or not as pinned, a codemod or patch fails,
            the tree has local edits (unless ``force``), or the disk is full. The existing tree is
            unchanged then.
    """
    spec = load_spec(layout)
    with lock_tree(layout):
        recover_tree(layout)
        current_manifest = _read_current(layout, force=force)
        if current_manifest and options == SourceOptions():
            options = SourceOptions.from_record(current_manifest.choice)
        source = choose_source(spec, layout, options)
        expected_fingerprint = compute_fingerprint(layout, source.identity)
        edits = current_manifest.edits(layout.tree) if current_manifest else Edits()
        if (
            current_manifest
            and current_manifest.fingerprint == expected_fingerprint
            and not (force and edits)
        ):
            return UnpatchResult(
                _retry_native_module(layout, spec, current_manifest), was_built=False, edits=edits
            )
        if current_manifest and edits and not force:
            raise _lost_edits_error(layout, edits)
        keep_backup = layout.tree.exists() and (current_manifest is None or bool(edits))
        with _build_directory(layout) as build_directory:
            job = _BuildJob(layout, spec, options, source, expected_fingerprint, report_step)
            manifest = _build_tree(job, build_directory)
            backup = _put_in_place(layout, build_directory, keep_backup=keep_backup)
        return UnpatchResult(manifest, was_built=True, edits=edits, backup=backup)


@contextmanager
def lock_tree(layout: BackendLayout) -> Iterator[None]:
    """Hold the tree's lock, so that only one command works on it."""
    with convert_disk_errors(layout):
        layout.tree.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(layout.sibling("lock"), timeout=LOCK_TIMEOUT_SECONDS)
        try:
            lock.acquire()
        except Timeout as error:
            raise BackendSourceError(
                f"another command has held {layout.sibling('lock')} for "
                f"{LOCK_TIMEOUT_SECONDS:.0f} s",
                hint="wait for the other patch or unpatch to end",
            ) from error
        try:
            yield
        finally:
            lock.release()


@contextmanager
def convert_disk_errors(layout: BackendLayout) -> Iterator[None]:
    """Convert file system errors to a :class:`BackendSourceError` with one message."""
    try:
        yield
    except OSError as error:
        path = error.filename or layout.tree.parent
        is_disk_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "no space left on the disk" if is_disk_full else (error.strerror or str(error))
        raise BackendSourceError(
            f"{path}: {reason}; {layout.tree} is unchanged",
            hint="about 30 MB are needed beside the tree" if is_disk_full else None,
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
    """Return the record of the existing tree; None if there is no tree, or with ``force`` no
    record.
    """
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
    edit_lines = "\n".join(f"  {line}" for line in edits.format_lines()[:20])
    omitted_count = len(edits.format_lines()) - 20
    return BackendSourceError(
        f"{layout.tree} must be made anew, and local edits in it would be lost:\n{edit_lines}"
        + (f"\n  … and {omitted_count} more" if omitted_count > 0 else ""),
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


def with_native_module(manifest: Manifest, module: native.NativeModule) -> Manifest:
    """Return the record with new information about the compiled module."""
    fields = {**vars(manifest), "native": module.description}
    fields["generated"] = (module.path,) if module.path else ()
    fields["warnings"] = () if module.path else (module.description,)
    return Manifest(**fields)


@contextmanager
def _build_directory(layout: BackendLayout) -> Iterator[Path]:
    """Provide a build directory next to the tree, which is removed unless it was renamed."""
    directory = layout.sibling("building")
    with convert_disk_errors(layout):
        shutil.rmtree(directory, ignore_errors=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class _BuildJob:
    """Inputs of one build."""

    layout: BackendLayout
    spec: BackendSpec
    options: SourceOptions
    source: Source
    fingerprint: str
    report_step: ReportStep


def _build_tree(job: _BuildJob, tree: Path) -> Manifest:
    layout, spec = job.layout, job.spec
    job.report_step(f"fetching {job.source.description}")
    job.source.fetch(cache_directory(), tree)
    version = read_version(spec, tree)
    job.report_step("writing our own files and running the codemods")
    additional_files = (
        adapt.copy_additional_files(layout.files, tree) if layout.files.is_dir() else []
    )
    changes = adapt.run_codemods(spec, tree)
    base_scan = scan_tree(tree)
    pack(tree, base_scan, tree / layout.base.relative_to(layout.tree))
    patches = adapt.apply_patches(layout.patches, tree) if layout.patches.is_dir() else {}
    final_scan = scan_tree(tree)
    patched_paths = {path for path in final_scan if final_scan[path] != base_scan.get(path)}
    job.report_step("compiling")
    adapt.check_python(tree, sorted({*additional_files, *changes, *patched_paths}))
    module = native.provide_module(spec, tree, version)
    adapt.write_bytecode(tree, layout.tree, (spec.version_file.partition("/")[0],))
    manifest = Manifest(
        backend=layout.backend,
        version=version,
        source=job.source.description,
        identity=job.source.identity,
        choice=job.options.to_record(),
        fingerprint=job.fingerprint,
        made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        codemods=adapt.sum_changes(changes),
        rewritten_files=len(changes),
        patches=patches,
        files=final_scan,
    )
    manifest = with_native_module(manifest, module) if module else manifest
    manifest.write(tree / layout.manifest.relative_to(layout.tree))
    return manifest


def read_version(spec: BackendSpec, tree: Path) -> str:
    """Return a tree's version: ``__version__``, or MAJOR, MINOR, PATCH and PRE_RELEASE.

    Raises:
        BackendSourceError: the tree is not this backend's, or has no version.
    """
    path = tree / spec.version_file
    if not path.is_file():
        found_text = (
            ", ".join(sorted(p.name for p in tree.iterdir())[:8]) if tree.is_dir() else "nothing"
        )
        raise BackendSourceError(
            f"the source is not {spec.name}: it has no {spec.version_file} (it has {found_text})"
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
        f"{spec.version_file} defines neither __version__ nor MAJOR, MINOR, PATCH"
    )


def _put_in_place(
    layout: BackendLayout, build_directory: Path, *, keep_backup: bool
) -> Path | None:
    """Rename the new tree into place; return the backup of the old one, if it was kept.

    In between, the old tree has a name of its own, by which :func:`recover_tree` finds it.
    """
    old_tree = layout.sibling("old")
    if layout.tree.exists():
        layout.tree.rename(old_tree)
    try:
        build_directory.rename(layout.tree)
    except OSError:
        if old_tree.exists():
            old_tree.rename(layout.tree)
        raise
    return _retire_old_tree(layout, keep_backup=keep_backup)


def _retire_old_tree(layout: BackendLayout, *, keep_backup: bool) -> Path | None:
    """Keep the replaced tree as a backup and return its path, or remove it."""
    old_tree, removed_tree = layout.sibling("old"), layout.sibling("removed")
    if keep_backup:
        return old_tree.rename(_unused_backup_path(layout))
    # Removing takes a while: a tree that is removed in part must not be taken for an edited one.
    shutil.rmtree(removed_tree, ignore_errors=True)
    if old_tree.exists():
        old_tree.rename(removed_tree)
    shutil.rmtree(removed_tree, ignore_errors=True)
    return None


def _unused_backup_path(layout: BackendLayout) -> Path:
    number = 1
    while (path := layout.tree.with_name(f"{layout.tree.name}.backup-{number}")).exists():
        number += 1
    return path


def recover_tree(layout: BackendLayout) -> None:
    """Complete the replacement of a tree during which a command was killed.

    The old tree is restored if the new one is not in its place. Otherwise it is removed, or kept as
    a backup if it has edits or is not by this tool.
    """
    shutil.rmtree(layout.sibling("removed"), ignore_errors=True)
    old_tree = layout.sibling("old")
    if not old_tree.exists():
        return
    if not layout.tree.exists():
        old_tree.rename(layout.tree)
        return
    try:
        manifest = read_manifest(old_tree / layout.manifest.relative_to(layout.tree))
    except BackendSourceError:
        manifest = None
    _retire_old_tree(layout, keep_backup=manifest is None or bool(manifest.edits(old_tree)))


def patch_digests(layout: BackendLayout) -> dict[str, str]:
    """Return the digest of every patch in the definition."""
    if not layout.patches.is_dir():
        return {}
    return {name: file_digest(layout.patches / name) for name in adapt.list_patches(layout.patches)}
