#!/usr/bin/env python3
"""Build a wheel that contains compiled fsccl, so that hosts need no compiler.

    tools/dev/wheel.py [--python OTHER/bin/python ...] [--output dist]

Each given Python compiles fsccl for itself and its installed torch. All builds go into one wheel,
and a host uses the matching one. A host without a matching build compiles fsccl on first use.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flagscale.cli_errors import run_command
from flagscale.errors import ConfigError, FlagscaleError

PROJECT = Path(__file__).resolve().parents[2]
COPIED_PATHS = ("flagscale", "pyproject.toml", "setup.py", "README.md", "LICENSE")
PREBUILT = Path("flagscale", "comm", "fsccl", "prebuilt")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python",
        nargs="+",
        default=[sys.executable],
        metavar="PYTHON",
        help="Python interpreters, each with the torch to build for (default: this one)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=PROJECT / "dist",
        help="output directory (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    for python in options.python:
        if shutil.which(python) is None:
            raise ConfigError(f"--python: no such program: {python!r}")
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        copy_sources(tree)
        for python in options.python:
            print(f"compiling fsccl for {python}", flush=True)
            run_in_tree([python, "-m", "flagscale.comm.fsccl.prebuilt"], tree)
        platform_tag = f"linux_{platform.machine()}"
        run_in_tree(
            [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                str(tree),
                f"--config-settings=--build-option=--plat-name={platform_tag}",
                "--wheel-dir",
                str(options.output.absolute()),
            ],
            tree,
        )
        for library in sorted((tree / PREBUILT).glob("*/*.so")):
            print(
                f"holds fsccl for {library.parent.name}, {library.stat().st_size / 2**20:.1f} MiB"
            )
    newest = max(options.output.glob("flagscale-*.whl"), key=lambda path: path.stat().st_mtime)
    print(newest)
    return 0


def copy_sources(tree: Path) -> None:
    """Copy the package with its prebuilt libraries, but without files that Python generates."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED_PATHS:
        source = PROJECT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=ignored)
        else:
            shutil.copy2(source, tree / name)


def run_in_tree(command: Sequence[str], tree: Path) -> None:
    """Run a command in the copied tree, so that the tree's own package is imported.

    Raises:
        FlagscaleError: The command failed. Its output has been printed.
    """
    code = subprocess.run(command, cwd=tree, check=False).returncode
    if code:
        raise FlagscaleError(f"{' '.join(command[:3])} ended with {code}")


if __name__ == "__main__":
    sys.exit(run_command(main))
