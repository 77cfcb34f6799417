"""A wheel brings fsccl to a machine that has no compiler."""

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
SUM = """
import sys, torch, torch.distributed as dist
import flagscale.comm.fsccl.build as build
assert build.__file__.startswith(sys.argv[1]), build.__file__
print(build.how(), build.unavailable())
store = dist.HashStore()
dist.init_process_group("fsccl", store=store, rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(tensor.tolist())
"""


def test_a_machine_without_a_compiler_takes_the_wheels(tmp_path: Path) -> None:
    tree, installed = tmp_path / "tree", tmp_path / "installed"
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    shutil.copytree(ROOT / "flagscale", tree / "flagscale", ignore=ignored)
    shutil.copytree(ROOT / "tools" / "dev", tree / "tools" / "dev")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tree / name)
    # What has been compiled for this machine stands for what takes a minute to compile for many.
    # torch names what one process builds by numbers, so in one of its own.
    ask = "from flagscale.comm.fsccl.build import load_extension; load_extension()"
    subprocess.run([sys.executable, "-c", ask], check=True, timeout=600)
    library = prebuilt.library()
    assert library is not None
    place = tree / library.relative_to(ROOT)
    place.parent.mkdir(parents=True)
    shutil.copy2(build._library(), place)
    made = subprocess.run(
        [sys.executable, str(tree / "tools" / "dev" / "wheel.py"), "--output", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert f"holds fsccl for {library.parent.name}" in made.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SUM, str(installed)],
        env={"PATH": "/nowhere", "HOME": str(tmp_path), "PYTHONPATH": str(installed)},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["prebuilt None", "[1.0, 1.0, 1.0]"], done.stderr
    assert not (tmp_path / ".cache").exists()
