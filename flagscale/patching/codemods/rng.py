"""Rewrites of random-number state handling for tensor parallelism.

Megatron accesses CUDA's generators below ``torch.cuda``'s public functions, so renaming calls is
not enough. Without a device, the call that restores a forked state would be queued until CUDA
starts, which never happens, and dropout would silently use the wrong stream from then on.
"""

from __future__ import annotations

from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from flagscale.patching.codemods.base import Codemod, FileContext, device_call

_GETTER = "_get_cuda_rng_state"
_SETTER = "_set_cuda_rng_state"


class RngState(Codemod):
    """Makes the functions that read and write the generator's state return early without CUDA."""

    name: ClassVar[str] = "rng-state"
    summary: ClassVar[str] = "RNG states are saved and restored on the current accelerator"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.FunctionDef,)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if not isinstance(updated, cst.FunctionDef) or context.is_within(cst.FunctionDef):
            return updated
        if updated.name.value == _GETTER:
            return _return_early(updated, device_call("get_rng_state"))
        if updated.name.value == _SETTER and updated.params.params:
            state = cst.Arg(updated.params.params[0].name)
            return _return_early(updated, device_call("set_rng_state", [state]))
        return updated


def _return_early(function: cst.FunctionDef, value: cst.BaseExpression) -> cst.FunctionDef:
    """Insert ``if not accelerator.is_cuda(): return <value>`` first, after the docstring."""
    guard = cst.If(
        test=cst.UnaryOperation(cst.Not(), device_call("is_cuda")),
        body=cst.IndentedBlock([cst.SimpleStatementLine([cst.Return(value)])]),
    )
    body = cst.ensure_type(function.body, cst.IndentedBlock)
    position = 1 if function.get_docstring() is not None else 0
    statements = [*body.body[:position], guard, *body.body[position:]]
    return function.with_changes(body=body.with_changes(body=statements))


class RngForkWarning(Codemod):
    """Allows the CPU generator to advance inside ``fork`` if it is the device's generator."""

    name: ClassVar[str] = "rng-fork-warning"
    summary: ClassVar[str] = "the CPU generator may move inside a fork where it is the device's"
    handles: ClassVar[tuple[type[cst.CSTNode], ...]] = (cst.If,)

    def rewrite(
        self, original: cst.CSTNode, updated: cst.CSTNode, context: FileContext
    ) -> cst.CSTNode:
        if not isinstance(original, cst.If) or context.enclosing_function() != "fork":
            return updated
        calls = m.findall(original.test, m.Call())
        functions = [
            context.bindings.resolve_name(cst.ensure_type(c, cst.Call).func) for c in calls
        ]
        if "torch.get_rng_state" not in functions:
            return updated
        test = cst.BooleanOperation(
            device_call("has_device"), cst.And(), cst.ensure_type(updated, cst.If).test
        )
        return updated.with_changes(test=test)
