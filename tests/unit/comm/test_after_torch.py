"""Tests that ``import flagscale.comm`` registers fsccl with torch without importing torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FIRST = "import flagscale.comm\nimport torch.distributed as dist\n"
SECOND = "import torch.distributed as dist\nimport flagscale.comm\n"
AFTER_CHECK = (
    "from flagscale.comm.base import explain_missing_torch\n"
    "assert explain_missing_torch() is None\n"
    "import torch.distributed as dist\n"
)
KNOWN = "assert dist.is_backend_available('fsccl'), dist.Backend.backend_list\n"
UNCHANGED = (
    "import importlib.machinery, sys, torch\n"
    "assert type(torch.__spec__.loader) is importlib.machinery.SourceFileLoader\n"
    "assert torch.__loader__ is torch.__spec__.loader\n"
    "assert not any('after_torch' in type(f).__module__ for f in sys.meta_path)\n"
)


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_is_not_imported() -> None:
    assert run_python("import flagscale.comm, sys; print('torch' in sys.modules)") == "False\n"


@pytest.mark.torch
@pytest.mark.parametrize("order", [FIRST, SECOND, AFTER_CHECK], ids=["first", "second", "asked"])
def test_fsccl_is_registered_in_either_order(order: str) -> None:
    run_python(order + KNOWN + UNCHANGED)


def test_without_torch_nothing_happens() -> None:
    program = (
        "import sys, importlib.util\n"
        "sys.modules['torch'] = None\n"  # as Python has it: not to be imported
        "import flagscale.comm\n"
        "del sys.modules['torch']\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "assert importlib.util.find_spec('torch') is None\n"
    )
    run_python(program)


@pytest.mark.torch
def test_errors_of_the_action_do_not_affect_torch() -> None:
    program = (
        "import warnings\n"
        "from flagscale.comm import after_torch\n"
        "after_torch.call_after_torch(lambda: 1 / 0)\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    import torch\n"
        "assert [str(w.message) for w in said if 'after importing' in str(w.message)]\n"
        "assert torch.ones(1).sum() == 1\n"
    )
    run_python(program)


def test_import_errors_of_torch_are_unchanged(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import flagscale.comm\n"
        "try:\n"
        "    import torch\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert run_python(program) == "libcudart.so is missing\n"
