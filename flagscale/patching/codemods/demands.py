"""Rewrites of CUDA requirements that a training program checks before it starts."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from flagscale.patching.codemods.base import Codemod, FileContext, device_call

_AVAILABLE = "torch.cuda.is_available"
_PROPERTIES = "torch.cuda.get_device_properties"
_KERNELS = "megatron.legacy.fused_kernels.load"


class CudaDemands(Codemod):
    """Removes ``assert torch.cuda.is_available()`` and guards CUDA-only code.

    Compiling CUDA kernels and reading a device's architecture (0 elsewhere) happen only with CUDA.
    """

    name: ClassVar[str] = "cuda-demands"
    summary: ClassVar[str] = "a program starts without CUDA, and looks for its parts only with it"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.Assert, cst.Expr, cst.Attribute)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if isinstance(original, cst.Assert):
            return cst.Pass() if _is_call_of(original.test, _AVAILABLE, context) else updated
        if isinstance(original, cst.Expr) and isinstance(updated, cst.Expr):
            if not _is_call_of(original.value, _KERNELS, context):
                return updated
            guarded = cst.BooleanOperation(device_call("is_cuda"), cst.And(), updated.value)
            return updated.with_changes(value=guarded)
        if isinstance(original, cst.Attribute) and isinstance(updated, cst.Attribute):
            is_version = original.attr.value in ("major", "minor")
            if is_version and _is_call_of(original.value, _PROPERTIES, context):
                return cst.IfExp(
                    test=device_call("is_cuda"),
                    body=updated,
                    orelse=cst.Integer("0"),
                    lpar=[cst.LeftParen()],
                    rpar=[cst.RightParen()],
                )
        return updated


def _is_call_of(node: cst.CSTNode, name: str, context: FileContext) -> bool:
    return isinstance(node, cst.Call) and context.bindings.resolve_name(node.func) == name
