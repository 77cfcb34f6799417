"""Rules of Muon, which trains the matrices of layers while Adam trains everything else, and of
Lion. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config.arguments.spec.argument import Values, Violation

MUON, DIST_MUON = ("muon", "dist_muon"), "dist_muon"
"""Values of ``optimizer``. Megatron-LM's dist_muon is muon with a sharded state."""
LION = "lion"
ADAM_FAMILY = ("adam", *MUON)
"""Optimizers that train at least some weights by Adam."""
OPTIMIZERS = (*ADAM_FAMILY, LION, "sgd")
_ADAM_NAMES = ("adam_beta1", "adam_beta2", "adam_eps")
_HYPERPARAMETERS = {
    **dict.fromkeys(ADAM_FAMILY, _ADAM_NAMES),
    LION: ("lion_beta1", "lion_beta2"),
    "sgd": ("sgd_momentum",),
}
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


def hyperparameter_names(values: Values) -> tuple[str, ...]:
    """Return the arguments of an optimizer that a checkpoint keeps with its schedule."""
    return _HYPERPARAMETERS[values["optimizer"]]


def is_muon_parameter(name: str, dimensions: int) -> bool:
    """Return whether Muon trains a parameter: a matrix, or one matrix per expert, that belongs
    neither to an embedding nor to the output layer.

    Args:
        name: name of the parameter in the model.
        dimensions: number of its dimensions.
    """
    return dimensions >= 2 and not any(module in name for module in _EMBEDDINGS)


def check_other_optimizers(values: Values) -> Iterator[Violation]:
    """Check what Muon and Lion do not support."""
    optimizer = values["optimizer"]
    if optimizer in (*MUON, LION) and not values["decoupled_weight_decay"]:
        yield (
            "decoupled_weight_decay",
            f"false is not supported by {optimizer}, whose update does not depend on the size of "
            "gradients",
        )
    if optimizer not in MUON:
        return
    is_sharded = values["use_distributed_optimizer"]
    if optimizer == DIST_MUON and not is_sharded:
        yield (
            "optimizer",
            "dist_muon requires use_distributed_optimizer: true, which shards the state of Muon "
            "and Adam over the data-parallel ranks; muon works with it and without it",
        )
    if values["fp16"]:
        yield "optimizer", f"{optimizer} is not supported with fp16; use bf16"
    if values["peft_type"]:
        yield (
            "optimizer",
            f"{optimizer} is not supported with peft_type: {values['peft_type']}, whose "
            "matrices are factors of an update; use adam",
        )
    if values["enable_hetero"] and values["hetero_mode"] == "dp" and not is_sharded:
        yield (
            "optimizer",
            f"{optimizer} requires use_distributed_optimizer: true with hetero_mode: dp, "
            "because devices of different types round matrix products differently and their copies "
            "of the weights would drift apart",
        )
