"""Device, backend and tensor-type names written as string literals."""

from __future__ import annotations

import re
from typing import ClassVar

import libcst as cst

from flagscale.patching.codemods.base import Codemod, FileContext, device_call, device_name

#: Keyword arguments whose value is a device or the type of one.
_DEVICE_KEYWORDS = frozenset({"device", "device_type", "map_location"})
#: Functions and methods that take a device, or the type of one, by position.
_DEVICE_TAKERS = frozenset(
    {"autocast", "device", "from_group", "init_data", "init_device_mesh", "to", "to_empty"}
)
_CUDA_TENSOR = re.compile(r"torch\.cuda\.\w+Tensor")


def _text(node: cst.CSTNode) -> str | None:
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None


def _argument(context: FileContext, node: cst.CSTNode) -> tuple[cst.Call, cst.Arg] | None:
    """The call and the argument whose value ``node`` is, alone or as a branch of a ternary."""
    child = node
    for i in range(len(context.ancestors) - 1, 0, -1):
        parent = context.ancestors[i]
        if isinstance(parent, cst.IfExp) and child is not parent.test:
            child = parent
        elif isinstance(parent, cst.Arg) and isinstance(call := context.ancestors[i - 1], cst.Call):
            return call, parent
        else:
            return None
    return None


def _last_name(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


class DeviceLiterals(Codemod):
    """``"cuda"`` given to something that takes a device."""

    name: ClassVar[str] = "device-literals"
    summary: ClassVar[str] = 'the literal device "cuda" becomes the current accelerator'
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.SimpleString,)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if _text(original) != "cuda" or (found := _argument(context, original)) is None:
            return updated
        call, argument = found
        if argument.keyword is not None:
            takes_device = argument.keyword.value in _DEVICE_KEYWORDS
        else:
            takes_device = argument.star == "" and _last_name(call.func) in _DEVICE_TAKERS
        return device_call("device_type") if takes_device else updated


class TensorTypes(Codemod):
    """``x.type() == "torch.cuda.FloatTensor"`` and ``… in ["torch.cuda.HalfTensor", …]``."""

    name: ClassVar[str] = "tensor-types"
    summary: ClassVar[str] = "tensor types are compared with the current accelerator's names"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.SimpleString,)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        text = _text(original)
        if text is None or not _CUDA_TENSOR.fullmatch(text) or not self._compared(context):
            return updated
        literal = cst.ensure_type(updated, cst.SimpleString)
        return device_call("tensor_type", [cst.Arg(literal)])

    @staticmethod
    def _compared(context: FileContext) -> bool:
        displays = cst.Element | cst.List | cst.Tuple | cst.Set
        for node in reversed(context.ancestors):
            if not isinstance(node, displays):
                return isinstance(node, cst.ComparisonTarget | cst.Comparison)
        return False


class GroupBackends(Codemod):
    """``backend="nccl"`` of a new process group."""

    name: ClassVar[str] = "group-backends"
    summary: ClassVar[str] = "groups that named nccl use the job's own backend without CUDA"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.Arg,)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if not isinstance(original, cst.Arg) or not isinstance(updated, cst.Arg):
            return updated
        named = original.keyword is not None and original.keyword.value == "backend"
        if not named or _text(original.value) != "nccl":
            return updated
        call = device_call("group_backend", [cst.Arg(updated.value)])
        return updated.with_changes(value=call)


class PinnedFactories(Codemod):
    """``pin_memory=True`` of a factory call, which fails where there is no device to copy to."""

    name: ClassVar[str] = "pinned-factories"
    summary: ClassVar[str] = "tensors are created in pinned memory only for a device"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.Arg,)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if not isinstance(original, cst.Arg) or not isinstance(updated, cst.Arg):
            return updated
        call = context.ancestors[-1]
        if not (
            original.keyword is not None
            and original.keyword.value == "pin_memory"
            and isinstance(original.value, cst.Name)
            and original.value.value == "True"
            and isinstance(call, cst.Call)
            and (context.bindings.qualified(call.func) or "").startswith("torch.")
        ):
            return updated
        return updated.with_changes(value=cst.Call(device_name("has_device")))
