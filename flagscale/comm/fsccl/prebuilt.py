"""Builds that come with the package, for machines that have no compiler.

    python -m flagscale.comm.fsccl.prebuilt

compiles fsccl for this Python and this torch into ``prebuilt/`` beside this file, for any processor
of the last ten years (x86-64-v3: AVX2; or 64-bit ARM). A wheel takes what lies there along, and so
does ``experiment.runner.sync: code``. A machine uses one that was made from the same sources, for
its torch and its Python, and compiles for itself where there is none.
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

_LEVELS = {"x86_64": "x86-64-v3", "aarch64": "armv8-a"}
_NEEDED = {
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "armv8-a": {"asimd"},
}
"""What /proc/cpuinfo calls the instructions of each level."""


def directory() -> Path:
    """Where prebuilt libraries lie: ``FSCCL_PREBUILT_DIR``, or beside this file."""
    return Path(os.environ.get("FSCCL_PREBUILT_DIR") or Path(__file__).with_name("prebuilt"))


def library() -> Path | None:
    """The prebuilt library for this environment, whether it is there or not; None for a processor
    that none is built for."""
    level = _LEVELS.get(platform.machine())
    return None if level is None else directory() / _key(level) / compiling.FILE


def find() -> Path | None:
    """A library that this machine can load as it is; None where there is none."""
    found = library()
    return found if found is not None and found.exists() and missing() == () else None


def missing() -> Sequence[str]:
    """The instructions that a prebuilt library needs and this processor does not have."""
    level = _LEVELS.get(platform.machine())
    has = set(compiling.processor_flags().split())
    return () if level is None else tuple(sorted(_NEEDED[level] - has))


def make() -> Path:
    """Compile this environment's, unless it is there; returns it.

    Raises:
        BuildError: there is no compiler, or none is built for this kind of processor.
    """
    found = library()
    if found is None:
        raise compiling.BuildError(f"fsccl is not prebuilt for {platform.machine()}")
    if not found.exists():
        compiling.compile_into(found, f"-march={_LEVELS[platform.machine()]}")
    return found


@functools.cache
def _key(level: str) -> str:
    """Names what fits together: unlike the name of a build of one's own without the compiler,
    which the machines that use it do not have."""
    import torch

    digest = hashlib.sha256(compiling.sources_digest())
    abi = str(sysconfig.get_config_var("SOABI"))
    for part in (torch.__version__, str(torch.version.git_version), abi, level):
        digest.update(part.encode() + b"\0")
    return f"torch-{torch.__version__}-{abi}-{digest.hexdigest()[:12]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flagscale.comm.fsccl.prebuilt",
        description="Compile fsccl for this Python and this torch, for other machines to use.",
    )
    parser.parse_args(argv)
    try:
        print(make())
    except compiling.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
