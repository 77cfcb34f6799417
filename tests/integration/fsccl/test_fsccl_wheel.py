"""Test of a wheel with prebuilt fsccl on a machine without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flagscale.comm.fsccl import build, prebuilt

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.integration, pytest.mark.compiler]

ROOT = Path(__file__).parents[3]
ALL_REDUCE_PROGRAM = """
import sys, torch, torch.distributed as dist
import flagscale.comm.fsccl.build as build
assert build.__file__.startswith(sys.argv[1]), build.__file__
print(build.describe_origin(), build.unavailable_reason())
store = dist.HashStore()
dist.init_process_group("fsccl", store=store, rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(tensor.tolist())
"""


def test_wheel_provides_fsccl_without_a_compiler(tmp_path: Path) -> None:
    tree, installed = tmp_path / "tree", tmp_path / "installed"
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    shutil.copytree(ROOT / "flagscale", tree / "flagscale", ignore=ignored)
    shutil.copytree(ROOT / "tools" / "dev", tree / "tools" / "dev")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tree / name)
    # Reuse this machine's library, because compiling it for many targets takes a minute.
    # Build in a new process, because torch numbers the extensions that one process builds.
    program = "from flagscale.comm.fsccl.build import load_extension; load_extension()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
    library = prebuilt.library_path()
    assert library is not None
    target = tree / library.relative_to(ROOT)
    target.parent.mkdir(parents=True)
    shutil.copy2(build._build_path(), target)
    build_process = subprocess.run(
        [sys.executable, str(tree / "tools" / "dev" / "wheel.py"), "--output", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert build_process.returncode == 0, build_process.stderr
    assert f"holds fsccl for {library.parent.name}" in build_process.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALL_REDUCE_PROGRAM, str(installed)],
        env={"PATH": "/nowhere", "HOME": str(tmp_path), "PYTHONPATH": str(installed)},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert process.stdout.splitlines() == ["prebuilt None", "[1.0, 1.0, 1.0]"], process.stderr
    assert not (tmp_path / ".cache").exists()
