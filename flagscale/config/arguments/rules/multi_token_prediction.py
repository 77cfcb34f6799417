"""Rules of multi-token prediction, whose layers predict tokens further ahead. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flagscale.config.arguments.rules.optimizer import CUDA_GRAPH, captures_steps
from flagscale.config.arguments.rules.parallel_layout import layout_of_chunks
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.values import format_value

MTP = "mtp_num_layers"
_LOSS_SCALE = "mtp_loss_scaling_factor"
_LAYOUT = "pipeline_model_parallel_layout"
_EXCLUDED_BY_MTP: Mapping[str, str] = {
    "scale_embeddings": "its layers take embeddings as they are",
    "sandwich_norm": "its layers are of DeepSeek-V3's kind",
    "window_size": "its layers see the whole sequence",
}
"""What multi-token prediction does not go with, and why."""


def check_mtp(values: Values) -> Iterator[Violation]:
    """Check multi-token prediction."""
    layers = values[MTP]
    if layers is not None and layers < 0:
        yield MTP, f"{layers}: expected how many layers predict further tokens; leave it out"
        return
    if values[_LOSS_SCALE] < 0:
        yield _LOSS_SCALE, f"{values[_LOSS_SCALE]}: expected a weight of a loss, from 0"
    yield from _check_mtp_place(values)
    if not layers:
        return
    if values["family"] != "gpt":
        yield MTP, f"{layers} with family {values['family']}: it tells no next token; leave it out"
    for name, reason in _EXCLUDED_BY_MTP.items():
        if values[name]:
            yield MTP, f"{layers} with {name} {format_value(values[name])}: {reason}; leave one out"
    if captures_steps(values):
        message = f"{layers} with {CUDA_GRAPH} {values[CUDA_GRAPH]}: its losses are added up "
        yield MTP, message + "outside of what is captured; leave one out"
    if (kind := values["position_embedding_type"]) not in ("rope", "none"):
        actual = f"{format_value(kind)} with {MTP} {layers}"
        yield (
            "position_embedding_type",
            f"{actual}: positions would be learned by two embeddings; take rope",
        )
    length = values["seq_length"]
    if length is not None and layers >= length:
        yield MTP, f"{layers}: expected fewer than seq_length {length}, or there is nothing to tell"


def _check_mtp_place(values: Values) -> Iterator[Violation]:
    """A layout by hand names the layers, all of them beside the loss."""
    if values[_LAYOUT] is None:
        return
    *earlier, last = layout_of_chunks(values)
    layers = values[MTP] or 0
    if any("m" in chunk for chunk in earlier) or last.count("m") != layers:
        message = f"{values[_LAYOUT]}: expected {layers} m ({MTP}) beside the L, where the loss is"
        yield _LAYOUT, message + ", and none before"
