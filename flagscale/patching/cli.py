"""Commands of ``tools/patch/*.py`` and ``flagscale unpatch | patch | patch-status``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from flagscale.errors import BackendSourceError, FlagscaleError
from flagscale.patching import report
from flagscale.patching.collect import collect
from flagscale.patching.manifest import Edits, read_manifest
from flagscale.patching.sources import SOURCE_KINDS, SourceOptions
from flagscale.patching.spec import DEFAULT_BACKEND, BackendLayout, load_spec, project_root
from flagscale.patching.unpatch import unpatch

_UNPATCH = """\
Fetch a training backend's pinned source and adapt it in third_party/<backend>.

The source is verified, rewritten by codemods so that it trains on a GPU or on a CPU, changed by
the patches in backends/<backend>/patches, checked to compile, and put in place at once. When
everything is as it should be already, nothing is done. A tree with edits that no patch holds
yet is never replaced unless --force is given, and then it is kept beside as a backup.
"""
_UNPATCH_EXAMPLES = """\
examples:
  unpatch.py --backend Megatron-LM                      the pinned release, from the registry
  unpatch.py --backend Megatron-LM --source installed   the copy in site-packages: no network
  unpatch.py --backend Megatron-LM --source git         the same release with its own programs
  unpatch.py --backend Megatron-LM --url URL --commit SHA
  unpatch.py --backend Megatron-LM --path ../Megatron-LM
  unpatch.py --backend Megatron-LM --status             what is applied, what was edited since
"""
_PATCH = """\
Turn the edits made in third_party/<backend> into patches in backends/<backend>/patches.

There is one patch a file, also for new and for deleted files, against the source as the
codemods leave it. unpatch.py then makes the same tree anywhere. Patches of files that are no
longer edited are removed; a patch that has not changed keeps every byte.
"""
_PATCH_EXAMPLES = """\
examples:
  patch.py --backend Megatron-LM
  patch.py --backend Megatron-LM --message "Use our attention kernel on chip X"
"""


def main_unpatch(argv: Sequence[str] | None = None) -> int:
    """Fetch and adapt a backend's source; return the exit code."""
    parser = _make_parser("unpatch.py", _UNPATCH, _UNPATCH_EXAMPLES)
    parser.add_argument("--source", choices=SOURCE_KINDS, help="where the source comes from")
    parser.add_argument("--path", type=Path, help="a checkout or a tar archive (--source path)")
    parser.add_argument("--url", help="git repository instead of the pinned one (--source git)")
    parser.add_argument("--commit", help="full commit id instead of the pinned one")
    parser.add_argument("--force", action="store_true", help="replace an edited tree; keep a copy")
    parser.add_argument("--status", action="store_true", help="say what is applied, do nothing")
    arguments = parser.parse_args(argv)
    _check_combination(parser, arguments)
    layout = BackendLayout(arguments.root, arguments.backend)
    if arguments.status:
        return _run_with_errors(lambda: _print_status(layout, as_json=False))

    def run() -> int:
        options = SourceOptions(arguments.source, arguments.path, arguments.url, arguments.commit)
        report_step = (lambda line: None) if arguments.quiet else _print_step
        outcome = unpatch(layout, options, force=arguments.force, report_step=report_step)
        if not arguments.quiet or outcome.manifest.warnings:
            report.print_outcome(layout, outcome)
        return 0

    return _run_with_errors(run)


def main_patch(argv: Sequence[str] | None = None) -> int:
    """Collect the edits of an adapted tree into patches; return the exit code."""
    parser = _make_parser("patch.py", _PATCH, _PATCH_EXAMPLES)
    parser.add_argument("--message", "--name", help="header of the new and changed patches")
    parser.add_argument(
        "--force", action="store_true", help="also when the patches are not what the tree has"
    )
    arguments = parser.parse_args(argv)
    layout = BackendLayout(arguments.root, arguments.backend)

    def run() -> int:
        collected = collect(layout, message=arguments.message, force=arguments.force)
        if not arguments.quiet:
            report.print_collected(layout, collected)
        return 0

    return _run_with_errors(run)


def main_status(argv: Sequence[str] | None = None) -> int:
    """Print the state of a backend's tree; return the exit code."""
    parser = _make_parser("status.py", "Say what is applied to third_party/<backend>.", None)
    parser.add_argument("--json", action="store_true", help="the same for programs")
    arguments = parser.parse_args(argv)
    layout = BackendLayout(arguments.root, arguments.backend)
    return _run_with_errors(lambda: _print_status(layout, as_json=arguments.json))


def _print_status(layout: BackendLayout, *, as_json: bool) -> int:
    load_spec(layout)
    manifest = read_manifest(layout.manifest)
    edits = manifest.edits(layout.tree) if manifest else Edits()
    if not as_json:
        report.print_status(layout, manifest, edits)
        return 0
    record = asdict(manifest) if manifest else {}
    record.pop("files", None)
    print(json.dumps({"adapted": manifest is not None, **record, "edits": asdict(edits)}, indent=1))
    return 0


def _make_parser(program: str, description: str, examples: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--backend", default=DEFAULT_BACKEND, help="default: %(default)s")
    parser.add_argument(
        "--root", type=Path, default=project_root(), help="the directory that holds backends/"
    )
    parser.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    return parser


def _check_combination(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with code 2 if options contradict each other."""
    option_by_kind = {"path": arguments.path, "git": arguments.url or arguments.commit}
    implied_kinds = [kind for kind, value in option_by_kind.items() if value is not None]
    if len(implied_kinds) > 1:
        parser.error("--path does not go with --url or --commit")
    if implied_kinds and arguments.source not in (None, *implied_kinds):
        option = "--path" if implied_kinds == ["path"] else "--url and --commit"
        parser.error(
            f"{option} belongs to --source {implied_kinds[0]}, not --source {arguments.source}"
        )


def _print_step(line: str) -> None:
    print(f"… {line}", flush=True)


def _run_with_errors(command: Callable[[], int]) -> int:
    try:
        return command()
    except FlagscaleError as error:
        report.print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        report.print_error(BackendSourceError("interrupted; the tree in place is unchanged"))
        return 130
