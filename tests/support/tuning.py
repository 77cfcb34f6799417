"""Search problems of small models for tests."""

from __future__ import annotations

from typing import Any

from flagscale.config.arguments.check import check_values
from flagscale.config.arguments.layout import check_world_size
from flagscale.config.arguments.layout_choices import CHOSEN_ARGUMENTS
from flagscale.config.arguments.spec.argument import Values
from flagscale.estimate.plan import get_device_spec
from flagscale.tune.machine import make_cpu_machine, make_gpu_machine
from flagscale.tune.prediction import PredictedMemory, Prediction
from flagscale.tune.space import Layout, SearchProblem
from support.arguments import train_arguments

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "seq_length": 64,
    "swiglu": True,
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 10,
    "lr": 1e-3,
    "vocab_size": 256,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
}
MIXTURE: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2}


def model_values(**changes: Any) -> Values:
    """Return the arguments of a small Llama."""
    return train_arguments(model={**SIZES, **changes}).values


def make_problem(
    ranks: int = 4, device: str | None = None, *, requested: Any = None, **changes: Any
) -> SearchProblem:
    """Return the search problem of a small Llama on CPU cores, or on devices of a type."""
    spec = get_device_spec(device)
    machine = (
        make_cpu_machine(ranks, ranks, 2)
        if device is None
        else make_gpu_machine(ranks, min(ranks, 8), spec, None)
    )
    return SearchProblem(model_values(**changes), machine, 256, requested or {})


def is_legal(values: Values, ranks: int) -> bool:
    """Return whether the checks of a launch accept arguments."""
    return not (check_values(values) or check_world_size(values, ranks))


def fake_layout(seconds: float = 1.0, memory_bytes: float = 1e9, **setting: Any) -> Layout:
    """Return a layout with a prediction that is all computation."""
    sizes = {**{name: model_values()[name] for name in CHOSEN_ARGUMENTS}, **setting}
    memory = PredictedMemory(memory_bytes, 0.0, 0.0)
    return Layout(sizes, Prediction(memory, {"compute": seconds}))
