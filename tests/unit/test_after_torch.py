"""Tests that ``import flagscale.comm`` registers fsccl with torch without importing torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMM_FIRST = "import flagscale.comm\nimport torch.distributed as dist\n"
TORCH_FIRST = "import torch.distributed as dist\nimport flagscale.comm\n"
COMM_CHECK_FIRST = (
    "from flagscale.comm.base import explain_missing_torch\n"
    "assert explain_missing_torch() is None\n"
    "import torch.distributed as dist\n"
)
ASSERT_FSCCL_IS_KNOWN = "assert dist.is_backend_available('fsccl'), dist.Backend.backend_list\n"
ASSERT_TORCH_IS_UNCHANGED = (
    "import importlib.machinery, sys, torch\n"
    "assert type(torch.__spec__.loader) is importlib.machinery.SourceFileLoader\n"
    "assert torch.__loader__ is torch.__spec__.loader\n"
    "assert not any('after_torch' in type(f).__module__ for f in sys.meta_path)\n"
)


def run_python(program: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_torch_is_not_imported() -> None:
    assert run_python("import flagscale.comm, sys; print('torch' in sys.modules)") == "False\n"


@pytest.mark.torch
@pytest.mark.parametrize(
    "imports", [COMM_FIRST, TORCH_FIRST, COMM_CHECK_FIRST], ids=["comm", "torch", "comm-check"]
)
def test_fsccl_is_registered_in_any_order_of_imports(imports: str) -> None:
    run_python(imports + ASSERT_FSCCL_IS_KNOWN + ASSERT_TORCH_IS_UNCHANGED)


def test_comm_is_imported_without_torch() -> None:
    program = (
        "import sys, importlib.util\n"
        "sys.modules['torch'] = None\n"  # None makes Python refuse to import it
        "import flagscale.comm\n"
        "del sys.modules['torch']\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "assert importlib.util.find_spec('torch') is None\n"
    )
    run_python(program)


@pytest.mark.torch
def test_errors_of_the_callback_do_not_affect_torch() -> None:
    program = (
        "import warnings\n"
        "from flagscale import after_torch\n"
        "after_torch.call_after_torch(lambda: 1 / 0)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import torch\n"
        "assert [str(w.message) for w in caught if 'after importing' in str(w.message)]\n"
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
