"""Tests of each codemod on snippets: code to rewrite, and code to leave unchanged."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from flagscale.errors import BackendSourceError
from flagscale.patching.codemods.base import rewrite_source
from flagscale.patching.codemods.names import CODEMOD_NAMES
from flagscale.patching.codemods.registry import CODEMODS

IMPORT = "from megatron.core import device as accelerator\n"


def rewrite(source: str, *names: str) -> str:
    """Return the source after the codemods, without the import line they add."""
    result = rewrite_source(source, [CODEMODS[n] for n in names or CODEMOD_NAMES], path="x.py")
    ast.parse(result.source)
    return result.source.replace(IMPORT, "")


CHANGED = [
    ("demand", "cuda-demands", "assert torch.cuda.is_available(), 'no CUDA'", "pass"),
    (
        "kernels",
        "cuda-demands",
        "from megatron.legacy import fused_kernels\nfused_kernels.load(args)",
        "from megatron.legacy import fused_kernels\naccelerator.is_cuda() and "
        "fused_kernels.load(args)",
    ),
    (
        "architecture",
        "cuda-demands",
        "a = torch.cuda.get_device_properties(0).major",
        "a = (torch.cuda.get_device_properties(0).major if accelerator.is_cuda() else 0)",
    ),
    ("call", "cuda-calls", "torch.cuda.synchronize()", "accelerator.synchronize()"),
    (
        "argument",
        "cuda-calls",
        "x = make(2, device=torch.cuda.current_device())",
        "x = make(2, device=accelerator.current_device())",
    ),
    ("reference", "cuda-calls", "f = torch.cuda.empty_cache", "f = accelerator.empty_cache"),
    ("available", "cuda-calls", "ok = torch.cuda.is_available()", "ok = accelerator.has_device()"),
    (
        "range",
        "cuda-calls",
        "torch.cuda.nvtx.range_push('a')",
        "accelerator.nvtx_range_push('a')",
    ),
    ("class-called", "cuda-calls", "s = torch.cuda.Stream()", "s = accelerator.Stream()"),
    (
        "in-context",
        "cuda-calls",
        "with torch.cuda.stream(s):\n    pass",
        "with accelerator.stream(s):\n    pass",
    ),
    (
        "barrier",
        "barrier-devices",
        "wait(group, device_ids=[torch.cuda.current_device()])",
        "wait(group, device_ids=accelerator.device_ids())",
    ),
    (
        "keyword",
        "device-literals",
        "a = torch.zeros(1, device='cuda')",
        "a = torch.zeros(1, device=accelerator.device_type())",
    ),
    (
        "torch-device",
        "device-literals",
        'd = torch.device("cuda")',
        "d = torch.device(accelerator.device_type())",
    ),
    (
        "indexed",
        "device-literals",
        'd = torch.device("cuda", i)',
        "d = torch.device(accelerator.device_type(), i)",
    ),
    (
        "autocast",
        "device-literals",
        'c = torch.autocast("cuda", dtype=t)',
        "c = torch.autocast(accelerator.device_type(), dtype=t)",
    ),
    ("to", "device-literals", "y = x.to('cuda')", "y = x.to(accelerator.device_type())"),
    (
        "ternary",
        "device-literals",
        "f(device='cuda' if big else 'cpu')",
        "f(device=accelerator.device_type() if big else 'cpu')",
    ),
    ("cuda", "device-methods", "y = x[0].cuda()", "y = accelerator.to_device(x[0])"),
    (
        "cuda-arguments",
        "device-methods",
        "y = f(x).cuda(d, non_blocking=True)",
        "y = accelerator.to_device(f(x), d, non_blocking=True)",
    ),
    ("is-cuda", "device-methods", "if not p.is_cuda: pass", "if not accelerator.holds(p): pass"),
    ("pin", "device-methods", "y = x.cpu().pin_memory()", "y = accelerator.pin_memory(x.cpu())"),
    (
        "record-stream",
        "device-methods",
        "x.record_stream(s)",
        "accelerator.record_stream(x, s)",
    ),
    (
        "backend",
        "group-backends",
        "g = new(ranks, backend='nccl')",
        "g = new(ranks, backend=accelerator.group_backend('nccl'))",
    ),
    (
        "pinned",
        "pinned-factories",
        "x = torch.ones(3, pin_memory=True)",
        "x = torch.ones(3, pin_memory=accelerator.has_device())",
    ),
    (
        "type-equal",
        "tensor-types",
        "if p.type() == 'torch.cuda.FloatTensor': pass",
        "if p.type() == accelerator.tensor_type('torch.cuda.FloatTensor'): pass",
    ),
    (
        "type-in",
        "tensor-types",
        "ok = p.type() in ['torch.cuda.HalfTensor']",
        "ok = p.type() in [accelerator.tensor_type('torch.cuda.HalfTensor')]",
    ),
]


@pytest.mark.parametrize(
    ("codemod", "source_body", "expected_body"),
    [c[1:] for c in CHANGED],
    ids=[c[0] for c in CHANGED],
)
def test_codemod_rewrites_its_pattern(codemod: str, source_body: str, expected_body: str) -> None:
    source = f"import torch\n\n\ndef f(x, i, s):\n    {_indent(source_body)}\n"
    expected = f"import torch\n\n\ndef f(x, i, s):\n    {_indent(expected_body)}\n"
    assert rewrite(source, codemod) == expected
    assert rewrite(source) == expected, "no other codemod may interfere"


def _indent(text: str) -> str:
    return text.replace("\n", "\n    ")


UNCHANGED = [
    ("annotation", "def f(e: torch.cuda.Event, s: 'torch.cuda.Stream') -> None: pass"),
    ("class-named", "ok = isinstance(s, torch.cuda.Stream)"),
    ("cuda-only-function", "p = torch.cuda.get_device_properties(0)"),
    ("docstring", 'def f():\n    """Calls torch.cuda.synchronize() and x.cuda()."""'),
    ("literal-compared", "if x.device.type == 'cuda': pass"),
    ("literal-elsewhere", "n = name.startswith('cuda') or table.get('cuda')"),
    ("other-backend", "g = new(ranks, backend='gloo')"),
    ("backend-default", "def f(backend='nccl'): pass"),
    ("type-in-message", "raise TypeError('torch.cuda.FloatTensor')"),
    ("rebound-name", "def f(torch):\n    torch.cuda.synchronize()"),
    ("other-torch", "other.torch.cuda.synchronize()"),
    ("unpinned", "x = torch.ones(3, pin_memory=False)"),
    ("pin-with-device", "x.pin_memory(device)"),
]


@pytest.mark.parametrize("source", [c[1] for c in UNCHANGED], ids=[c[0] for c in UNCHANGED])
def test_unrelated_code_is_unchanged(source: str) -> None:
    source = f"import torch\n{source}\n"
    result = rewrite_source(source, list(CODEMODS.values()), path="x.py")
    assert (result.source, result.changes) == (source, {})


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("import torch as t", "t.cuda.synchronize()"),
        ("import torch.cuda", "torch.cuda.synchronize()"),
        ("import torch.cuda as c", "c.synchronize()"),
        ("from torch import cuda", "cuda.synchronize()"),
        ("from torch.cuda import synchronize", "synchronize()"),
        ("from torch.cuda import synchronize as wait", "wait()"),
    ],
)
def test_all_forms_of_an_import_are_recognized(imports: str, call: str) -> None:
    assert rewrite(f"{imports}\n{call}\n") == f"{imports}\naccelerator.synchronize()\n"


def test_new_import_follows_existing_imports() -> None:
    source = (
        '"""Doc."""\n\nfrom __future__ import annotations\n\nimport torch\n\nX = 1\nimport os\n'
    )
    source += "import os\ntorch.cuda.synchronize()\n"
    lines = rewrite_source(source, [CODEMODS["cuda-calls"]], path="x").source.splitlines()
    assert lines[4:6] == ["import torch", IMPORT.strip()]


RNG = """
import torch


