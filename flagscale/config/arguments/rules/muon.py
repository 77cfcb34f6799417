"""Rules of Muon, which trains the matrices of layers, and Adam, which trains everything else.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config.arguments.spec.argument import Values, Violation

MUON, DIST_MUON = ("muon", "dist_muon"), "dist_muon"
"""Values of ``optimizer``. Megatron-LM's dist_muon is muon with a sharded state."""
ADAM_FAMILY = ("adam", *MUON)
"""Optimizers that train at least some weights by Adam."""
OPTIMIZERS = (*ADAM_FAMILY, "sgd")
DUPLICATED, DISTRIBUTED, BLOCKWISE = "duplicated", "distributed", "blockwise"
"""Values of ``muon_tp_mode``."""
_EMBEDDINGS = ("embedding.", "output_layer.")
"""Modules whose weights Adam trains."""


def uses_muon(values: Values) -> bool:
    """Return whether matrices are trained by Muon."""
    return values["optimizer"] in MUON


def optimizer_kind(values: Values) -> str:
    """Return the optimizer that determines the states of a checkpoint."""
    return "muon" if uses_muon(values) else str(values["optimizer"])


def is_muon_parameter(name: str, dimensions: int) -> bool:
    """Return whether Muon trains a parameter: a matrix, or one matrix per expert, that belongs
    neither to an embedding nor to the output layer.

    Args:
        name: name of the parameter in the model.
        dimensions: number of its dimensions.
    """
    return dimensions >= 2 and not any(module in name for module in _EMBEDDINGS)


def check_muon(values: Values) -> Iterator[Violation]:
    """Check what Muon does not support."""
    if not uses_muon(values):
        return
    is_sharded = values["use_distributed_optimizer"]
    if values["optimizer"] == DIST_MUON and not is_sharded:
        yield (
            "optimizer",
            "dist_muon requires use_distributed_optimizer: true, which shards the state of Muon "
            "and Adam over the data-parallel ranks; muon works with it and without it",
        )
    if values["fp16"]:
        yield "optimizer", f"{values['optimizer']} is not supported with fp16; use bf16"
    if values["peft_type"]:
        yield (
            "optimizer",
            f"{values['optimizer']} is not supported with peft_type: {values['peft_type']}, whose "
            "matrices are factors of an update; use adam",
        )
    if not values["decoupled_weight_decay"]:
        yield (
            "decoupled_weight_decay",
            "false is not supported by Muon, whose update does not depend on the size of gradients",
        )
    if values["enable_hetero"] and values["hetero_mode"] == "dp" and not is_sharded:
        yield (
            "optimizer",
            f"{values['optimizer']} requires use_distributed_optimizer: true with hetero_mode: dp, "
            "because devices of different types round matrix products differently and their copies "
            "of the weights would drift apart",
        )
