"""Prebuilt libraries that are part of the package, for machines without a compiler.

    python -m flagscale.comm.fsccl.prebuilt

compiles fsccl for this Python and this torch into ``prebuilt/`` next to this file, for any
processor of the last ten years (x86-64-v3: AVX2; or 64-bit ARM). The directory is part of a
wheel, and is copied to hosts by ``experiment.runner.sync: code``. A machine uses a prebuilt library
if it was built from the same sources for the same versions of torch and Python, and else compiles
its own.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from flagscale.comm.fsccl import compiling

_PROCESSOR_LEVELS = {"x86_64": "x86-64-v3", "aarch64": "armv8-a"}
_REQUIRED_INSTRUCTIONS = {
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "armv8-a": {"asimd"},
}
"""Instruction sets of each processor level, named as in /proc/cpuinfo."""


def prebuilt_directory() -> Path:
    """Return the directory of prebuilt libraries: ``FSCCL_PREBUILT_DIR``, or ``prebuilt`` next to
    this file.
    """
    return Path(os.environ.get("FSCCL_PREBUILT_DIR") or Path(__file__).with_name("prebuilt"))


def library_path() -> Path | None:
    """Return the path of the prebuilt library for this machine's processor, torch and Python, which
    may not exist; None if the processor's architecture is not supported.
    """
    level = _PROCESSOR_LEVELS.get(platform.machine())
    return (
        None
        if level is None
        else prebuilt_directory() / _compatibility_key(level) / compiling.LIBRARY_FILE
    )


def find_library() -> Path | None:
    """Return the prebuilt library that this machine can load; None if there is none."""
    path = library_path()
    return path if path is not None and path.exists() and missing_instructions() == () else None


def missing_instructions() -> Sequence[str]:
    """Return the instruction sets that prebuilt libraries use and this processor lacks."""
    level = _PROCESSOR_LEVELS.get(platform.machine())
    available = set(compiling.processor_flags().split())
    return () if level is None else tuple(sorted(_REQUIRED_INSTRUCTIONS[level] - available))


def build_library() -> Path:
    """Compile the prebuilt library for this torch and Python, unless it exists.

    Returns:
        Its path.

    Raises:
        BuildError: there is no compiler, or this kind of processor is not supported.
    """
    path = library_path()
    if path is None:
        raise compiling.BuildError(f"fsccl is not prebuilt for {platform.machine()}")
    if not path.exists():
        compiling.compile_into(path, f"-march={_PROCESSOR_LEVELS[platform.machine()]}")
    return path


@functools.cache
def _compatibility_key(level: str) -> str:
    """Return the directory name of a prebuilt library, which is the same for compatible builds. It
    does not depend on the compiler, because machines that use a prebuilt library have none.
    """
    import torch

    digest = hashlib.sha256(compiling.digest_sources())
    abi = str(sysconfig.get_config_var("SOABI"))
    for component in (torch.__version__, str(torch.version.git_version), abi, level):
        digest.update(component.encode() + b"\0")
    return f"torch-{torch.__version__}-{abi}-{digest.hexdigest()[:12]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flagscale.comm.fsccl.prebuilt",
        description="Compile fsccl for this Python and this torch, for other machines to use.",
    )
    parser.parse_args(argv)
    try:
        print(build_library())
    except compiling.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
