"""Tests of the ``sitecustomize`` that the launcher puts on the path of other programs' ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
HOOKS = PROJECT / "flagscale" / "rank_hooks"
REPLACED = "print('replaced', __name__)\n"
# A package of the name torch; the thread waits until it has a process group.
TORCH = "import threading\n"
REPORT = "import threading; import torch; print([t.name for t in threading.enumerate()][1:])"


def run_python(directory: Path, code: str, *path: Path, **variables: str) -> str:
    names = ("RANK", "FLAGSCALE_STATUS_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    entries = [*map(str, path), str(HOOKS), str(PROJECT), str(directory)]
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": os.pathsep.join(entries), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    return result.stdout


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(REPLACED)
    (tmp_path / "torch.py").write_text(TORCH)
    return tmp_path


def test_replaced_module_is_imported_and_only_ranks_have_a_thread(packages: Path) -> None:
    rank = {"RANK": "0", "FLAGSCALE_STATUS_DIR": str(packages)}
    assert run_python(packages, REPORT) == "replaced sitecustomize\n[]\n"
    text = run_python(packages, REPORT, **rank)
    assert text == "replaced sitecustomize\n['flagscale-flight']\n"
    assert run_python(packages, "print('no torch')", **rank).endswith("\nno torch\n")


def test_package_of_the_same_name_does_not_disturb_the_program(
    packages: Path, tmp_path: Path
) -> None:
    other = tmp_path / "theirs"
    (other / "flagscale").mkdir(parents=True)
    (other / "flagscale" / "__init__.py").write_text("")
    rank = {"RANK": "0", "FLAGSCALE_STATUS_DIR": str(packages)}
    # An installed package of the name may still provide the thread.
    program = "import torch, flagscale; print(flagscale.__file__)"
    output = run_python(packages, program, other, **rank)
    assert output == f"replaced sitecustomize\n{other}/flagscale/__init__.py\n"
