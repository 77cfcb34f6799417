"""Programs of tests in C++, compiled with or without a sanitizer.

Compiling takes longer than running, so objects are shared by programs and kept in the user's cache
for as long as nothing that they are made of has changed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

BUILDS = {
    "fast": ("-O2",),
    "plain": ("-O1",),
    "threads": ("-O1", "-fsanitize=thread"),
    # Unoptimised: checking for undefined behaviour makes the optimiser very slow. Whether an object
    # is of its type is asked by means of a pipe, and taken for wrong where no descriptor is left.
    "memory": (
        *("-O0", "-fsanitize=address,undefined", "-fno-sanitize=vptr"),
        "-fno-sanitize-recover=all",
    ),
}
COMPILER = ("g++", "-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread")


def program(build: str, sources: Sequence[Path], *, include: Path, reads: Iterable[Path]) -> Path:
    """The program of ``sources``, of which the first one is the test.

    ``build`` is one of :data:`BUILDS`; ``reads`` are all files that a source may include.
    """
    common = hashlib.sha256(" ".join((*COMPILER, *BUILDS[build])).encode())
    for path in sorted(reads):
        common.update(path.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(home, "flagscale", "tests", sources[0].parent.name)
    objects = []
    for source in sources:
        digest = common.copy()
        digest.update(source.read_bytes())
        made = cache / f"{source.parent.name}-{source.stem}-{build}-{digest.hexdigest()[:16]}.o"
        _make(made, build, "-c", f"-I{include}", source)
        objects.append(made)
    names = " ".join(path.name for path in objects)
    digest = hashlib.sha256(names.encode())
    made = cache / f"{sources[0].stem}-{build}-{digest.hexdigest()[:16]}"
    _make(made, build, *objects)
    return made


def _make(made: Path, build: str, *what: str | Path) -> None:
    """Have the compiler make a file, unless it is there; what it replaces goes."""
    if made.exists():
        return
    made.parent.mkdir(parents=True, exist_ok=True)
    name = made.name.removesuffix(".o").rpartition("-")[0]
    for old in made.parent.glob(f"{name}-{'[0-9a-f]' * 16}{made.suffix}"):
        old.unlink(missing_ok=True)
    # Other workers may be making it, too.
    part = made.with_name(f"{os.getpid()}-{made.name}")
    command = [*COMPILER, *BUILDS[build], *map(str, what), "-o", str(part)]
    subprocess.run(command, check=True, timeout=500)
    part.rename(made)