def _get_cuda_rng_state(device="cuda"):
    \"\"\"Doc.\"\"\"
    return deep(device)


def _set_cuda_rng_state(new_state, device=-1):
    queue(lambda: deep(new_state))


class Tracker:
    def fork(self):
        saved = torch.get_rng_state()
        yield
        if not torch.equal(saved, torch.get_rng_state()):
            warn()
        if self.other:
            warn()
"""


def test_rng_functions_return_before_they_reach_cuda() -> None:
    rewritten_module = ast.parse(rewrite(RNG, "rng-state"))
    getter, setter = (n for n in rewritten_module.body if isinstance(n, ast.FunctionDef))
    guard = "if not accelerator.is_cuda():\n    return accelerator."
    assert ast.get_docstring(getter) == "Doc."
    assert ast.unparse(getter.body[1]) == guard + "get_rng_state()"
    assert ast.unparse(setter.body[0]) == guard + "set_rng_state(new_state)"


def test_fork_warns_only_for_a_different_cpu_generator() -> None:
    rewritten_source = rewrite(RNG, "rng-fork-warning")
    assert (
        "if accelerator.has_device() and not torch.equal(saved, torch.get_rng_state()):"
        in rewritten_source
    )
    assert "        if self.other:\n" in rewritten_source


OPTIONAL = dedent("""
    try:
        from extra import gemm, other
        HAVE = True
    except ImportError:
        HAVE = False


    def f():
        return 1 if gemm is not None else 2
""")


def test_missing_optional_import_becomes_none() -> None:
    rewritten_source = rewrite(OPTIONAL)
    assert "    HAVE = False\n    gemm = None\n" in rewritten_source
    assert "other = None" not in rewritten_source
    scope: dict[str, object] = {}
    exec(rewritten_source, scope)  # ours, and there is no package called extra
    assert scope["f"]() == 2  # type: ignore[operator]


def test_optional_import_that_is_bound_elsewhere_is_unchanged() -> None:
    source = OPTIONAL.replace("    HAVE = False", "    HAVE = False\n    gemm = None")
    assert rewrite(source) == source


def test_conflicting_use_of_the_alias_is_rejected() -> None:
    source = "import torch\naccelerator = 1\ntorch.cuda.synchronize()\n"
    with pytest.raises(BackendSourceError, match=r"x\.py: binds the name 'accelerator'"):
        rewrite(source)


def test_broken_file_is_named() -> None:
    with pytest.raises(BackendSourceError, match=r"x\.py: not valid Python"):
        rewrite("def f(:\n")


def test_second_run_changes_nothing() -> None:
    source = "import torch\ntorch.cuda.synchronize()\nx.cuda()\nf(device='cuda')\n"
    first_result = rewrite_source(source, list(CODEMODS.values()), path="x").source
    second_result = rewrite_source(first_result, list(CODEMODS.values()), path="x")
    assert (second_result.source, second_result.changes) == (first_result, {})


def test_registry_and_names_agree() -> None:
    assert tuple(sorted(CODEMODS)) == CODEMOD_NAMES
