"""Parts of layers that some families have and Llama's do not: Gemma's. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.spec import arg
from flagscale.config.arguments.values import shown


@dataclass
class Architecture:
    """What a transformer's layers have beside megatron.core's options (docs/models.md); a part of
    the configuration that layers are built from, which is not frozen."""

    sandwich_norm: bool = arg(
        False,
        "Norms behind attention and MLP too, before their outputs are added to what they came from "
        "(Gemma 2 and 3)",
    )
    scale_embeddings: bool = arg(
        False, "Multiply a token's embedding by the root of hidden_size (Gemma)"
    )
    attn_logit_softcapping: float | None = arg(
        None,
        "Bound attention's scores s to this c by c tanh(s / c) (Gemma 2); attention is then "
        "computed in plain steps, with all scores in memory",
        minimum=0.001,
    )
    final_logit_softcapping: float | None = arg(
        None, "Bound the logits in the same way (Gemma 2)", minimum=0.001
    )
    window_rotary_base: int | None = arg(
        None,
        "Base of the rotary frequencies of layers with a window (window_size); rotary_base and its "
        "scaling are then of the others (Gemma 3)",
        minimum=1,
    )


OWN = tuple(field.name for field in fields(Architecture))


def broken(values: Values) -> Iterator[Broken]:
    """What cannot be, of parts of layers."""
    if values["layernorm_zero_centered_gamma"] and values["normalization"] != "RMSNorm":
        yield (
            "layernorm_zero_centered_gamma",
            f"true with normalization {values['normalization']}: RMSNorm alone has it here",
        )
    if values["window_rotary_base"] and values["position_embedding_type"] != "rope":
        yield (
            "window_rotary_base",
            f"{values['window_rotary_base']} needs position_embedding_type: rope, found "
            f"{shown(values['position_embedding_type'])}",
        )
    yield from _windows(values)
    for name in ("window_size", "attn_logit_softcapping"):
        if values[name]:
            yield from _kernels(name, values)


def _windows(values: Values) -> Iterator[Broken]:
    window, pattern = values["window_size"], values["window_attn_skip_freq"]
    if not window:
        return
    if len(window) != 2 or window[0] < 0 or window[1] != 0:
        yield (
            "window_size",
            f"{shown(window)}: expected how many tokens before its own a token attends to, and 0, "
            "such as [4095, 0]",
        )
    layers = values["num_layers"]
    if isinstance(pattern, list) and len(pattern) != layers:
        message = f"{len(pattern)} items, but num_layers is {layers}"
        yield "window_attn_skip_freq", message
    elif pattern == 0:
        yield "window_attn_skip_freq", "0: expected 2 for every second layer, or a list"


def _kernels(name: str, values: Values) -> Iterator[Broken]:
    """Attention that has windows, or bounds its scores."""
    found, backend = shown(values[name]), values["attention_backend"]
    cores = backend == "local" and name == "window_size"
    if backend not in ("auto", "unfused") and not cores:
        message = f"{found} is not possible with attention_backend: {backend}, whose kernel has no "
        yield name, message + "such thing; take auto"
    if values["context_parallel_size"] > 1:
        yield (
            name,
            f"{found} with context_parallel_size {values['context_parallel_size']}: each rank's "
            "part of a sequence would need a mask of its own; take tensor parallelism",
        )
