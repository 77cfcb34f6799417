"""What a training program demands of CUDA before it starts, and could do without."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from flagscale.patching.codemods.base import Codemod, FileContext, device_call

_AVAILABLE = "torch.cuda.is_available"
_PROPERTIES = "torch.cuda.get_device_properties"
_KERNELS = "megatron.legacy.fused_kernels.load"


class CudaDemands(Codemod):
    """``assert torch.cuda.is_available()`` goes; the compiler of CUDA kernels is asked, and a
    device's architecture looked up (0 elsewhere), where there is CUDA."""

    name: ClassVar[str] = "cuda-demands"
    summary: ClassVar[str] = "a program starts without CUDA, and looks for its parts only with it"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.Assert, cst.Expr, cst.Attribute)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if isinstance(original, cst.Assert):
            return cst.Pass() if _calls(original.test, _AVAILABLE, context) else updated
        if isinstance(original, cst.Expr) and isinstance(updated, cst.Expr):
            if not _calls(original.value, _KERNELS, context):
                return updated
            guarded = cst.BooleanOperation(device_call("is_cuda"), cst.And(), updated.value)
            return updated.with_changes(value=guarded)
        if isinstance(original, cst.Attribute) and isinstance(updated, cst.Attribute):
            asked = original.attr.value in ("major", "minor")
            if asked and _calls(original.value, _PROPERTIES, context):
                return cst.IfExp(
                    test=device_call("is_cuda"),
                    body=updated,
                    orelse=cst.Integer("0"),
                    lpar=[cst.LeftParen()],
                    rpar=[cst.RightParen()],
                )
        return updated


def _calls(node: cst.CSTNode, name: str, context: FileContext) -> bool:
    return isinstance(node, cst.Call) and context.bindings.qualified(node.func) == name
