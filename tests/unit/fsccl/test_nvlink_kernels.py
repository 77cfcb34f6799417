"""Tests of the NVLink engine's kernels and host code on a CPU, with ranks as threads, processes or
fibers. The C++ programs are in ``nvlink/``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.compiled import compile_program

HERE = Path(__file__).parent / "nvlink"
CSRC = Path(__file__).parents[3] / "flagscale" / "comm" / "fsccl" / "csrc"
NVLINK = CSRC / "nvlink"
REGISTRATION = CSRC / "torch" / "registration.h"
SOURCES = (
    NVLINK / "kernel_plan.cpp",
    NVLINK / "engine.cpp",
    CSRC / "core" / "reduce.cpp",
    CSRC / "core" / "types.cpp",
)

pytestmark = [pytest.mark.integration, pytest.mark.compiler]
# Sanitizers. ThreadSanitizer is slow, and each one compiles all sources.
KINDS = [pytest.param("threads", marks=pytest.mark.slow), "memory"]


def build_program(kind: str, test: str = "kernels_test.cpp") -> Path:
    headers = [*NVLINK.glob("*.h"), *(CSRC / "core").glob("*.h"), *HERE.glob("*.h"), REGISTRATION]
    return compile_program(kind, [HERE / test, *SOURCES], include=CSRC, dependencies=headers)


def run_program(path: Path, *words: object) -> tuple[int, str, str]:
    process = subprocess.run(
        [str(path), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    return process.returncode, process.stdout, process.stderr[-6000:]


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_interleaving_loses_data(ranks: int, seed: int) -> None:
    """Memory accesses of the ranks are interleaved randomly, and ranks are delayed while others run
    ahead.
    """
    assert run_program(build_program("plain"), "fibers", ranks, 400, seed) == (0, "ok\n", "")


@pytest.mark.parametrize("sanitizer", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_as_threads(sanitizer: str, ranks: int) -> None:
    assert run_program(build_program(sanitizer), "threads", ranks, 250, 3) == (0, "ok\n", "")


def test_ranks_as_processes() -> None:
    assert run_program(build_program("memory"), "processes", 3, 150, 4) == (0, "ok\n", "")


@pytest.mark.parametrize("broken", [(1,), (2,), (0, 1)], ids=["one-early", "two-early", "torn"])
def test_broken_protocol_is_detected(broken: tuple[int, ...]) -> None:
    """test_no_interleaving_loses_data must fail if flags are read as posted one or two steps too
    early, or if the flag of a line arrives before its data.
    """
    code, out, err = run_program(build_program("plain"), "fibers", 3, 300, 1, *broken)
    assert (code, out) == (1, "")
    assert "wrong result" in err


def test_waiting_for_an_absent_rank_ends() -> None:
    """Not run with ThreadSanitizer, because ranks that have given up continue without each other,
    so their accesses race.
    """
    assert run_program(build_program("memory"), "absent", 3, 20, 5) == (0, "ok\n", "")


@pytest.mark.parametrize("sanitizer", KINDS)
@pytest.mark.parametrize("source", ["engine_test.cpp", "faults_test.cpp", "registration_test.cpp"])
def test_engine(source: str, sanitizer: str) -> None:
    """Groups, tuning tables, registered memory, streams and faults, on a CPU in place of a GPU."""
    result = run_program(build_program(sanitizer, source))
    assert result == (0, "ok\n", "")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("abcdefghijklmnop", "bbcdefghijklmnop", "nvlink"),
        ("abcdefghijklmnop", "ABCDEFGHIJKLMNOP", "other"),
        ("abcdefghijklmnop", "0bcdefghijklmnop", "unknown"),
    ],
)
def test_nvml_link_query(
    first: str, second: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML is queried for GPUs that a process does not see; without NVML, the answer is unknown."""
    binary = compile_program(
        "memory", [HERE / "nvml_test.cpp", NVLINK / "nvml.cpp"], include=CSRC, dependencies=[]
    )
    name = "GPU-61626364-6566-6768-696a-6b6c6d6e6f70"
    assert run_program(binary, first, second) == (0, f"unknown {name}\n", "")
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, HERE / "nvml_library.c"], check=True, timeout=60
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert run_program(binary, first, second) == (0, f"{expected} {name}\n", "")
