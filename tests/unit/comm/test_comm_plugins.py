"""Tests of backends that are missing, mapped to devices, or provided by other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from flagscale.comm import registry
from flagscale.comm.plugins import DeviceMap
from flagscale.errors import ConfigError

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mpi", "no MPI"),
        ("ucc", "no UCC"),
        ("flagcx", "flagcx is not installed"),
        ("torchcomms", "torchcomms is not installed"),
    ],
)
def test_missing_backend_error(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        registry.get_usable_backend(name, "cuda" if name == "flagcx" else "cpu")
    assert "to get it: " in str(error.value)


@pytest.mark.parametrize("name", registry.list_backend_names())
def test_every_missing_backend_has_instructions(name: str) -> None:
    backend = registry.get_backend(name)
    if name != "auto" and any(backend.explain_unavailable(d) for d in backend.devices):
        assert backend.how_to_get


@pytest.mark.parametrize(
    ("name", "device", "reason"),
    [
        ("cpu:gloo", "cpu", None),
        ("cpu:gloo,cuda:nccl", "cpu", "this build of torch has no nccl"),
        ("cpu:gloo", "cuda", "names no backend for cuda"),
        ("cpu:gloo,cuda:nccl", "cuda", "no CUDA device"),
        ("cpu:strange", "cpu", "torch knows no backend 'strange'"),
    ],
)
def test_device_map_is_usable_where_its_part_is(name: str, device: str, reason: str | None) -> None:
    backend = registry.get_backend(name)
    assert isinstance(backend, DeviceMap)
    explanation = backend.explain_unavailable(device)  # type: ignore[arg-type]
    if "no nccl" in (reason or "") and dist.is_nccl_available():
        reason = None
    assert explanation is None if reason is None else reason in (explanation or "")
    assert backend.torch_backend("cpu") == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cpu:", "no device:backend"),
        (":gloo", "no device:backend"),
        ("cpu:gloo,", "no device:backend"),
        ("cpu:gl oo", "no device:backend"),
        ("cpu:gloo,cpu:mpi", "names cpu twice"),
    ],
)
def test_malformed_map_is_rejected(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.get_backend(name)


def write_package(directory: Path, name: str, entry: str, source: str) -> None:
    (directory / f"{name}.py").write_text(source)
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[flagscale.comm_backends]\n{entry}\n")


_FAST_BACKEND = """
from flagscale.comm.base import CommBackend
class Fast(CommBackend):
    name, summary, devices = "?", "a quick one", ("cpu",)
    def explain_unavailable(self, device): return None
"""


def list_backends(directory: Path) -> str:
    """Return the printed list of backends with the packages in ``directory``.

    A new process prints it, because installed packages are searched only once.
    """
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{directory}:{root}", "COLUMNS": "200"}
    program = "from flagscale.bench.cli import main_comm; main_comm(['list'])"
    completed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return completed.stdout


def test_backends_of_packages_and_load_errors(tmp_path: Path) -> None:
    write_package(tmp_path, "fastlib", "fast = fastlib:Fast", _FAST_BACKEND)
    write_package(tmp_path, "badlib", "bad = badlib:Nothing", "")
    write_package(tmp_path, "oddlib", "odd = oddlib:VALUE\ngloo = oddlib:VALUE", "VALUE = 3\n")
    listing = list_backends(tmp_path)
    assert "fast        -        yes  -     a quick one" in listing
    assert "bad: badlib: AttributeError" in listing
    assert "odd: oddlib: oddlib:VALUE is no CommBackend" in listing
    # A package cannot replace a built-in backend.
    assert "gloo        -        yes  no    torch's own TCP" in listing
    assert "  gloo on cuda: all but sendrecv, permute\n" in listing
    assert "  mpi: all but reduce_scatter\n" in listing
