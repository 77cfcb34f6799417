"""Tests of the NVLink engine on a machine without a GPU: compilation of its kernels, errors, and
the reference of its checks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flagscale.comm.fsccl import nvlink, nvlink_cases, nvlink_compile
from flagscale.comm.fsccl.build import BuildError, load_extension
from flagscale.comm.fsccl.nvlink_cases import NvlinkCase
from flagscale.errors import ConfigError

pytestmark = [pytest.mark.integration, pytest.mark.torch]

CPU = torch.device("cpu")
NVLINK = Path(nvlink_compile.__file__).parent / "csrc" / "nvlink"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_no_kernel_spills(tmp_path: Path) -> None:
    """No kernel may spill registers to memory. Only the copy kernels are compiled here."""
    source = (NVLINK / "kernels.cu").read_text()
    lines = [
        line
        for line in source.splitlines()
        if not line.startswith("FSCCL_REDUCTION_KERNELS") or "BFloat16" in line
    ]
    (tmp_path / "kernels.cu").write_text("\n".join(lines) + "\n")
    process = subprocess.run(
        [
            "nvcc",
            "-cubin",
            "-arch=sm_90",
            *nvlink_compile._COMPILER_FLAGS,
            "-Xptxas=-v",
            f"-I{NVLINK}",
            str(tmp_path / "kernels.cu"),
            "-o",
            str(tmp_path / "kernels.cubin"),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.returncode == 0, process.stderr[-4000:]
    reports = [line for line in process.stderr.splitlines() if "bytes spill stores" in line]
    stackless_reports = [line for line in reports if "0 bytes stack frame" in line]
    assert len(stackless_reports) >= 9
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in reports)


def test_missing_cuda_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSCCL_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(nvlink_compile, "_nvrtc_candidates", lambda: iter(["libno-such.so.13"]))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(BuildError, match="neither NVRTC nor nvcc"):
        nvlink_compile.compile_kernels((9, 0))


@pytest.mark.compiler
def test_engine_reports_errors_without_a_gpu() -> None:
    engine = load_extension().nvlink
    assert not engine.installed(0)
    with pytest.raises(RuntimeError, match="no NVLink engine is installed"):
        nvlink.NvlinkCommunicator(0, 0, 2)
    with pytest.raises(RuntimeError, match="found 'all_reduce ordinary 8 quick 0 0'"):
        engine.check_table("all_reduce ordinary 8 quick 0 0\n")
    assert engine.check_table(engine.default_table(8)) == engine.default_table(8)


@pytest.mark.parametrize("value", ["yes", "2"])
def test_invalid_values_of_the_switch_are_rejected(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(nvlink.ENABLE_VARIABLE, value)
    with pytest.raises(ConfigError, match=f"{nvlink.ENABLE_VARIABLE}={value}"):
        nvlink.is_enabled()


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_agrees_with_float64(op: str, dtype: torch.dtype) -> None:
    """The reference of the checks on GPUs, nvlink_cases.expected_output(), agrees with float64."""
    case = NvlinkCase(
        "reduce_scatter",
        algorithm="staged",
        dtype=dtype,
        op=op,
        count=100,
        shift=0,
        in_place=False,
        seed=5,
    )
    inputs = [nvlink_cases.make_input(case, p, 300, CPU).double()[100:200] for p in range(3)]
    exact = {
        "sum": lambda: sum(inputs),
        "avg": lambda: sum(inputs) / 3,
        "min": lambda: torch.stack(inputs).amin(0),
        "max": lambda: torch.stack(inputs).amax(0),
        "product": lambda: inputs[0] * inputs[1] * inputs[2],
    }[op]()
    actual = nvlink_cases.expected_output(case, 1, 3, CPU, 0)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, rtol=1e-2, atol=1e-2)


def test_checks_cover_every_algorithm() -> None:
    covered = {
        (c.collective, c.algorithm, c.dtype) for c in nvlink_cases.generate_cases(quick=True)
    }
    assert len(covered) == 14 * 8  # algorithms of all collectives, types
    all_gather_output = nvlink_cases.expected_output(
        NvlinkCase(
            "all_gather",
            algorithm="staged",
            dtype=torch.int32,
            op="sum",
            count=4,
            shift=0,
            in_place=False,
            seed=1,
        ),
        0,
        2,
        CPU,
        0,
    )
    assert all_gather_output.numel() == 8
