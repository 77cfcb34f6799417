"""What is asked of multi-token prediction, whose layers tell further tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flagscale.config.arguments import graphs
from flagscale.config.arguments.pipeline import layout_of_chunks
from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.values import shown

MTP = "mtp_num_layers"
_SCALE = "mtp_loss_scaling_factor"
_LAYOUT = "pipeline_model_parallel_layout"

_EXCLUDED: Mapping[str, str] = {
    "scale_embeddings": "its layers take embeddings as they are",
    "sandwich_norm": "its layers are of DeepSeek-V3's kind",
    "window_size": "its layers see the whole sequence",
}
"""What multi-token prediction does not go with, and why."""


def broken(values: Values) -> Iterator[Broken]:
    """What cannot be, of multi-token prediction."""
    layers = values[MTP]
    if layers is not None and layers < 0:
        yield MTP, f"{layers}: expected how many layers predict further tokens; leave it out"
        return
    if values[_SCALE] < 0:
        yield _SCALE, f"{values[_SCALE]}: expected a weight of a loss, from 0"
    yield from _placed(values)
    if not layers:
        return
    if values["family"] != "gpt":
        yield MTP, f"{layers} with family {values['family']}: it tells no next token; leave it out"
    for name, reason in _EXCLUDED.items():
        if values[name]:
            yield MTP, f"{layers} with {name} {shown(values[name])}: {reason}; leave one out"
    if graphs.captures_steps(values):
        message = f"{layers} with {graphs.NAME} {values[graphs.NAME]}: its losses are added up "
        yield MTP, message + "outside of what is captured; leave one out"
    if (kind := values["position_embedding_type"]) not in ("rope", "none"):
        found = f"{shown(kind)} with {MTP} {layers}"
        yield (
            "position_embedding_type",
            f"{found}: positions would be learned by two embeddings; take rope",
        )
    length = values["seq_length"]
    if length is not None and layers >= length:
        yield MTP, f"{layers}: expected fewer than seq_length {length}, or there is nothing to tell"


def _placed(values: Values) -> Iterator[Broken]:
    """A layout by hand names the layers, all of them beside the loss."""
    if values[_LAYOUT] is None:
        return
    *others, last = layout_of_chunks(values)
    layers = values[MTP] or 0
    if any("m" in chunk for chunk in others) or last.count("m") != layers:
        message = f"{values[_LAYOUT]}: expected {layers} m ({MTP}) beside the L, where the loss is"
        yield _LAYOUT, message + ", and none before"
