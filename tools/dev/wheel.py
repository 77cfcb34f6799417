#!/usr/bin/env python3
"""Build a wheel that carries fsccl compiled, so that hosts need no compiler.

    tools/dev/wheel.py [--python OTHER/bin/python ...] [--output dist]

Each Python compiles it for itself and the torch that it has; all builds go into one wheel, of which
a host uses the one that fits it. A host that none fits compiles for itself on first use.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.cli_errors import guard
from flagscale.errors import ConfigError, FlagscaleError

PROJECT = Path(__file__).resolve().parents[2]
PARTS = ("flagscale", "pyproject.toml", "setup.py", "README.md", "LICENSE")
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
        help="Pythons, each with the torch to build for; default: this one",
    )
    parser.add_argument("--output", type=Path, default=PROJECT / "dist", help="%(default)s")
    options = parser.parse_args(argv)
    for python in options.python:
        if shutil.which(python) is None:
            raise ConfigError(f"--python: there is no program {python!r}")
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        copy_sources(tree)
        for python in options.python:
            print(f"compiling fsccl for {python}", flush=True)
            run([python, "-m", "flagscale.comm.fsccl.prebuilt"], tree)
        platform_tag = f"linux_{platform.machine()}"
        run(
            [
                *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(tree)),
                f"--config-settings=--build-option=--plat-name={platform_tag}",
                *("--wheel-dir", str(options.output.absolute())),
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
    """The package, with what has been prebuilt here already, without what Python makes of it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in PARTS:
        part = PROJECT / name
        if part.is_dir():
            shutil.copytree(part, tree / name, ignore=ignored)
        else:
            shutil.copy2(part, tree / name)


def run(command: Sequence[str], tree: Path) -> None:
    """Run in the copy, whose own package is imported.

    Raises:
        FlagscaleError: it fails; what it said has been shown.
    """
    code = subprocess.run(command, cwd=tree, check=False).returncode
    if code:
        raise FlagscaleError(f"{' '.join(command[:3])} ended with {code}")


if __name__ == "__main__":
    sys.exit(guard(main))
