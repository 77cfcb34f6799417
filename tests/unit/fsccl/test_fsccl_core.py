"""The C++ core with ranks as threads, under sanitizers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "core"
CORE = Path(__file__).parents[3] / "flagscale" / "comm" / "fsccl" / "csrc" / "core"
BUILDS = {
    "fast": ("-O2",),
    "threads": ("-O1", "-fsanitize=thread"),
    # Unoptimised: checking for undefined behaviour makes the optimiser very slow.
    "memory": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
SHAPES = ["1", "4", "2,2", "3,2", "1,2,2", "3,1", "1,1,1,1"]
# Clusters, k, nelem: sends that divide a chunk and that do not, rings of every stride.
PIPELINES = [("5", 6, 1000), ("3,2", 4, 777), ("1,1,1,1", 3, 900)]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]


def build(name: str, source: Path, parts: tuple[str, ...] = ("core.cpp",)) -> Path:
    """Compiles a test with parts of the core, unless it is there for the very same sources."""
    flags = BUILDS[name]
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted([*CORE.iterdir(), *HERE.glob("*.h"), source]):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flagscale" / "tests"
    program = cache / f"{source.stem}-{name}-{digest.hexdigest()[:16]}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        for old in cache.glob(f"{source.stem}-{name}-*"):
            old.unlink()
        part = program.with_name(f"{program.name}.{os.getpid()}")
        command = ["g++", "-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", *flags]
        files = [*(str(CORE / part) for part in parts), str(source)]
        subprocess.run(
            [*command, f"-I{CORE}", *files, "-o", str(part), "-pthread"], check=True, timeout=240
        )
        part.rename(program)
    return program


@pytest.fixture(scope="module", params=["threads", "memory"])
def program(request: pytest.FixtureRequest) -> Path:
    return build(request.param, HERE / "ranks_test.cpp")


def run(program: Path, *words: str, seconds: float = 120) -> None:
    # ThreadSanitizer takes what is sent for read when the call has returned. In place results may
    # be there by then: a peer made them of what it got, which the sanitizer does not know.
    late_reads = "intercept_send=0" if program.name.startswith("ranks_test") else ""
    done = subprocess.run(
        [str(program), *words],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={
            **os.environ,
            "TSAN_OPTIONS": f"halt_on_error=1 {late_reads}",
            "ASAN_OPTIONS": "detect_leaks=1",
        },
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-8000:]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.replace(",", "+"))
def test_ranks_as_threads(program: Path, shape: str) -> None:
    run(program, shape, "1", "7")


@pytest.mark.parametrize(("shape", "k", "nelem"), PIPELINES, ids=str)
def test_pipelined_schedules(program: Path, shape: str, k: int, nelem: int) -> None:
    run(program, shape, "2", "7", str(k), str(nelem))


@pytest.mark.parametrize("kind", ["threads", "memory"])
def test_messages_of_threads(kind: str) -> None:
    run(build(kind, HERE / "messages_test.cpp"), "1")


def test_small_parts() -> None:
    parts = ("types.cpp", "reduce.cpp", "schedule.cpp", "segment.cpp")
    program = build("memory", HERE / "parts_test.cpp", parts)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.skipif(
    os.environ.get("FLAGSCALE_LARGE_TESTS") != "1",
    reason="moves tens of gigabytes: set FLAGSCALE_LARGE_TESTS=1",
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("clusters", "k"), [("2", 0), ("2", 2), ("1,1", 0), ("1,1", 2)])
def test_more_than_four_gibibytes(clusters: str, k: int) -> None:
    run(build("fast", HERE / "large_test.cpp"), clusters, str(k), seconds=800)
