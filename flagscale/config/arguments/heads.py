"""What is asked of attention's positions, norms and scores, whichever kernel computes it.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.values import shown

_UNTURNED = "no_rope_freq"


def broken(values: Values) -> Iterator[Broken]:
    """What cannot be, of attention."""
    scale = values["softmax_scale"]
    if scale is not None and scale <= 0:
        message = f"{shown(scale)}: expected more than 0; without it one over the root of a head's "
        yield "softmax_scale", message + "width is taken"
    if values["qk_l2_norm"] and values["qk_layernorm"] and not values["multi_latent_attention"]:
        yield "qk_layernorm", "true with qk_l2_norm: queries and keys have one norm; leave one out"
    yield from _unturned(values)
    if values["position_embedding_type"] == "rope":
        yield from _turned(values)


def _turned(values: Values) -> Iterator[Broken]:
    """Rotary positions turn pairs of a head's numbers."""
    name, share = "kv_channels", values["rotary_percent"]
    if values["multi_latent_attention"]:
        name, share = "qk_pos_emb_head_dim", 1.0
    width, found = values[name], shown(values[name])
    if width is None:
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        if hidden % heads:
            return  # told elsewhere
        width, name = hidden // heads, "hidden_size"
        found = f"{hidden} / num_attention_heads {heads} = {width}"
    if width % 2 and int(width * share) == width:
        yield name, f"{found}: rotary positions turn pairs of numbers; take an even width of a head"


def _unturned(values: Values) -> Iterator[Broken]:
    """Layers without rotary positions: every so many, or a list."""
    given, layers = values[_UNTURNED], values["num_layers"]
    if isinstance(given, (list, tuple)):
        if given and len(given) != layers:
            yield _UNTURNED, f"{len(given)} items, but num_layers is {layers}"
    elif given and (given < 0 or layers % given):
        yield _UNTURNED, f"{given} does not divide num_layers {layers}; a list names every layer"
