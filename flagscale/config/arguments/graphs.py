"""Steps that are launched as one graph: ``cuda_graph_impl: local`` with ``cuda_graph_scope:
full_iteration``, as megatron.core calls it."""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.values import shown

NAME, SCOPE, WHOLE = "cuda_graph_impl", "cuda_graph_scope", "full_iteration"

_ALONE = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "enable_hetero": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
}
"""Values without which ranks communicate within a step's passes."""
_RANDOM = "the state of random numbers is kept on the host"
_PLAIN = {
    "fp16": (False, "the loss scale is the host's to change; bf16 has none"),
    "num_moe_experts": (None, "how many tokens an expert gets is asked of the device"),
    "recompute_granularity": (None, _RANDOM),
    "hidden_dropout": (0.0, _RANDOM),
    "attention_dropout": (0.0, _RANDOM),
    "lora_dropout": (0.0, _RANDOM),
}
"""Values that a step's passes can be captured with, and why no others."""


def captures_steps(values: Values) -> bool:
    """Whether a step's passes are captured once and launched as one from then on."""
    return bool(values[NAME] == "local")


def broken(values: Values) -> Iterator[Broken]:
    """What does not go with captured steps."""
    if values[NAME] == "none":
        return
    if values[NAME] != "local":
        yield (
            NAME,
            f"{values[NAME]} needs Transformer Engine; local with {SCOPE}: {WHOLE} captures whole "
            "steps without it",
        )
        return
    scope = values[SCOPE] or ()
    if list([scope] if isinstance(scope, str) else scope) != [WHOLE]:
        yield SCOPE, f"{shown(scope)}: only whole steps are captured here; write {WHOLE}"
    for name, alone in _ALONE.items():
        if (values[name] or alone) != alone:
            yield name, f"{shown(values[name])}: ranks would communicate within a captured step"
    for name, (plain, reason) in _PLAIN.items():
        if (values[name] or plain) != plain:
            yield name, f"{shown(values[name])} cannot be captured ({NAME}): {reason}"
