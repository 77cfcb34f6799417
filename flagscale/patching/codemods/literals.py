"""Rewrites of device, backend and tensor-type names in string literals."""

from __future__ import annotations

import re
from typing import ClassVar

import libcst as cst

from flagscale.patching.codemods.base import (
    Codemod,
    FileContext,
    KeywordCodemod,
    device_call,
    device_name,
)

#: Keyword arguments whose value is a device or the type of one.
_DEVICE_KEYWORDS = frozenset({"device", "device_type", "map_location"})
#: Functions and methods that take a device, or the type of one, by position.
_DEVICE_FUNCTIONS = frozenset(
    {"autocast", "device", "from_group", "init_data", "init_device_mesh", "to", "to_empty"}
)
_CUDA_TENSOR = re.compile(r"torch\.cuda\.\w+Tensor")


def _string_value(node: cst.CSTNode) -> str | None:
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None


def _find_argument(context: FileContext, node: cst.CSTNode) -> tuple[cst.Call, cst.Arg] | None:
    """Return the call and argument whose value is ``node``, or a ternary with that branch."""
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
    """Rewrites ``"cuda"`` where a device is expected."""

    name: ClassVar[str] = "device-literals"
    summary: ClassVar[str] = 'the literal device "cuda" becomes the current accelerator'
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.SimpleString,)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if (
            _string_value(original) != "cuda"
            or (call_and_argument := _find_argument(context, original)) is None
        ):
            return updated
        call, argument = call_and_argument
        if argument.keyword is not None:
            takes_device = argument.keyword.value in _DEVICE_KEYWORDS
        else:
            takes_device = argument.star == "" and _last_name(call.func) in _DEVICE_FUNCTIONS
        return device_call("device_type") if takes_device else updated


class TensorTypes(Codemod):
    """Rewrites ``x.type() == "torch.cuda.FloatTensor"`` and ``… in […]``."""

    name: ClassVar[str] = "tensor-types"
    summary: ClassVar[str] = "tensor types are compared with the current accelerator's names"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.SimpleString,)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        text = _string_value(original)
        if text is None or not _CUDA_TENSOR.fullmatch(text) or not self._is_compared(context):
            return updated
        literal = cst.ensure_type(updated, cst.SimpleString)
        return device_call("tensor_type", [cst.Arg(literal)])

    @staticmethod
    def _is_compared(context: FileContext) -> bool:
        displays = cst.Element | cst.List | cst.Tuple | cst.Set
        for node in reversed(context.ancestors):
            if not isinstance(node, displays):
                return isinstance(node, cst.ComparisonTarget | cst.Comparison)
        return False


class GroupBackends(KeywordCodemod):
    """Rewrites ``backend="nccl"`` of a new process group."""

    name: ClassVar[str] = "group-backends"
    summary: ClassVar[str] = "groups that name nccl use the job's own backend without CUDA"
    keyword: ClassVar[str] = "backend"

    def replace_value(
        self, original: cst.BaseExpression, updated: cst.BaseExpression, context: FileContext
    ) -> cst.BaseExpression | None:
        if _string_value(original) != "nccl":
            return None
        return device_call("group_backend", [cst.Arg(updated)])


class PinnedFactories(KeywordCodemod):
    """Rewrites ``pin_memory=True`` of a factory call, which fails if there is no device."""

    name: ClassVar[str] = "pinned-factories"
    summary: ClassVar[str] = "tensors are created in pinned memory only if there is a device"
    keyword: ClassVar[str] = "pin_memory"

    def replace_value(
        self, original: cst.BaseExpression, updated: cst.BaseExpression, context: FileContext
    ) -> cst.BaseExpression | None:
        call = context.ancestors[-1]
        if (
            isinstance(original, cst.Name)
            and original.value == "True"
            and isinstance(call, cst.Call)
            and (context.bindings.resolve_name(call.func) or "").startswith("torch.")
        ):
            return cst.Call(device_name("has_device"))
        return None
