"""Rewrites of methods that only CUDA tensors and modules support."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from flagscale.patching.codemods.base import Codemod, FileContext, device_call

_FUNCTION_FOR = {"cuda": "to_device", "record_stream": "record_stream", "pin_memory": "pin_memory"}
_ARGUMENTS = {"record_stream": 1, "pin_memory": 0}


class DeviceMethods(Codemod):
    """Rewrites ``x.cuda(…)`` to ``accelerator.to_device(x, …)``, and similar methods.

    ``x.is_cuda`` becomes a query whether the tensor is on the accelerator.
    """

    name: ClassVar[str] = "device-methods"
    summary: ClassVar[str] = ".cuda(), .is_cuda, .pin_memory() and .record_stream() ask the device"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.Call, cst.Attribute)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if isinstance(original, cst.Attribute):
            is_query = original.attr.value == "is_cuda" and not context.bindings.resolve_name(
                original
            )
            if is_query and isinstance(updated, cst.Attribute):
                return device_call("holds", [cst.Arg(updated.value)])
            return updated
        if not isinstance(updated, cst.Call) or not isinstance(updated.func, cst.Attribute):
            return updated
        method = updated.func.attr.value
        if method not in _FUNCTION_FOR or context.bindings.resolve_name(updated.func):
            return updated  # a function of a module, such as torch.cuda.…, is not a method
        argument_count = _ARGUMENTS.get(method)
        if argument_count is not None and len(updated.args) != argument_count:
            return updated
        receiver = cst.Arg(updated.func.value)
        return device_call(_FUNCTION_FOR[method], [receiver, *updated.args])
