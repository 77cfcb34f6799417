"""Rules of the optimizer, of gradient reduction and its overlap, and of captured steps (CUDA
graphs).

``cuda_graph_impl: local`` with ``cuda_graph_scope: full_iteration`` launches a step as one graph.
``comm: {tail: bounded}`` bounds the time of an all_reduce of gradients. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.values import format_value

CUDA_GRAPH, CUDA_GRAPH_SCOPE, FULL_ITERATION = (
    "cuda_graph_impl",
    "cuda_graph_scope",
    "full_iteration",
)
_WITHOUT_COMMUNICATION = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "enable_hetero": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
}
"""Values without which ranks communicate within a step's passes."""
_RANDOM_STATE = "the state of random numbers is kept on the host"
_CAPTURABLE = {
    "fp16": (False, "the loss scale is the host's to change; bf16 has none"),
    "num_moe_experts": (None, "how many tokens an expert gets is asked of the device"),
    "recompute_granularity": (None, _RANDOM_STATE),
    "hidden_dropout": (0.0, _RANDOM_STATE),
    "attention_dropout": (0.0, _RANDOM_STATE),
    "lora_dropout": (0.0, _RANDOM_STATE),
}
"""Values that a step's passes can be captured with, and why no others."""


def captures_steps(values: Values) -> bool:
    """Return whether the passes of a step are captured once and then launched as one graph."""
    return bool(values[CUDA_GRAPH] == "local")


def check_cuda_graphs(values: Values) -> Iterator[Violation]:
    """Check that a step can be captured."""
    if values[CUDA_GRAPH] == "none":
        return
    if values[CUDA_GRAPH] != "local":
        yield (
            CUDA_GRAPH,
            f"{values[CUDA_GRAPH]} needs Transformer Engine; local with {CUDA_GRAPH_SCOPE}: "
            f"{FULL_ITERATION} captures whole "
            "steps without it",
        )
        return
    scope = values[CUDA_GRAPH_SCOPE] or ()
    if list([scope] if isinstance(scope, str) else scope) != [FULL_ITERATION]:
        yield (
            CUDA_GRAPH_SCOPE,
            f"{format_value(scope)}: only whole steps are captured here; write {FULL_ITERATION}",
        )
    for name, alone in _WITHOUT_COMMUNICATION.items():
        if (values[name] or alone) != alone:
            yield (
                name,
                f"{format_value(values[name])}: ranks would communicate within a captured step",
            )
    for name, (plain, reason) in _CAPTURABLE.items():
        if (values[name] or plain) != plain:
            yield name, f"{format_value(values[name])} cannot be captured ({CUDA_GRAPH}): {reason}"


BOUNDED_OPTION = "tail=bounded"
BOUNDED_VARIABLE = ("FSCCL_TAIL", "bounded")
"""The same from ``experiment.envs``."""


def check_bounded_all_reduce(values: Values) -> Iterator[Violation]:
    """Check that gradients are reduced by all_reduce if bounded all_reduces are requested."""
    if BOUNDED_OPTION in (values["comm"] or ()) and "fsccl" in values["distributed_backend"]:
        yield from exact_reductions(values, "comm: {tail: bounded}")


def exact_reductions(values: Values, name: str) -> Iterator[Violation]:
    """Arguments by which gradients would be summed exactly although bounded sums are asked for.

    ``given`` is what asks for them, as the user wrote it.
    """
    if values["use_distributed_optimizer"]:
        yield (
            "use_distributed_optimizer",
            f"true with {name}: it sums gradients by reduce_scatter, which is exact, so nothing "
            "would be bounded; set it to false, or leave out the other",
        )


OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Precisions of the optimizer's state, which only Transformer Engine's optimizer can lower."""


def check_optimizer(values: Values) -> Iterator[Violation]:
    for name in OPTIMIZER_DTYPES:
        if str(values.get(name) or "fp32").rpartition(".")[2] not in ("fp32", "float32"):
            yield name, f"{values[name]!r} needs Transformer Engine's optimizer; leave it out"
    if values["optimizer"] not in ("adam", "sgd"):
        yield "optimizer", f"{values['optimizer']!r}: expected 'adam' or 'sgd'"
    if values["optimizer"] == "sgd" and values["use_distributed_optimizer"]:
        yield "optimizer", "sgd with use_distributed_optimizer: megatron.core shards Adam alone"
    for activation in ("swiglu", "squared_relu"):
        if values["openai_gelu"] and values[activation]:
            yield "openai_gelu", f"excludes {activation}: an MLP has one function"


def check_overlap(values: Values) -> Iterator[Violation]:
    if values["overlap_param_gather"] and not values["use_distributed_optimizer"]:
        yield "overlap_param_gather", "needs use_distributed_optimizer"
    elif values["overlap_param_gather"] and not values["overlap_grad_reduce"]:
        yield "overlap_param_gather", "needs overlap_grad_reduce"
