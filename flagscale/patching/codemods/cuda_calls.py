"""``torch.cuda.<function>`` becomes ``accelerator.<function>``."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from flagscale.patching.codemods.base import Codemod, FileContext, device_call, device_name

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
#: Classes: rewritten where they are called, left where they are named (annotations, isinstance).
CLASSES = {"torch.cuda.Stream": "Stream", "torch.cuda.Event": "Event"}


class CudaCalls(Codemod):
    """Functions wherever they are named, classes where they are instantiated."""

    name: ClassVar[str] = "cuda-calls"
    summary: ClassVar[str] = "torch.cuda functions ask the current accelerator"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.Attribute, cst.Call)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if isinstance(original, cst.Call) and isinstance(updated, cst.Call):
            name = context.bindings.qualified(original.func) or ""
            bare = isinstance(original.func, cst.Name)
            target = CLASSES.get(name) or (FUNCTIONS.get(name) if bare else None)
            return updated.with_changes(func=device_name(target)) if target else updated
        if context.within(cst.Annotation):
            return updated
        target = FUNCTIONS.get(context.bindings.qualified(original) or "")
        return device_name(target) if target else updated


class BarrierDevices(Codemod):
    """``device_ids=[torch.cuda.current_device()]``: a list that gloo's barrier refuses."""

    name: ClassVar[str] = "barrier-devices"
    summary: ClassVar[str] = "barriers name a device only where there is one"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.Arg,)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if not isinstance(original, cst.Arg) or not isinstance(updated, cst.Arg):
            return updated
        value = original.value
        if not (
            original.keyword is not None
            and original.keyword.value == "device_ids"
            and isinstance(value, cst.List)
            and len(value.elements) == 1
            and isinstance(call := value.elements[0].value, cst.Call)
            and context.bindings.qualified(call.func) == "torch.cuda.current_device"
        ):
            return updated
        return updated.with_changes(value=device_call("device_ids"))
