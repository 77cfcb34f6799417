"""Compilation of C++ test programs, with or without a sanitizer.

Compiling takes longer than running. Objects are shared by programs and cached in the user's
cache directory until one of their inputs changes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

BUILDS = {
    "fast": ("-O2",),
    "plain": ("-O1",),
    "threads": ("-O1", "-fsanitize=thread"),
    # Unoptimised, because checks for undefined behaviour make the optimiser very slow. The vptr
    # check uses a pipe and reports a false error if no descriptor is left.
    "memory": (
        "-O0",
        "-fsanitize=address,undefined",
        "-fno-sanitize=vptr",
        "-fno-sanitize-recover=all",
    ),
}
"""Compiler flags by build: optimized, without sanitizer, and with the thread and memory sanitizers.
"""
_UNUSED_SECONDS = 24 * 3600.0
COMPILER = ("g++", "-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread")


def compile_program(
    build: str, sources: Sequence[Path], *, include: Path, dependencies: Iterable[Path]
) -> Path:
    """Compile ``sources``, of which the first is the test, and return the program's path.

    ``build`` is one of :data:`BUILDS`; ``dependencies`` are all files that a source may include, a
    change of which causes a new build.
    """
    common_digest = hashlib.sha256(" ".join((*COMPILER, *BUILDS[build])).encode())
    for path in sorted(dependencies):
        common_digest.update(path.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(home, "flagscale", "tests", sources[0].parent.name)
    objects = []
    for source in sources:
        digest = common_digest.copy()
        digest.update(source.read_bytes())
        output = cache / f"{source.parent.name}-{source.stem}-{build}-{digest.hexdigest()[:16]}.o"
        _compile(output, build, "-c", f"-I{include}", source)
        objects.append(output)
    names = " ".join(path.name for path in objects)
    digest = hashlib.sha256(names.encode())
    output = cache / f"{sources[0].stem}-{build}-{digest.hexdigest()[:16]}"
    _compile(output, build, *objects)
    return output


def _compile(output: Path, build: str, *arguments: str | Path) -> None:
    """Compile a file unless it exists, and delete its previous versions.

    Those in use may belong to tests of another version of the sources that run at the same time.
    """
    with suppress(FileNotFoundError):
        os.utime(output)  # it is in use
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    name = output.name.removesuffix(".o").rpartition("-")[0]
    for previous_output in output.parent.glob(f"{name}-{'[0-9a-f]' * 16}{output.suffix}"):
        with suppress(FileNotFoundError):
            if time.time() - previous_output.stat().st_mtime > _UNUSED_SECONDS:
                previous_output.unlink()
    # Other pytest workers may compile it at the same time.
    temporary = output.with_name(f"{os.getpid()}-{output.name}")
    command = [*COMPILER, *BUILDS[build], *map(str, arguments), "-o", str(temporary)]
    subprocess.run(command, check=True, timeout=500)
    temporary.rename(output)
