"""Rewrites of ``torch.cuda.<function>`` to ``accelerator.<function>``."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from flagscale.patching.codemods.base import (
    Codemod,
    FileContext,
    KeywordCodemod,
    device_call,
    device_name,
)

_SAME_NAME = (
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "device_memory_used",
    "empty_cache",
    "get_rng_state",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
)
FUNCTIONS = {f"torch.cuda.{name}": name for name in _SAME_NAME} | {
    "torch.cuda.is_available": "has_device",
    "torch.cuda.random.get_rng_state": "get_rng_state",
    "torch.cuda.random.set_rng_state": "set_rng_state",
    "torch.cuda.nvtx.range_push": "nvtx_range_push",
    "torch.cuda.nvtx.range_pop": "nvtx_range_pop",
    "torch.cuda.nvtx.range": "nvtx_range",
}
CLASSES = {"torch.cuda.Stream": "Stream", "torch.cuda.Event": "Event"}
"""Classes: rewritten where they are called, kept where they are named (annotations, isinstance)."""


class CudaCalls(Codemod):
    """Rewrites functions wherever they are named, and classes where they are instantiated."""

    name: ClassVar[str] = "cuda-calls"
    summary: ClassVar[str] = "torch.cuda functions ask the current accelerator"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.Attribute, cst.Call)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if isinstance(original, cst.Call) and isinstance(updated, cst.Call):
            name = context.bindings.resolve_name(original.func) or ""
            is_bare_name = isinstance(original.func, cst.Name)
            target = CLASSES.get(name) or (FUNCTIONS.get(name) if is_bare_name else None)
            return updated.with_changes(func=device_name(target)) if target else updated
        if context.is_within(cst.Annotation):
            return updated
        target = FUNCTIONS.get(context.bindings.resolve_name(original) or "")
        return device_name(target) if target else updated


class BarrierDevices(KeywordCodemod):
    """Rewrites ``device_ids=[torch.cuda.current_device()]``, a list that gloo's barrier refuses."""

    name: ClassVar[str] = "barrier-devices"
    summary: ClassVar[str] = "barriers name a device only if there is one"
    keyword: ClassVar[str] = "device_ids"

    def replace_value(
        self, original: cst.BaseExpression, updated: cst.BaseExpression, context: FileContext
    ) -> cst.BaseExpression | None:
        if (
            isinstance(original, cst.List)
            and len(original.elements) == 1
            and isinstance(call := original.elements[0].value, cst.Call)
            and context.bindings.resolve_name(call.func) == "torch.cuda.current_device"
        ):
            return device_call("device_ids")
        return None
